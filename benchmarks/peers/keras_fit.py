"""Trains with Keras's `fit`: the network of train.py on one batch of random images, with SGD and momentum.

It evaluates 4 % as many images at the end, as train.py does on `synthetic` data.

    python -m benchmarks.peers.keras_fit MODEL IMAGE_SIZE BATCH STEPS
"""
import sys

import tensorflow as tf

import model_zoo


def main(name: str, image_size: str, batch_size: str, steps: str) -> None:
    size, batch = int(image_size), int(batch_size)
    model = model_zoo.create_model(name, 10, size)
    model.compile(tf.keras.optimizers.SGD(0.0, momentum=0.9), tf.keras.losses.SparseCategoricalCrossentropy(True),
                  metrics=["accuracy"])
    images = tf.cast(tf.random.uniform([batch, size, size, 3], 0, 256, tf.int32), tf.uint8)
    labels = tf.random.uniform([batch, 1], 0, 10, tf.int64)
    data = tf.data.Dataset.from_tensors((images, labels)).cache().repeat()
    model.fit(data, steps_per_epoch=int(steps), validation_data=data, validation_steps=int(steps) // 25, verbose=0)


if __name__ == "__main__":
    main(*sys.argv[1:])
