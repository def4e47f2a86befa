"""tf.data as its guide recommends: parallel reads and maps, fused decoding and cropping, AUTOTUNE, no fixed order.

    python -m benchmarks.peers.tf_data DATASET IMAGE_SIZE BATCH THREADS
"""
import sys

import tensorflow as tf

from benchmarks.peers.turns import serve
from data.dataset import open_dataset
from data.formats.tfrecord import IMAGE, LABEL

AUTOTUNE = tf.data.AUTOTUNE
SHUFFLED = 1024


def training_image(record, image_size: int):
    """Returns a random crop of a record's image, 8 to 100 % of its area, resized, and the label.

    Pixels and label have the same format as in bigbatch.
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
    return tf.cast(image, tf.uint8), features[LABEL]


def main(folder: str, image_size: str, batch_size: str, threads: str) -> None:
    del threads  # AUTOTUNE chooses
    paths = [str(path) for path in open_dataset(folder).train.paths]
    options = tf.data.Options()
    options.deterministic = False
    dataset = tf.data.Dataset.from_tensor_slices(paths).repeat()
    dataset = dataset.interleave(tf.data.TFRecordDataset, cycle_length=len(paths), num_parallel_calls=AUTOTUNE)
    dataset = dataset.shuffle(SHUFFLED)
    dataset = dataset.map(lambda record: training_image(record, int(image_size)), num_parallel_calls=AUTOTUNE)
    dataset = dataset.batch(int(batch_size), drop_remainder=True).prefetch(AUTOTUNE).with_options(options)
    serve(iter(dataset).__next__, int(batch_size))


if __name__ == "__main__":
    main(*sys.argv[1:])
