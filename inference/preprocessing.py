"""From an encoded image to the pixels that the model sees in evaluation, in operations that a SavedModel can hold.

The same steps as data/pipeline.py, which runs in DALI: decode, turn upright, take the centre, resize. On a CPU, the
decoded pixels are the same, except that some or all differ by 1 in a CMYK JPEG that has to be turned, and between
prediction and DALI in a TIFF of YCbCr, with a palette or of 16 bits per colour. After resizing, about 2 in a million
values differ, by 1; of images that are stretched, up to 1 in 100, because DALI rounds some halves otherwise.

All this holds for a file in place, as data.prepare stores it, in prediction and in a SavedModel. Alpha is dropped. What
is transparent in a GIF is black. data.images.check finds the images that DALI decodes otherwise, or does not.
"""
import numpy as np
import tensorflow as tf

from inference.orientation import upright

GIF = b"GIF8"  # how these files begin
PNG = b"\x89PNG"


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
        tf.debugging.assert_equal(tf.shape(image)[1::-1], screen, "no frame of the GIF fills its screen")
        return tf.ensure_shape(image, (None, None, 3))

    def png():  # 16 bits are rounded to 8, as in DALI; TensorFlow would cut them off
        return tf.cast((tf.cast(tf.io.decode_png(encoded, 3, tf.uint16), tf.int32) + 128) // 257, tf.uint8)

    def jpeg():
        return tf.io.decode_jpeg(encoded, channels=3, dct_method="INTEGER_ACCURATE")

    start = tf.strings.substr(encoded, 0, 4)
    return tf.cond(start == GIF, gif, lambda: tf.cond(start == PNG, png, jpeg))


def central_part(image, enlarge: float | None) -> tf.Tensor:
    """Returns the central square of an image, or of each in a batch, as data.pipeline.crop does.

    Its side is the shorter side / `enlarge`. If that is None, it returns the whole image.
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

    The float32 operations and their order are DALI's: it first interpolates between rows if the image shrinks, and
    between columns if it grows. tf.image.resize would round about 1 in 1,000 values differently.
    """
    pixels = tf.cast(image, tf.float32)
    pixels = tf.cond(tf.shape(image)[-3] > size,
                     lambda: _interpolated(_interpolated(pixels, -3, size), -2, size),
                     lambda: _interpolated(_interpolated(pixels, -2, size), -3, size))
    return tf.ensure_shape(tf.cast(tf.round(pixels), tf.uint8), (*image.shape[:-3], size, size, 3))


def _interpolated(pixels, axis: int, size: int):
    """Interpolates linearly along one axis, counted from the last."""
    length = tf.shape(pixels)[axis]
    scale = _quotient(length, size)
    position = tf.range(size, dtype=tf.float32) * scale + (0.5 * scale - 0.5 - 1.0)
    first = tf.math.ceil(position)
    weight = tf.reshape(first - position, [size, 1, 1] if axis == -3 else [1, size, 1])
    before, after = (tf.gather(pixels, tf.clip_by_value(tf.cast(index, tf.int32), 0, length - 1), axis=axis)
                     for index in (first, first + 1))
    return before * weight + after * (1.0 - weight)


def _quotient(whole, divisor):
    """Returns a float32 quotient, rounded once. In float32, TensorFlow would multiply by the divisor's reciprocal."""
    return tf.cast(tf.cast(whole, tf.float64) / float(divisor), tf.float32)
