"""Which of TensorFlow's errors mean that another worker is gone, and which of their lines a user gets."""
import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from common import errors
from distributed.lost import is_lost, lost_is_internal_error

WHERE = """Graph execution error:

Detected at node {node} defined at (most recent call last):
  File "/home/someone/bigbatch/train.py", line 147, in <module>

  File "{library}", line 130, in made

{message}
\t [[{{{{node {node}}}}}]] [Op:__inference_step_1125]"""
RESET = "[/tmp/src/gloo/transport/tcp/pair.cc:589] Read error [10.78.0.12]:56205: Connection reset by peer"
SHUT_DOWN = "Horovod has been shut down. This was caused by an exception on one of the ranks"
MEMORY = "OOM when allocating tensor with shape[64,224,224,64]"
DAMAGED = "Critical error in pipeline:\nError in CPU operator `fn.decoders.image`: damaged"


@pytest.mark.parametrize("node, library, message, lost, reason", [
    # as met: a named operation does not say that it is Horovod's
    ("flags_1", "/site-packages/horovod/tensorflow/mpi_ops.py", RESET, True, RESET),
    ("cond/HorovodAllreduce_grads_0", "/site-packages/keras/src/engine.py", RESET, True, RESET),
    ("torus_0_scatter", "/site-packages/keras/src/engine.py", SHUT_DOWN, True, SHUT_DOWN),
    ("conv1/Conv2D", "/site-packages/keras/src/engine.py", MEMORY, False, MEMORY),
    ("IteratorGetNext", "/site-packages/nvidia/dali/plugin/tf.py", DAMAGED, False, DAMAGED.splitlines()[1]),
])
def test_of_an_error_in_a_graph(node, library, message, lost, reason):
    assert hvd  # without which no worker is lost
    error = tf.errors.UnknownError(None, None, WHERE.format(node=node, library=library, message=message))
    assert is_lost(error) is lost
    assert errors.reason(error) == reason


def test_the_report_and_elastic_training_learn_it_in_words():
    text = WHERE.format(node="flags_1", library="/site-packages/horovod/tensorflow/mpi_ops.py", message=RESET)
    for error in (tf.errors.UnknownError(None, None, text), HorovodInternalError(text)):
        with pytest.raises(HorovodInternalError, match=r"^another worker has stopped; its own message says why"), \
                lost_is_internal_error():
            raise error
