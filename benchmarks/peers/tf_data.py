"""tf.data as its guide recommends: parallel reads and maps, fused decoding and cropping, AUTOTUNE, no fixed order.

    python -m benchmarks.peers.tf_data DATASET IMAGE_SIZE BATCH THREADS [RAND_AUGMENT]

With RAND_AUGMENT, its number of operations follows, each with its probability, from those that Keras's layers have.
"""
import sys

import tensorflow as tf

from benchmarks.peers.turns import serve
from data.dataset import open_dataset
from data.formats.tfrecord import IMAGE, LABEL
from data.rand_augment import APPLIED, FILL, MOST, RandAugment

AUTOTUNE = tf.data.AUTOTUNE
SHUFFLED = 1024


def training_image(record, image_size: int, operated=lambda image: image):
    """Returns a random crop of a record's image, 8 to 100 % of its area, resized, and the label.

    Pixels and label have the same format as in bigbatch. operated: a function of the float32 image.
    """
    features = tf.io.parse_single_example(record, {IMAGE: tf.io.FixedLenFeature((), tf.string),
                                                   LABEL: tf.io.FixedLenFeature((1,), tf.int64)})
    encoded = features[IMAGE]
    start, size, _ = tf.image.sample_distorted_bounding_box(
        tf.image.extract_jpeg_shape(encoded), tf.zeros((0, 0, 4)), area_range=(0.08, 1.0),
        aspect_ratio_range=(3 / 4, 4 / 3), max_attempts=10, use_image_if_no_bounding_boxes=True)
    window = tf.stack([start[0], start[1], size[0], size[1]])
    image = tf.image.decode_and_crop_jpeg(encoded, window, channels=3)
    image = tf.image.random_flip_left_right(tf.image.resize(image, (image_size, image_size)))
    return tf.cast(operated(image), tf.uint8), features[LABEL]


def with_operations(count: int, magnitude: float):
    """Returns a function of an image: up to `count` of Keras's layers, which it draws for each image."""
    layers, filled = tf.keras.layers, {"fill_mode": "constant", "fill_value": FILL}
    share = magnitude / MOST
    chosen = [layers.RandomRotation(share * 30 / 360, **filled), layers.RandomContrast(0.9 * share),
              layers.RandomBrightness(0.9 * share), layers.RandomTranslation(0.45 * share, 0.0, **filled),
              layers.RandomTranslation(0.0, 0.45 * share, **filled)]

    def operated(image):
        for _ in range(count):
            index = tf.cast(tf.random.uniform(()) / APPLIED * len(chosen), tf.int32)  # above the last: identity
            branches = [lambda image=image, layer=layer: layer(image, training=True) for layer in chosen]
            image = tf.switch_case(index, branches, default=lambda image=image: image)
        return image

    return operated


def main(folder: str, image_size: str, batch_size: str, threads: str, operations: str = "none") -> None:
    del threads  # AUTOTUNE chooses
    paths = [str(path) for path in open_dataset(folder).train.paths]
    options = tf.data.Options()
    options.deterministic = False
    dataset = tf.data.Dataset.from_tensor_slices(paths).repeat()
    dataset = dataset.interleave(tf.data.TFRecordDataset, cycle_length=len(paths), num_parallel_calls=AUTOTUNE)
    dataset = dataset.shuffle(SHUFFLED)
    augment = RandAugment.parse(operations)
    more = (with_operations(augment.count, augment.magnitude),) if augment else ()
    dataset = dataset.map(lambda record: training_image(record, int(image_size), *more), num_parallel_calls=AUTOTUNE)
    dataset = dataset.batch(int(batch_size), drop_remainder=True).prefetch(AUTOTUNE).with_options(options)
    serve(iter(dataset).__next__, int(batch_size))


if __name__ == "__main__":
    main(*sys.argv[1:])
