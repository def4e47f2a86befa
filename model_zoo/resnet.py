"""Residual networks (He et al. 2015, arXiv:1512.03385)."""
from functools import partial

import numpy as np
import tensorflow as tf

from model_zoo.layers import BatchNormalization, ResidualSum, seeds

layers = tf.keras.layers


class _Builder:
    """Builds the parts of a residual network. Convolutions have no biases and use He initialisation (arXiv:1502.01852).

    last_gamma: initial gamma of the last batch norm of each residual branch.
    drop_path: probability with which a sample skips the branch of the last block (`joined`).
    blocks: number of residual blocks.
    """

    def __init__(self, batch_norm_momentum, seed, last_gamma=1.0, drop_path=0.0, blocks=1, epsilon=1e-5):
        self._momentum = batch_norm_momentum
        self._epsilon = epsilon
        self._seeds = seeds(seed)
        self.last_gamma = last_gamma
        self._rates = iter(np.linspace(0, drop_path, blocks).tolist())
        self._mask_seeds = reversed([*seeds(seed)])  # from the other end, so that the weights' seeds stay the same

    def convolution(self, x, channels, kernel, stride=1):
        """Applies a convolution padded by (kernel - 1) / 2 on every side.

        With a stride, "same" would pad the far sides more.
        """
        if stride > 1 and kernel > 1:
            x = layers.ZeroPadding2D((kernel - 1) // 2)(x)
        return layers.Conv2D(channels, kernel, stride, "same" if stride == 1 else "valid", use_bias=False,
                             kernel_initializer=tf.keras.initializers.HeNormal(next(self._seeds)))(x)

    def norm(self, x, gamma: float = 1.0):
        start = tf.keras.initializers.Constant(gamma)
        return BatchNormalization(momentum=self._momentum, epsilon=self._epsilon, gamma_initializer=start)(x)

    def joined(self, branch, shortcut):
        """Ends a block: adds its branch and its shortcut, with stochastic depth (arXiv:1603.09382).

        The probability that a sample skips the branch rises linearly, from 0 in the first block to drop_path in the
        last.
        """
        rate = next(self._rates)
        total = ResidualSum(rate, next(self._mask_seeds))([branch, shortcut]) if rate else branch + shortcut
        return layers.ReLU()(total)

    def dense(self, x, classes, deviation=0.01):
        """Applies the last dense layer.

        deviation: standard deviation of the initial weights; None: the initialisation of the convolutions.
        """
        seed = next(self._seeds)
        start = tf.keras.initializers.RandomNormal(0, deviation, seed) if deviation else (
            tf.keras.initializers.HeNormal(seed))
        return layers.Dense(classes, kernel_initializer=start, dtype="float32")(x)

    def projection(self, x, channels, stride):
        """Option B (section 3.3): returns the input if the shapes agree, else applies a 1x1 convolution and a norm."""
        if stride == 1 and x.shape[-1] == channels:
            return x
        return self.norm(self.convolution(x, channels, 1, stride))


def _basic_block(build, x, channels, stride, version):
    del version  # both versions have the stride in the first convolution
    y = layers.ReLU()(build.norm(build.convolution(x, channels, 3, stride)))
    y = build.norm(build.convolution(y, channels, 3), build.last_gamma)
    return build.joined(y, build.projection(x, channels, stride))


def _bottleneck(build, x, channels, stride, version):
    strides = (1, stride) if version == "v1.5" else (stride, 1)
    y = layers.ReLU()(build.norm(build.convolution(x, channels, 1, strides[0])))
    y = layers.ReLU()(build.norm(build.convolution(y, channels, 3, strides[1])))
    y = build.norm(build.convolution(y, 4 * channels, 1), build.last_gamma)
    return build.joined(y, build.projection(x, 4 * channels, stride))


DEPTHS = {10: (_basic_block, (1, 1, 1, 1)), 18: (_basic_block, (2, 2, 2, 2)), 34: (_basic_block, (3, 4, 6, 3)),
          50: (_bottleneck, (3, 4, 6, 3)), 101: (_bottleneck, (3, 4, 23, 3)), 152: (_bottleneck, (3, 8, 36, 3))}


def blocks_of(depth: int) -> int:
    return sum(DEPTHS[depth][1])


def _stages(build, x, depth, version, channels=64):
    """Applies the four stages of table 1 (conv2_x to conv5_x) and global average pooling. channels: of the first."""
    block, repeats = DEPTHS[depth]
    for stage, count in enumerate(repeats):
        for index in range(count):
            x = block(build, x, channels * 2 ** stage, 2 if stage and index == 0 else 1, version)
    return layers.GlobalAveragePooling2D()(x)


def resnet(depth, version, x, classes, batch_norm_momentum, seed, last_gamma=1.0, drop_path=0.0):
    """ResNet-18 to ResNet-152 for ImageNet (table 1).

    version: "v1.5" strides in the 3x3 convolution of a bottleneck, "v1" in its first 1x1 convolution, as in the paper.
    last_gamma, drop_path: as in _Builder.
    """
    build = _Builder(batch_norm_momentum, seed, last_gamma, drop_path, blocks_of(depth))
    x = layers.ReLU()(build.norm(build.convolution(x, 64, 7, 2)))
    x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))  # ReLU's outputs are >= 0, so zero padding is exact
    return build.dense(_stages(build, x, depth, version), classes)


