"""A trained model, ready to use: its weights, its class names and what it expects of an image."""
import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from common.errors import UserError, complain
from data.augmentation import AUGMENTATIONS
from data.named import open_named
from model_zoo.layers import layers_of, norms
from model_zoo.views import mean_logits
from optim.schedules import Piecewise
from plan.settings import Settings
from training import build
from training.build import start_and_check_flags
from training.restoring import differing_classes, load_model

TOP = 5  # classes that are named for an image


@dataclass(frozen=True)
class Trained:
    """A trained model."""

    model: Any  # a Keras model, in float32
    classes: tuple[str, ...]  # names in label order
    image_size: int  # height and width of its input in pixels
    enlarge: float | None  # resize before the central crop; see data.augmentation.Augmentation
    epoch: float  # of the checkpoint
    weights: str  # "moving average", or "last" for those of the last update
    views: int = 1  # of each image, whose mean logits give the probabilities (model_zoo.views)

    @functools.cached_property
    def probabilities(self):
        """The compiled function from images, uint8 (batch, image_size, image_size, 3), RGB, to probabilities.

        Probabilities are float32 (batch, classes), in label order. The function is traced once per model.
        """
        pixels = tf.TensorSpec([None, self.image_size, self.image_size, 3], tf.uint8, "images")
        logits_of = functools.partial(self.model, training=False)
        return tf.function(
            lambda images: tf.nn.softmax(mean_logits(logits_of, tf.cast(images, tf.float32), self.views)),
            input_signature=[pixels], autograph=False)


def load_trained(settings: Settings) -> Trained:
    """Loads the newest checkpoint of --checkpoint, with the moving average of the weights if the run has one.

    With --batch_norm_statistics=exact, it skips checkpoints that were saved without the statistics of their weights.

    Starts Horovod. Raises UserError, also if there are several workers.
    """
    recipe = dataclasses.replace(settings.recipe, precision="float32",
                                 image_size=Piecewise.parse(settings.recipe.validation_image_size, int))
    world = start_and_check_flags(settings)
    if world.size > 1:
        raise UserError(f"--mode={settings.run.mode} runs on one worker; start it without a launcher",
                        on_all_ranks=True)
    dataset = _labels(recipe.data_dir)
    model = build.make_model(recipe, dataset)
    average = build.make_average(recipe, model)
    needs_statistics = recipe.batch_norm_statistics == "exact" and bool(norms(model))
    described = load_model(settings.run.checkpoint, model, average, needs_statistics)
    classes = described["classes"]
    if difference := differing_classes(classes, dataset.classes):
        complain(f"{difference}; the names are the checkpoint's")
    if average:
        with average.swapped_in():
            weights = [variable.numpy() for variable in model.variables]
        model.set_weights(weights)
    split_groups(model)
    return Trained(model, tuple(classes), recipe.validation_image_size, AUGMENTATIONS[recipe.augmentation].enlarge,
                   described["epoch"], "moving average" if average else "last", recipe.evaluation_views)


def split_groups(model) -> None:
    """Replaces each grouped convolution by one convolution per group, with the same weights.

    Keras compiles grouped convolutions with XLA, which ONNX and some servers of SavedModels do not support.
    """
    for layer in layers_of(model):
        if isinstance(layer, tf.keras.layers.Conv2D) and layer.groups > 1:
            layer.convolution_op = functools.partial(_split_convolution, layer, layer.groups)
            layer.groups = 1


def _split_convolution(layer, groups, inputs, kernel):
    parts = zip(tf.split(inputs, groups, axis=-1), tf.split(kernel, groups, axis=-1), strict=True)
    return tf.concat([tf.nn.conv2d(part, weights, layer.strides, layer.padding.upper()) for part, weights in parts],
                     axis=-1)


def _labels(data_dir: str):
    """Opens the dataset for its class names; its image files may be missing. Raises UserError."""
    try:
        return open_named(data_dir, check_files=False)
    except UserError as error:
        if data_dir.startswith("synthetic:") or Path(data_dir, "dataset.json").exists():
            raise
        raise UserError(f"--data_dir: there is no dataset in {data_dir}, which has the names of the classes; give its "
                        "folder, or a folder with a copy of its dataset.json") from error
