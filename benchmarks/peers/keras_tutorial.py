"""The network of Keras's tutorial on image classification, trained as it says there.

    python -m benchmarks.peers.keras_tutorial FOLDER SEED [--augment] [--seconds=S]

FOLDER has train/CLASS/* and val/CLASS/*. Images have 180 x 180 pixels, batches 32; Adam with its default rate; 10
epochs, or with --augment the tutorial's second network, with augmentation and dropout, and 15 epochs. With --seconds,
training goes on until the process has had as much processor time. Prints the validation top-1 after the last epoch, and
that at the tutorial's own number of epochs with the processor seconds until then.
"""
import argparse
import json
import time

import tensorflow as tf

SIZE, BATCH = 180, 32


class Budget(tf.keras.callbacks.Callback):
    """Ends training after `epochs`, or when the process has had `seconds` of processor time, if that is later."""

    def __init__(self, epochs: int, seconds: float):
        super().__init__()
        self.epochs, self.seconds, self.result = epochs, seconds, {}

    def on_epoch_end(self, epoch, logs=None):
        self.result["top1"] = logs["val_accuracy"]
        if epoch + 1 == self.epochs:
            self.result |= {"own_top1": logs["val_accuracy"], "own_seconds": round(time.process_time(), 1)}
        self.model.stop_training = epoch + 1 >= self.epochs and time.process_time() >= self.seconds


def main(folder: str, seed: int, augment: bool, seconds: float) -> None:
    tf.keras.utils.set_random_seed(seed)
    layers = tf.keras.layers

    def images(split):
        return tf.keras.utils.image_dataset_from_directory(
            f"{folder}/{split}", seed=seed, image_size=(SIZE, SIZE), batch_size=BATCH, shuffle=split == "train",
            label_mode="int").cache()

    train, validation = images("train").shuffle(1000), images("val")
    changed = [layers.RandomFlip("horizontal"), layers.RandomRotation(0.1), layers.RandomZoom(0.1)] if augment else []
    convolutions = [layer for channels in (16, 32, 64)
                    for layer in (layers.Conv2D(channels, 3, padding="same", activation="relu"), layers.MaxPooling2D())]
    model = tf.keras.Sequential([
        *changed, layers.Rescaling(1 / 255), *convolutions, *([layers.Dropout(0.2)] if augment else []),
        layers.Flatten(), layers.Dense(128, activation="relu"), layers.Dense(len(list_classes(folder)))])
    model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), ["accuracy"])
    budget = Budget(15 if augment else 10, seconds)
    model.fit(train, validation_data=validation, epochs=10_000, verbose=0, callbacks=[budget])
    print(json.dumps(budget.result))


def list_classes(folder):
    return tf.io.gfile.listdir(f"{folder}/train")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("seed", type=int)
    parser.add_argument("--augment", action="store_true")
    parser.add_argument("--seconds", type=float, default=0)
    main(**vars(parser.parse_args()))
