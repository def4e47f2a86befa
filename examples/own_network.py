"""A network of one's own, in Keras's layers: batch norm, dropout, and a base inside the model.

    uv run train.py --data_dir=DATA --model=examples.own_network:network

The model gets pixels from 0 to 255, because it starts with Rescaling. It returns logits, without a softmax.
"""
import tensorflow as tf

layers = tf.keras.layers


def network(x, classes, batch_norm_momentum, seed):
    """Returns a model from images, float32 (batch, *x.shape[1:]), to logits, float32 (batch, classes)."""
    del batch_norm_momentum, seed  # train.py sets the momentum of batch norm and the masks of dropout
    base = tf.keras.Sequential(name="base")  # or a network of tf.keras.applications, with include_top=False
    for channels in (16, 32, 64):
        base.add(layers.Conv2D(channels, 3, strides=2, padding="same", use_bias=False))
        base.add(layers.BatchNormalization())
        base.add(layers.ReLU())
    return tf.keras.Sequential([
        tf.keras.Input(x.shape[1:]), layers.Rescaling(1 / 127.5, offset=-1), base,
        layers.GlobalAveragePooling2D(), layers.Dropout(0.2), layers.Dense(classes, dtype="float32")])
