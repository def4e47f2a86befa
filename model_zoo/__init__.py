"""Models by name. This package does not depend on data, optimizers or Horovod.

Listing the names, or checking a flag against them, does not import TensorFlow.
"""
import importlib
from dataclasses import dataclass

from common import own


@dataclass(frozen=True)
class ModelInfo:
    """An entry of the registry."""

    module: str
    function: str  # from pixels to logits, in the module
    image_size: int  # the default, in pixels
    input_scale: float | None = None  # factor of the pixels minus their mean; None: 1 / the dataset's std
    any_image_size: bool = True  # whether the same weights can process images of any size
    least_image_size: int = 1  # a smaller image has no pixel left after the last pooling
    last_gamma: float = 1.0  # initial gamma of the last batch norm of each residual branch of a ResNet
    has_max_pooling: bool = True  # as far as it is known without building the model

    @property
    def is_residual(self) -> bool:
        return self.module == "model_zoo.resnet"

    @property
    def is_of_keras(self) -> bool:
        """Whether it is a network of tf.keras.applications, which scales pixels from 0 to 255 by itself."""
        return self.module == "model_zoo.applications"


ZOO = {
    # BVLC AlexNet: groups, LRN and dropout; pixels are centred, not scaled
    "alexnet": ModelInfo("model_zoo.alexnet", "alexnet", 227, input_scale=1.0, any_image_size=False,
                         least_image_size=67),
    # AlexNet with batch norm, in two variants of the LARS authors
    **{name: ModelInfo("model_zoo.alexnet", name, 227, input_scale=1 / 256, any_image_size=False, least_image_size=67)
       for name in ("alexnet_bn", "alexnet_bn5")},
    # version 1.5: stride in the 3x3 convolution of a bottleneck; zero gammas as in arXiv:1706.02677, section 5.1
    **{name: ModelInfo("model_zoo.resnet", name, 224, last_gamma=0)
       for name in ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")},
    # version 1, as first published
    **{name: ModelInfo("model_zoo.resnet", name, 224) for name in ("resnet50_v1", "resnet101_v1", "resnet152_v1")},
    # as in the LARS authors' file
    "resnet50_nvcaffe": ModelInfo("model_zoo.resnet", "resnet50_nvcaffe", 224, input_scale=1 / 256),
    "resnet20": ModelInfo("model_zoo.resnet", "resnet20", 32, has_max_pooling=False),  # arXiv:1512.03385, section 4.2
    "resnet10_narrow": ModelInfo("model_zoo.resnet", "resnet10_narrow", 64, has_max_pooling=False),
    **{name: ModelInfo("model_zoo.convnet", name, 32, any_image_size=False, least_image_size=8)
       for name in ("convnet", "convnet_bn")},
    "whitened_convnet": ModelInfo("model_zoo.whitened_convnet", "whitened_convnet", 32, any_image_size=False,
                                  least_image_size=25),
}
KERAS = "keras:"
APPLICATIONS = {  # image size -> networks of tf.keras.applications
    224: "ConvNeXtBase ConvNeXtLarge ConvNeXtSmall ConvNeXtTiny ConvNeXtXLarge DenseNet121 DenseNet169 DenseNet201 "
         "EfficientNetB0 EfficientNetV2B0 MobileNet MobileNetV2 MobileNetV3Large MobileNetV3Small NASNetMobile "
         "RegNetX002 RegNetX004 RegNetX006 RegNetX008 RegNetX016 RegNetX032 RegNetX040 RegNetX064 RegNetX080 "
         "RegNetX120 RegNetX160 RegNetX320 RegNetY002 RegNetY004 RegNetY006 RegNetY008 RegNetY016 RegNetY032 "
         "RegNetY040 RegNetY064 RegNetY080 RegNetY120 RegNetY160 RegNetY320 ResNet101 ResNet101V2 ResNet152 "
         "ResNet152V2 ResNet50 ResNet50V2 ResNetRS101 ResNetRS152 ResNetRS200 ResNetRS270 ResNetRS350 ResNetRS420 "
         "ResNetRS50 VGG16 VGG19",
    240: "EfficientNetB1 EfficientNetV2B1", 260: "EfficientNetB2 EfficientNetV2B2",
    299: "InceptionResNetV2 InceptionV3 Xception", 300: "EfficientNetB3 EfficientNetV2B3", 331: "NASNetLarge",
    380: "EfficientNetB4", 384: "EfficientNetV2S", 456: "EfficientNetB5", 480: "EfficientNetV2L EfficientNetV2M",
    528: "EfficientNetB6", 600: "EfficientNetB7"}
MAX_POOLED = ("DenseNet", "Inception", "NASNet", "ResNet1", "ResNet5", "VGG", "Xception")  # families; no ResNetRS
LEAST = {"InceptionResNetV2": 75, "InceptionV3": 75, "Xception": 71}  # image size; 32 for the others


class Models(dict):
    """The registry. It also has an entry for each MODULE:FUNCTION, a user's own model."""

    def __missing__(self, name):
        module, separator, function = name.partition(":")
        if not separator:
            raise KeyError(name)
        return ModelInfo(module, function, OWN_SIZE, has_max_pooling=False)


OWN_SIZE = 224  # default image size of a user's own model
MODELS = Models({**ZOO, **{
    f"{KERAS}{name}": ModelInfo("model_zoo.applications", "application", size, any_image_size=False,
                                least_image_size=LEAST.get(name, 32), has_max_pooling=name.startswith(MAX_POOLED))
    for size, names in APPLICATIONS.items() for name in names.split()}})


def create_model(name: str, classes: int, image_size: int | None, batch_norm_momentum: float = 0.9, seed: int = 0,
                 mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), last_gamma: float | None = None, drop_path: float = 0.0):
    """Builds the Keras model registered under `name`.

    Input: pixels from 0 to 255, RGB, uint8 or float (batch, image_size, image_size, 3). The model subtracts the mean
    of each channel in float32, and divides by the channel's std or multiplies by its input_scale. A network of Keras
    scales the pixels in its own way. Output: logits, float32 (batch, classes).

    image_size: None for images of any size.
    seed: of the initial weights and of dropout.
    last_gamma: as in ModelInfo. None: the model's own.
    drop_path: rate of stochastic depth in the last block of a ResNet (resnet.py).
    """
    import tensorflow as tf

    from model_zoo.layers import InputNormalization

    info = MODELS[name]
    build = getattr(importlib.import_module(info.module), info.function) if name in MODELS else (
        own.load("--model", name))
    images = tf.keras.Input((image_size, image_size, 3), dtype="float32")
    more = {"name": name} if info.is_of_keras else {}
    if info.is_residual:
        more = {"last_gamma": info.last_gamma if last_gamma is None else last_gamma, "drop_path": drop_path}
    pixels = images
    if not info.is_of_keras:
        divisor = std if info.input_scale is None else [1 / info.input_scale] * 3
        pixels = InputNormalization(mean, divisor, name="input_normalization")(images)
    more |= {"classes": classes, "batch_norm_momentum": batch_norm_momentum, "seed": seed}
    if name in MODELS:
        return tf.keras.Model(images, build(pixels, **more), name=name.replace(":", "-"))
    from model_zoo.custom import own_model

    with own.calling(f"--model={name}"):
        return own_model(build(pixels, **more), images, pixels, name, classes, batch_norm_momentum, seed)
