"""The 2D torus alone, in Keras's own `fit`: `uv run mpirun --oversubscribe -np 4 python -m examples.torus`."""
import horovod.tensorflow.keras as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

from distributed.exchange import GradientExchange
from distributed.optimizer import set_exchange, wrap
from distributed.torus import ProcessSets
from optim.lars import LARS

exchange = GradientExchange(ProcessSets(2, 2))
hvd.init(process_sets=exchange.process_sets)
images, labels = (part[hvd.rank()::hvd.size()] for part in load_digits(return_X_y=True))
model = tf.keras.Sequential([tf.keras.layers.Dense(64, activation="relu"), tf.keras.layers.Dense(10)])
optimizer = wrap(LARS(5.0, weight_decay=1e-4))
set_exchange(optimizer, exchange)
model.compile(optimizer, metrics=["accuracy"],
              loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
found = model.fit(images / 16, labels, batch_size=64, epochs=20, verbose=0,
                  callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)]).history["accuracy"][-1]
if hvd.rank() == 0:
    print(f"training accuracy {found:.3f}")
hvd.allreduce(tf.constant(0))  # mpirun ends all workers when the first one leaves