def resnet50_nvcaffe(x, classes, batch_norm_momentum, seed, last_gamma=1.0, drop_path=0.0):
    """ResNet-50 v1 as in the LARS authors' file: models/resnet50/train_val of nvcaffe.

    Epsilon is 1e-4. Pooling has no padding, and its last window extends over the edge. The dense layer uses the
    initialisation of the convolutions.
    """
    build = _Builder(batch_norm_momentum, seed, last_gamma, drop_path, blocks_of(50), epsilon=1e-4)
    x = layers.ReLU()(build.norm(build.convolution(x, 64, 7, 2)))
    x = _stages(build, layers.MaxPooling2D(3, 2, "same")(x), 50, "v1")
    return build.dense(x, classes, deviation=None)


def resnet10_narrow(x, classes, batch_norm_momentum, seed, last_gamma=1.0, drop_path=0.0):
    """A residual network for few photographs of 64 pixels: a quarter of ResNet-18's channels, and half of its blocks.

    Its first convolution is 5x5 with stride 2, without pooling, so that the four stages have 32, 16, 8 and 4 pixels.
    """
    build = _Builder(batch_norm_momentum, seed, last_gamma, drop_path, blocks_of(10))
    x = layers.ReLU()(build.norm(build.convolution(x, 16, 5, 2)))
    return build.dense(_stages(build, x, 10, "v1.5", 16), classes)


resnet18, resnet34, resnet50, resnet101, resnet152 = (
    partial(resnet, depth, "v1.5") for depth in (18, 34, 50, 101, 152))
resnet50_v1, resnet101_v1, resnet152_v1 = (partial(resnet, depth, "v1") for depth in (50, 101, 152))


def resnet20(x, classes, batch_norm_momentum, seed, last_gamma=1.0, drop_path=0.0):
    """ResNet-20 for 32-pixel images (section 4.2): 6n + 2 weighted layers with n = 3.

    A 3x3 convolution to 16 channels is followed by three stages of three blocks with 16, 32 and 64 channels, global
    average pooling and a dense layer. The second and third stages start with stride 2. Shortcuts have no parameters
    (option A: every second pixel, padded with zero channels).
    """
    build = _Builder(batch_norm_momentum, seed, last_gamma, drop_path, blocks=9)

    def shortcut(x, channels, stride):
        if stride == 1:
            return x
        grown = channels - x.shape[-1]
        x = layers.AveragePooling2D(1, stride)(x)  # takes every second pixel
        return layers.ZeroPadding2D(((0, 0), (grown // 2, grown - grown // 2)), "channels_first")(x)  # of channels

    x = layers.ReLU()(build.norm(build.convolution(x, 16, 3)))
    for channels, first_stride in ((16, 1), (32, 2), (64, 2)):
        for stride in (first_stride, 1, 1):
            y = layers.ReLU()(build.norm(build.convolution(x, channels, 3, stride)))
            y = build.norm(build.convolution(y, channels, 3), build.last_gamma)
            x = build.joined(y, shortcut(x, channels, stride))
    return build.dense(layers.GlobalAveragePooling2D()(x), classes)
