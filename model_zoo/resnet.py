"""Residual networks (He et al. 2015, arXiv:1512.03385)."""
import tensorflow as tf

layers = tf.keras.layers


def resnet20(classes, image_size, batch_norm_momentum, seed):
    """ResNet-20 for 32-pixel images (section 4.2): 6n + 2 weighted layers with n = 3.

    A 3x3 convolution to 16 channels; three stages of three blocks with 16, 32 and 64 channels, of which the second and
    the third start with stride 2; global average pooling; a dense layer. Shortcuts have no parameters (option A: every
    second pixel, padded with zero channels). No biases in convolutions, He initialisation (arXiv:1502.01852).
    """
    seeds = iter(range(seed * 1000, seed * 1000 + 1000))

    def convolution(x, channels, stride):
        return layers.Conv2D(channels, 3, stride, padding="same", use_bias=False,
                             kernel_initializer=tf.keras.initializers.HeNormal(next(seeds)))(x)

    def norm(x):
        return layers.BatchNormalization(momentum=batch_norm_momentum, epsilon=1e-5)(x)

    def shortcut(x, channels, stride):
        if stride == 1:
            return x
        grown = channels - x.shape[-1]
        return tf.pad(x[:, ::stride, ::stride], [[0, 0], [0, 0], [0, 0], [grown // 2, grown - grown // 2]])

    def block(x, channels, stride):
        y = layers.ReLU()(norm(convolution(x, channels, stride)))
        y = norm(convolution(y, channels, 1))
        return layers.ReLU()(y + shortcut(x, channels, stride))

    inputs = tf.keras.Input((image_size, image_size, 3))
    x = layers.ReLU()(norm(convolution(inputs, 16, 1)))
    for channels, stride in ((16, 1), (32, 2), (64, 2)):
        for index in range(3):
            x = block(x, channels, stride if index == 0 else 1)
    x = layers.GlobalAveragePooling2D()(x)
    logits = layers.Dense(classes, kernel_initializer=tf.keras.initializers.HeNormal(next(seeds)), dtype="float32")(x)
    return tf.keras.Model(inputs, logits, name="resnet20")
