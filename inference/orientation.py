"""The EXIF orientation of an encoded image, in operations that a SavedModel can hold.

TensorFlow's decoders ignore the orientation, but DALI's apply it. Cameras and phones store most portraits turned.
"""
import tensorflow as tf

EXIF, PNG_EXIF, PNG_SIGNATURE = (int.from_bytes(word, "big") for word in (b"Exif", b"eXIf", b"\x89PNG"))
APP1 = 0xE1  # JPEG markers
START_OF_SCAN = 0xDA
LITTLE_ENDIAN = int.from_bytes(b"II", "big")
ORIENTATION = 0x0112  # tag in the first directory of the EXIF data
LARGEST_DIRECTORY = 1000  # entries to read; a damaged count may be larger


def upright(image, encoded) -> tf.Tensor:
    """Turns and mirrors a decoded image (height, width, channels) as its EXIF data say.

    encoded: the bytes of the JPEG or PNG, a scalar string.
    """
    number = orientation(encoded)
    image = tf.cond(number >= 5, lambda: tf.transpose(image, [1, 0, 2]), lambda: image)
    for axis, numbers in enumerate(([3, 4, 7, 8], [2, 3, 6, 7])):
        is_flipped = tf.reduce_any(number == numbers)
        image = tf.cond(is_flipped, lambda image=image, axis=axis: tf.reverse(image, [axis]),
                        lambda image=image: image)
    return image


def orientation(encoded) -> tf.Tensor:
    """Returns the EXIF orientation of a JPEG or PNG: 1 to 8, and 1 if it has none; int64, scalar."""
    data = tf.pad(tf.io.decode_raw(encoded, tf.uint8), [[0, 1]])  # a read behind the end returns the 0
    end = tf.size(data, tf.int64) - 1

    def number(start, length, little_endian=False):
        """Reads the numbers of `length` bytes at each of these positions."""
        index = tf.cast(start, tf.int64)[..., None] + tf.range(length, dtype=tf.int64)
        values = tf.cast(tf.gather(data, tf.clip_by_value(index, 0, end)), tf.int64)
        powers = tf.constant([256 ** power for power in range(length)], tf.int64)
        return tf.reduce_sum(values * tf.where(little_endian, powers, powers[::-1]), axis=-1)

    is_png = number(0, 4) == PNG_SIGNATURE
    start = tf.where(is_png, _png_exif(number, end), _jpeg_exif(number))
    little_endian = number(start, 2) == LITTLE_ENDIAN
    directory = start + number(start + 4, 4, little_endian)
    count = tf.minimum(number(directory, 2, little_endian), LARGEST_DIRECTORY)
    entries = directory + 2 + 12 * tf.range(count)
    is_orientation = number(entries, 2, little_endian) == ORIENTATION
    value = tf.reduce_max(tf.where(is_orientation, number(entries + 8, 2, little_endian), 1))
    return tf.where((start < end) & (value >= 1) & (value <= 8), value, 1)


def _jpeg_exif(number):
    """Returns the start of the EXIF data of a JPEG, which lie in a segment of its header, or a position behind it."""
    def is_exif(offset):
        return (number(offset + 1, 1) == APP1) & (number(offset + 4, 4) == EXIF)

    def is_other_segment(offset):
        return (number(offset, 1) == 0xFF) & (number(offset + 1, 1) != START_OF_SCAN) & ~is_exif(offset)

    offset = tf.while_loop(is_other_segment, lambda offset: [offset + 2 + number(offset + 2, 2)],
                           [tf.constant(2, tf.int64)])[0]
    return tf.where(is_exif(offset), offset + 10, tf.int64.max // 2)


def _png_exif(number, end):
    """Returns the start of the EXIF data of a PNG, which are a chunk, or a position behind its end."""
    return 8 + tf.while_loop(lambda offset: (offset < end) & (number(offset + 4, 4) != PNG_EXIF),
                             lambda offset: [offset + 12 + number(offset, 4)], [tf.constant(8, tf.int64)])[0]
