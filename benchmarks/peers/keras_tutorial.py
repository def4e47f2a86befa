"""The network of Keras's tutorial on image classification, trained as it says there.

    python -m benchmarks.peers.keras_tutorial FOLDER SEED [--augment]

FOLDER has train/CLASS/* and val/CLASS/*. Images have 180 x 180 pixels, batches 32; Adam with its default rate; 10
epochs, or with --augment the tutorial's second network, with augmentation and dropout, and 15 epochs. Prints the
validation top-1 after the last epoch.
"""
import sys

import tensorflow as tf

SIZE, BATCH = 180, 32


def main(folder, seed, augment=False):
    tf.keras.utils.set_random_seed(int(seed))
    layers = tf.keras.layers

    def images(split):
        return tf.keras.utils.image_dataset_from_directory(
            f"{folder}/{split}", seed=int(seed), image_size=(SIZE, SIZE), batch_size=BATCH, shuffle=split == "train",
            label_mode="int").cache()

    train, validation = images("train").shuffle(1000), images("val")
    changed = [layers.RandomFlip("horizontal"), layers.RandomRotation(0.1), layers.RandomZoom(0.1)] if augment else []
    convolutions = [layer for channels in (16, 32, 64)
                    for layer in (layers.Conv2D(channels, 3, padding="same", activation="relu"), layers.MaxPooling2D())]
    model = tf.keras.Sequential([
        *changed, layers.Rescaling(1 / 255), *convolutions, *([layers.Dropout(0.2)] if augment else []),
        layers.Flatten(), layers.Dense(128, activation="relu"), layers.Dense(len(list_classes(folder)))])
    model.compile("adam", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), ["accuracy"])
    past = model.fit(train, validation_data=validation, epochs=15 if augment else 10, verbose=0)
    print(past.history["val_accuracy"][-1])


def list_classes(folder):
    return tf.io.gfile.listdir(f"{folder}/train")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "--augment" in sys.argv)
