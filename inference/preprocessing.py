"""Decodes an image and preprocesses it as evaluation does, in TensorFlow operations that a SavedModel can contain.

The steps are those of data/pipeline.py, which runs in DALI: decode, turn upright, crop the centre, resize. On a CPU
with fused multiply-adds, the pixels are equal to DALI's, with two exceptions, in which pixels differ by 1: a CMYK JPEG
that has to be turned, and, in prediction, a TIFF in YCbCr, with a palette or with 16 bits per channel.

This holds for an original file, as data.prepare stores it, in prediction and in a SavedModel. The alpha channel is
dropped. Transparent pixels of a GIF are black. data.images.check finds images that DALI decodes differently, or cannot
decode.
"""
import numpy as np
import tensorflow as tf

GIF = b"GIF8"  # how these files begin
PNG = b"\x89PNG"
EXIF, PNG_EXIF, PNG_SIGNATURE = (int.from_bytes(word, "big") for word in (b"Exif", b"eXIf", PNG))
APP1 = 0xE1  # JPEG markers
START_OF_SCAN = 0xDA
LITTLE_ENDIAN = int.from_bytes(b"II", "big")
ORIENTATION = 0x0112  # tag in the first directory of the EXIF data
LARGEST_DIRECTORY = 1000  # entries to read; a damaged count may be larger


def preprocess(encoded, image_size: int, enlarge: float | None) -> tf.Tensor:
    """Returns the pixels of an image, uint8 (image_size, image_size, 3), RGB.

    encoded: the bytes of a JPEG, PNG or GIF, a scalar string. enlarge: data.augmentation.Augmentation's. Raises
    tf.errors.InvalidArgumentError if they cannot be decoded.
    """
    with tf.device("/cpu:0"):  # a GPU rounds otherwise
        return resized(central_part(upright(_decoded(encoded), encoded), enlarge), image_size)


