"""A small convolutional network whose first layer whitens patches of 2x2 pixels, as in airbench94_muon.

Source: K. Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv:2404.00498, and its later version with Muon.
"""
import numpy as np
import tensorflow as tf

from model_zoo.layers import BatchNormalization, seeds

layers = tf.keras.layers
GROUPS = 64, 256, 256  # output channels
ROOT_MEAN_SQUARE = 0.2  # of each kernel, and of an update by Muon at a learning rate of 1
SMALLEST = 5e-4  # added to each eigenvalue, so that the noise in directions with little variance stays small
# Of the covariance of all patches of 2x2 normalized pixels in CIFAR-10's training images, by row, column and channel.
# `uv run python -m benchmarks.whitening DATA` prints them.
EIGENVALUES = (0.00057409, 0.0016017, 0.00409, 0.0045574, 0.013875, 0.016382, 0.055358, 0.18038, 0.33183, 0.39492,
               0.83027, 10.056)
EIGENVECTORS = (
    (-0.1856, 0.3977, -0.2393, 0.1855, -0.3976, 0.2393, 0.1853, -0.3981, 0.2395, -0.1853, 0.3981, -0.2396),
    (-0.3591, 0.0398, 0.3452, 0.3591, -0.0400, -0.3450, 0.3596, -0.0407, -0.3457, -0.3595, 0.0408, 0.3455),
    (0.1813, -0.3894, 0.2358, -0.1884, 0.4054, -0.2459, 0.1888, -0.4038, 0.2470, -0.1819, 0.3881, -0.2370),
    (-0.1838, 0.4052, -0.2496, -0.1761, 0.3891, -0.2405, 0.1755, -0.3889, 0.2402, 0.1830, -0.4048, 0.2498),
    (0.3554, -0.0432, -0.3442, -0.3610, 0.0441, 0.3491, 0.3627, -0.0422, -0.3464, -0.3571, 0.0411, 0.3417),
    (-0.3630, 0.0477, 0.3437, -0.3581, 0.0471, 0.3382, 0.3595, -0.0479, -0.3409, 0.3649, -0.0482, -0.3461),
    (-0.2959, -0.2990, -0.2701, 0.2954, 0.2992, 0.2701, 0.2926, 0.3011, 0.2718, -0.2926, -0.3011, -0.2720),
    (-0.2075, 0.4087, -0.1994, -0.2082, 0.4080, -0.1998, -0.2213, 0.3953, -0.2123, -0.2217, 0.3947, -0.2124),
    (-0.2904, -0.2969, -0.2655, 0.2986, 0.3061, 0.2731, -0.2989, -0.3051, -0.2728, 0.2905, 0.2970, 0.2649),
    (-0.3063, -0.2939, -0.2739, -0.2979, -0.2854, -0.2663, 0.2837, 0.3060, 0.2655, 0.2923, 0.3146, 0.2732),
    (-0.3496, -0.0028, 0.3593, -0.3497, -0.0029, 0.3592, -0.3531, -0.0083, 0.3521, -0.3530, -0.0083, 0.3520),
    (0.2844, 0.2989, 0.2861, 0.2843, 0.2988, 0.2860, 0.2828, 0.2963, 0.2836, 0.2827, 0.2961, 0.2834),
)


def whitened_convnet(x, classes, batch_norm_momentum, seed):
    """Six 3x3 convolutions in three groups, 1,971,352 trained parameters for 10 classes.

    Each group is a convolution, max pooling of 2x2, batch norm, GELU, and a convolution, batch norm, GELU. Max pooling
    of 3x3 and a dense layer without a bias follow. The logits are divided by the number of its inputs. Batch norm has
    no scale.
    """
    numbers = seeds(seed)

    def convolution(x, channels):
        return layers.Conv2D(channels, 3, padding="same", use_bias=False, kernel_constraint=ConstantNorm(),
                             kernel_initializer=PartialIdentity(next(numbers)))(x)

    def activated(x):  # the variance of a kernel's outputs is far above epsilon
        return layers.Activation("gelu")(BatchNormalization(momentum=batch_norm_momentum, epsilon=1e-5, scale=False)(x))

    x = layers.Activation("gelu")(Whitening(name="whitening")(x))
    for channels in GROUPS:
        x = activated(layers.MaxPooling2D(2)(convolution(x, channels)))
        x = activated(convolution(x, channels))
    x = layers.Flatten()(layers.MaxPooling2D(3)(x))
    start = tf.keras.initializers.RandomNormal(0.0, 1.0, next(numbers))
    logits = layers.Dense(classes, use_bias=False, kernel_initializer=start, dtype="float32", name="head")(x)
    return layers.Rescaling(1 / x.shape[-1], dtype="float32")(logits)


class Whitening(layers.Conv2D):
    """A 2x2 convolution without padding to 24 channels, which are uncorrelated in CIFAR-10. Only its bias is trained.

    The filters are the eigenvectors of the covariance of the patches, each divided by the root of its eigenvalue, and
    their negatives. It runs in float32, because small eigenvalues amplify the rounding of the pixels.
    """

    def __init__(self, **kwargs):
        start = tf.keras.initializers.Constant(filters().tolist())
        super().__init__(24, 2, kernel_initializer=start, dtype="float32", **kwargs)

    def add_weight(self, name, trainable, **options):
        """Overrides Keras's method, with which a convolution creates its kernel and its bias."""
        return super().add_weight(name, trainable=name == "bias", **options)

    @property
    def weights(self):
        """Kernel and bias, as in Conv2D. Keras would list what is trained first."""
        return [self.kernel, self.bias]


def filters() -> np.ndarray:
    """Returns the filters of Whitening as (row, column, input channel, output channel), float64 (2, 2, 3, 24)."""
    half = np.transpose(EIGENVECTORS) / np.sqrt(np.array(EIGENVALUES) + SMALLEST)
    return np.concatenate([half, -half], axis=1).reshape(2, 2, 3, 24)


class ConstantNorm(tf.keras.constraints.Constraint):
    """Scales a kernel to ROOT_MEAN_SQUARE after each update.

    Batch norm follows, so the scale of a kernel has no influence on what the network computes, but it decides how far
    an update turns the kernel: by about the learning rate of Muon in radians, whatever the kernel's shape. In
    airbench94_muon, which scales kernels to a norm of root(outputs), and updates by 1, the angles are the same.

    The norm has the same bits for any number of threads, because one thread sums each row.
    """

    def __call__(self, kernel):
        norm = tf.norm(tf.norm(kernel, axis=-1))
        return kernel * (ROOT_MEAN_SQUARE * kernel.shape.num_elements() ** 0.5 / norm)


class PartialIdentity(tf.keras.initializers.Initializer):
    """Makes the first output channels of a 3x3 convolution copies of the input channels, and draws the other filters.

    Their weights are uniform from -1 / root(inputs) to 1 / root(inputs), where `inputs` counts those of a filter. The
    kernel is then scaled by ConstantNorm.
    """

    def __init__(self, seed: int):
        self._seed = seed

    def __call__(self, shape, dtype=None, **_):
        *window, inputs, outputs = shape
        copies = np.zeros((*window, inputs, inputs))
        copies[1, 1] = np.eye(inputs)
        drawn = tf.keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform", self._seed)(shape, dtype)
        kernel = tf.concat([tf.constant(copies, dtype), drawn[..., inputs:]], axis=-1)
        return ConstantNorm()(kernel[..., :outputs])
