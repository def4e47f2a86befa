"""AlexNet as in Caffe's reference model, and AlexNet-BN (arXiv:1708.03888, sections 3.2.1 and 3.2.2)."""
import tensorflow as tf

from model_zoo.layers import BatchNormalization, Dropout, LocalResponseNormalization, seeds

layers = tf.keras.layers

# Output channels, kernel, stride, groups, and whether 3x3 max pooling with stride 2 follows.
CONVOLUTIONS = ((96, 11, 4, 1, True), (256, 5, 1, 2, True), (384, 3, 1, 1, False), (384, 3, 1, 2, False),
                (256, 3, 1, 2, True))


class _Builder:
    """Builds layers with their initial values.

    Weights are Gaussian with standard deviation 0.01, or 0.005 in dense layers 6 and 7.
    """

    def __init__(self, seed):
        self._seeds = seeds(seed)

    def convolution(self, x, number, bias):
        """Applies convolution `number` of CONVOLUTIONS, from 0. bias: its initial value; None: no bias."""
        channels, kernel, stride, groups, _ = CONVOLUTIONS[number]
        return layers.Conv2D(channels, kernel, stride, "same" if number else "valid", groups=groups,
                             name=f"conv{number + 1}", **self._initial(0.01, bias))(x)

    def classifier(self, x, classes, last_bias):
        """Applies dense layers 6 to 8, with dropout. The biases of 6 and 7 start at 0.1."""
        x = layers.Flatten()(x)
        for number in (6, 7):
            x = layers.ReLU()(layers.Dense(4096, name=f"fc{number}", **self._initial(0.005, 0.1))(x))
            x = Dropout(0.5, next(self._seeds))(x)
        return layers.Dense(classes, name="fc8", dtype="float32", **self._initial(0.01, last_bias))(x)

    def _initial(self, deviation, bias):
        return {"kernel_initializer": tf.keras.initializers.RandomNormal(0.0, deviation, next(self._seeds)),
                "bias_initializer": tf.keras.initializers.Constant(bias or 0.0), "use_bias": bias is not None}


def _pooled(x, number):
    return layers.MaxPooling2D(3, 2)(x) if CONVOLUTIONS[number][-1] else x


def alexnet(x, classes, batch_norm_momentum, seed):
    """BVLC AlexNet with groups, local response normalisation and dropout.

    It has 60,965,224 parameters for 1,000 classes at 227 pixels. The biases start at the values whose norms table 4 of
    arXiv:1708.03888 prints: 0.01, and 0.1 in dense layers 6 and 7.
    """
    del batch_norm_momentum
    build = _Builder(seed)
    for number in range(len(CONVOLUTIONS)):
        x = layers.ReLU()(build.convolution(x, number, bias=0.01))
        x = _pooled(LocalResponseNormalization()(x) if number < 2 else x, number)
    return build.classifier(x, classes, last_bias=0.01)


def alexnet_bn(x, classes, batch_norm_momentum, seed):
    """AlexNet-BN as used by every LARS solver of the authors: models/alexnet_bn/train_val2 of nvcaffe.

    Four batch norms on the inputs of convolutions 2 to 5, after ReLU and pooling, have no learned scale or shift. Their
    epsilon is 1e-4. All layers have biases, which start at 0.01, and at 0.1 in dense layers 6 and 7. There is no local
    response normalisation.
    """
    build = _Builder(seed)
    for number in range(len(CONVOLUTIONS)):
        x = _pooled(layers.ReLU()(build.convolution(x, number, bias=0.01)), number)
        if number < 4:
            x = BatchNormalization(momentum=batch_norm_momentum, epsilon=1e-4, center=False, scale=False)(x)
    return build.classifier(x, classes, last_bias=0.01)


def alexnet_bn5(x, classes, batch_norm_momentum, seed):
    """The authors' other AlexNet-BN, models/alexnet_bn/train_val of nvcaffe: five batch norms, each before ReLU.

    Scale and shift are learned. Convolutions 1 to 4 have no bias. The bias of convolution 5 starts at 0.1, that of
    dense layer 8 at 0.
    """
    build = _Builder(seed)
    for number in range(len(CONVOLUTIONS)):
        x = build.convolution(x, number, bias=0.1 if number == 4 else None)
        x = BatchNormalization(momentum=batch_norm_momentum, epsilon=1e-4)(x)
        x = _pooled(layers.ReLU()(x), number)
    return build.classifier(x, classes, last_bias=0.0)