def _decoded(encoded) -> tf.Tensor:
    """Returns all pixels of an image, uint8 (height, width, 3). Of an animated GIF, it decodes the first frame."""
    def gif():
        image = tf.io.decode_image(encoded, channels=3, expand_animations=False)
        screen = tf.cast(tf.io.decode_raw(tf.strings.substr(encoded, 6, 4), tf.uint16), tf.int32)
        # TensorFlow shifts frames if none fills the screen
        tf.debugging.assert_equal(tf.gather(tf.shape(image), [1, 0]), screen, "no frame of the GIF fills its screen")
        return tf.ensure_shape(image, (None, None, 3))

    def png():  # 16 bits are rounded to 8, as in DALI; TensorFlow would cut them off
        return tf.cast((tf.cast(tf.io.decode_png(encoded, 3, tf.uint16), tf.int32) + 128) // 257, tf.uint8)

    def jpeg():
        return tf.io.decode_jpeg(encoded, channels=3, dct_method="INTEGER_ACCURATE")

    start = tf.strings.substr(encoded, 0, 4)
    return tf.cond(start == GIF, gif, lambda: tf.cond(start == PNG, png, jpeg))


def central_part(image, enlarge: float | None) -> tf.Tensor:
    """Returns the central square of an image, or of each in a batch, as data.pipeline.crop does.

    The side of the square is the shorter side / `enlarge`. If `enlarge` is None, the result is the whole image.
    """
    if enlarge is None:
        return image
    sides = tf.shape(image)[-3:-1]
    shorter = tf.reduce_min(sides)
    size = tf.cast(tf.floor(_quotient(shorter, np.float32(enlarge)) + 0.5), tf.int32)
    size = tf.clip_by_value(size, 1, shorter)
    top, left = tf.unstack((sides - size + 1) // 2)  # half of it, with halves rounded up
    return image[..., top:top + size, left:left + size, :]


def resized(image, size: int) -> tf.Tensor:
    """Resizes an image, or a batch of them, to uint8 (size, size, 3) each, bilinear without antialiasing.

    It rounds to float32 where data.warp does on a CPU: it interpolates between columns first, then between rows, with
    fused multiply-adds except for the positions of the rows. tf.image.resize rounds 1 in 1,000 values differently.
    """
    height, width = tf.unstack(tf.shape(image)[-3:-1])
    steps = tf.range(size, dtype=tf.float32)
    scale, start = _scale(width, size)
    pixels = _interpolated(tf.cast(image, tf.float32), -2, _fused(steps, scale, start))
    scale, start = _scale(height, size)
    pixels = _interpolated(pixels, -3, steps * scale + start)
    return tf.ensure_shape(tf.cast(tf.round(pixels), tf.uint8), (*image.shape[:-3], size, size, 3))


def _scale(length, size: int):
    """Returns input pixels per output pixel, and the position of the first output pixel's centre in the input."""
    scale = _quotient(length, size)
    return scale, 0.5 * scale - 0.5


def _interpolated(pixels, axis: int, position):
    """Interpolates linearly at positions along one axis, counted from the last."""
    last = tf.shape(pixels)[axis] - 1
    first = tf.floor(position)
    weight = tf.reshape(position - first, [-1] + [1] * (-1 - axis))
    before, after = (tf.gather(pixels, tf.clip_by_value(tf.cast(index, tf.int32), 0, last), axis=axis)
                     for index in (first, first + 1))
    return _fused(after - before, weight, before)


def _fused(factor, other, addend):
    """Returns factor * other + addend, float32, rounded once."""
    factor, other, addend = (tf.cast(value, tf.float64) for value in (factor, other, addend))
    return tf.cast(factor * other + addend, tf.float32)


def _quotient(whole, divisor):
    """Returns a float32 quotient, rounded once. In float32, TensorFlow would multiply by the divisor's reciprocal."""
    return tf.cast(tf.cast(whole, tf.float64) / float(divisor), tf.float32)


def upright(image, encoded) -> tf.Tensor:
    """Turns and mirrors a decoded image (height, width, channels) as its EXIF data say.

    DALI's decoders do so, but TensorFlow's do not. Cameras and phones store most portraits turned. encoded: the bytes
    of the JPEG or PNG, a scalar string.
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
    data = tf.pad(tf.io.decode_raw(encoded, tf.uint8), [[0, 1]])  # reads beyond the end return this 0
    end = tf.size(data, tf.int64) - 1

    def number(start, length, little_endian=False):
        """Reads the numbers of `length` bytes at each of these positions."""
        index = tf.cast(start, tf.int64)[..., None] + tf.range(length, dtype=tf.int64)
        values = tf.cast(tf.gather(data, tf.clip_by_value(index, 0, end)), tf.int64)
        powers = [256 ** power for power in range(length)]  # Grappler reports an error if TensorFlow reverses them
        return tf.reduce_sum(values * tf.where(little_endian, *np.array([powers, powers[::-1]])), axis=-1)

    is_png = number(0, 4) == PNG_SIGNATURE
    start = tf.where(is_png, _png_exif(number, end), _jpeg_exif(number))
    little_endian = number(start, 2) == LITTLE_ENDIAN
    directory = start + number(start + 4, 4, little_endian)
    count = tf.minimum(number(directory, 2, little_endian), LARGEST_DIRECTORY)
    entries = directory + 2 + 12 * tf.range(count)
    is_orientation = number(entries, 2, little_endian) == ORIENTATION
    given = tf.boolean_mask(number(entries + 8, 2, little_endian), is_orientation)
    value = tf.concat([given, tf.ones(1, tf.int64)], 0)[0]  # the first, as in DALI and Pillow
    return tf.where((start < end) & (value >= 1) & (value <= 8), value, 1)


def _jpeg_exif(number):
    """Returns the offset of the EXIF data in the header of a JPEG, or one beyond its end if there are none."""
    def is_exif(offset):
        return (number(offset + 1, 1) == APP1) & (number(offset + 4, 4) == EXIF)

    def is_other_segment(offset):
        return (number(offset, 1) == 0xFF) & (number(offset + 1, 1) != START_OF_SCAN) & ~is_exif(offset)

    offset = tf.while_loop(is_other_segment, lambda offset: [offset + 2 + number(offset + 2, 2)],
                           [tf.constant(2, tf.int64)])[0]
    return tf.where(is_exif(offset), offset + 10, tf.int64.max // 2)


def _png_exif(number, end):
    """Returns the offset of the EXIF data of a PNG, those of the last such chunk as in Pillow.

    If there are none, the offset is beyond the end.
    """
    def following(offset, found):
        return offset + 12 + number(offset, 4), tf.where(number(offset + 4, 4) == PNG_EXIF, offset, found)

    return 8 + tf.while_loop(lambda offset, _: offset < end, following, [tf.constant(8, tf.int64), end])[1]
