"""Starts a training from trained weights (--init_checkpoint, --pretrained)."""
import sys
from collections.abc import Sequence
from pathlib import Path

from common.errors import UserError
from model_zoo.applications import load_pretrained
from model_zoo.layers import input_numbers, last_layer
from training.checkpoints import differing_classes, intact, labels_of, note_normalization, same_classes
from training.state import INPUT, named


def initialize(path: str | None, model, classes: Sequence[str], average=None) -> None:
    """Gives a model the weights of the newest checkpoint in `path`: their moving average, if that run has one.

    The input normalization comes with them. The last layer keeps its initial values if that run had other classes. If
    it had the same ones in another order, the layer is taken in the order here. Says on standard error what was taken.
    Raises UserError if another layer differs.

    path: None for Keras's ImageNet weights. classes: names in label order. average: optim.average.WeightAverage of the
    model, which starts again, or None.
    """
    if path is None:
        new = load_pretrained(model)
        if average:
            average.restart()
        loaded = len(model.variables) - sum(len(layer.weights) for layer in new)
        print(f"pretrained: took {loaded} of {len(model.variables)} variables from ImageNet's weights of Keras; new: "
              f"{', '.join(layer.name for layer in new)}", file=sys.stderr, flush=True)
        return
    for checkpoint, tensors, described in intact(Path(path)):
        saved, is_average = _weights(tensors)
        ours = named("model", model.variables)
        last = {variable.ref() for variable in last_layer(model).variables}
        head = [name for name, variable in ours.items() if name in saved and variable.ref() in last]
        names = described.get("classes", [])
        are_other = bool(names) and not same_classes(names, classes)
        new = [name for name in head if are_other or saved[name].shape != tuple(ours[name].shape)]
        if names and not are_other and names != [*classes]:
            saved |= {name: saved[name][..., labels_of(classes, names)] for name in head}
        _check_fit(checkpoint, {name: tensor for name, tensor in saved.items() if name not in new},
                   {name: variable for name, variable in ours.items() if name not in new})
        for name in ours.keys() - {*new}:
            ours[name].assign(saved[name])
        numbers = {name: one for name, one in named(INPUT, input_numbers(model)).items() if name in tensors}
        note_normalization(checkpoint, tensors, numbers)
        for name, variable in numbers.items():
            variable.assign(tensors[name])
        if average:
            average.restart()
        what = "moving averages" if is_average else "variables"
        _say(f"took {len(ours) - len(new)} of {len(ours)} {what} from {checkpoint} (epoch {described['epoch']:g})")
        if new:
            fits = all(saved[name].shape == tuple(ours[name].shape) for name in new)
            shapes = (f"{name.split('/', 2)[-1]} {tuple(ours[name].shape)}"
                      + ("" if fits else f" instead of {saved[name].shape}") for name in new)
            _say(f"new: {', '.join(shapes)}" + (f", because {differing_classes(names, classes)}" if fits else ""))
        return
    raise UserError(f"--init_checkpoint: {path} contains no readable checkpoint; give the folder RUN/checkpoints of a "
                    "training run")


def _weights(tensors: dict) -> tuple[dict, bool]:
    """Returns a checkpoint's variables of the model by name, and whether they are averages."""
    names = [name for name in sorted(tensors) if name.startswith("model/")]
    averages = [tensors[name] for name in sorted(tensors) if name.startswith("ema/")]
    values = averages or [tensors[name] for name in names]
    return dict(zip(names, values, strict=True)), bool(averages)


def _check_fit(checkpoint, saved, ours) -> None:
    for name in sorted(saved.keys() | ours.keys()):
        theirs, here = (str(tuple(values[name].shape)) if name in values else "missing" for values in (saved, ours))
        if theirs != here:
            raise UserError(f"--init_checkpoint: {checkpoint} does not fit this model: {name} is {theirs} in the "
                            f"checkpoint and {here} here; use the --model of that run; a model with dense layers "
                            "before the last one also needs its --image_size")


def _say(line: str) -> None:
    print(f"init_checkpoint: {line}", file=sys.stderr, flush=True)
