"""A network of the user's own, MODULE:FUNCTION: what the function returned becomes a model that can be trained here."""
import re

import numpy as np
import tensorflow as tf

from common.activity import startup
from common.errors import UserError, complain
from model_zoo.layers import layers_of, make_own, masks_at, norms

RESCALING = ("Normalization", "Rescaling")  # layers that scale pixels
SCALING = (*RESCALING, "Lambda", "SlicingOpLambda", "TFOpLambda")  # those that may, as Keras's preprocess_input does
PASSING = ("Cast", "ExpandDims", "Identity", "Reshape", "Squeeze")  # operations that keep the values
RANDOM = re.compile("Multinomial|Random|RngReadAndSkip|^Stateful|^TruncatedNormal")  # operations
ASSIGNING = re.compile("^Assign|^Resource(Apply|Scatter)")
CONTRASTS = (1, 0.1, 0.01, 0)  # of random images, to look at the outputs: an exponential may overflow
SIZE = 224  # of these images, if the model takes any


def own_model(made, images, pixels, name: str, classes: int, batch_norm_momentum: float, seed: int):
    """Returns the model from images to logits. Raises UserError if it cannot be trained, or Keras's errors.

    made: what the function returned: logits or a model. images: the model's input, from 0 to 255. pixels: the images,
    normalized for the function. A model gets `images` if it scales its input itself, else `pixels`.
    """
    is_model = isinstance(made, tf.keras.Model)
    if is_model:
        if not made.built:
            made.build(images.shape)
        scaling = _scaling(made, SCALING)
        made = made(images if scaling else pixels)
    if not isinstance(made, type(images)):
        raise UserError(f"the function returns {made if made is None else type(made).__name__}; return the logits, a "
                        "Keras tensor, or a model")
    model = tf.keras.Model(images, made, name=name.replace(":", "-"))
    make_own(model, batch_norm_momentum, seed)
    _check_logits(model, classes)
    remarks = _check_training(model)
    if is_model:
        remarks.append(f"the model gets pixels from 0 to 255, which its layer {scaling} scales" if scaling else
                       "the model gets normalized pixels; one with a Rescaling layer gets them from 0 to 255")
    elif scaling := _scaling(model, RESCALING):
        remarks.append(f"layer {scaling} scales pixels that are normalized already; return a model of its own "
                       "tf.keras.Input, which gets them from 0 to 255")
    for line in remarks if startup.is_open else ():  # once: on rank 0
        complain(f"--model={name}: {line}")
    return model


def _scaling(model, kinds) -> str | None:
    """Returns the name of a layer that scales the pixels, before the first with trained weights, or None."""
    for layer in layers_of(model):
        if type(layer).__name__ in kinds:
            return layer.name
        if layer.weights:
            return None
    return None


def _traced(model, training: bool):
    size = model.input_shape[1] or SIZE
    call = tf.function(lambda images: model(images, training=training), autograph=False)
    return call.get_concrete_function(tf.TensorSpec([len(CONTRASTS), size, size, 3]))


def _check_logits(model, classes: int) -> None:
    """Raises UserError unless the outputs are one number per class, and no probabilities.

    What ends in a softmax or sigmoid is found in the graph, and any other way to make probabilities by their sum.
    """
    call = _traced(model, training=False)
    images = np.random.default_rng(0).uniform(0, 255, call.inputs[0].shape) * np.reshape(CONTRASTS, (-1, 1, 1, 1))
    outputs = tf.cast(call(tf.constant(images, tf.float32)), tf.float32).numpy()
    if outputs.shape != (len(CONTRASTS), classes):
        raise UserError(f"its outputs have the shape (batch{''.join(f', {size}' for size in outputs.shape[1:])}), and "
                        f"the data {classes} classes; return logits of the shape (batch, {classes})")
    last = call.outputs[0].op
    while last.type in PASSING:
        last = last.inputs[0].op
    finite = outputs[np.isfinite(outputs).all(axis=1)]
    are_shares = finite.size and classes > 1 and (finite >= 0).all() and np.allclose(finite.sum(axis=1), 1, atol=1e-2)
    if last.type in ("Sigmoid", "Softmax") or are_shares:
        raise UserError("its outputs are probabilities, of which the loss would take the softmax again; return the "
                        "logits, without an activation of the last layer (activation=None)")


def _check_training(model) -> list[str]:
    """Traces the model in training. Returns remarks. Raises UserError for what would differ between workers.

    Marks the batch norms that do not get the training argument of the model's call.
    """
    calls, layers = [], norms(model)
    for layer in layers:
        layer.observe = lambda *_, layer=layer: calls.append(id(layer))
    with masks_at(model, tf.constant(0, tf.int64)):
        graph = _traced(model, training=True).graph.as_graph_def()
    for layer in layers:
        layer.observe = None
        layer.called_in_training = id(layer) in calls
        if calls.count(id(layer)) > 1:
            raise UserError(f"layer {layer.name} is called more than once, and batch norm has the statistics of one "
                            "call; use a layer for each call")
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    for node in nodes:
        if ASSIGNING.search(node.op):
            raise UserError(f"{_layer_of(node, model)} changes variables in training by itself, so that they would "
                            "differ between workers; for batch norm, use tf.keras.layers.BatchNormalization")
    random = next((node for node in nodes if RANDOM.search(node.op) and not node.op.startswith("Stateless")), None)
    return [f"{_layer_of(random, model)} draws random numbers that no checkpoint holds, so a resumed run draws others; "
            "Dropout and SpatialDropout2D of Keras resume exactly"] if random else []


def _layer_of(node, model) -> str:
    """Returns the innermost layer in the name of an operation."""
    names = {layer.name for layer in layers_of(model)}
    return next((f"layer {part}" for part in reversed(node.name.split("/")) if part in names), f"operation {node.name}")
