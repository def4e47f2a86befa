"""Starts a training from trained weights (--init_checkpoint, --pretrained)."""
import sys
from pathlib import Path

from common.errors import UserError
from model_zoo.applications import load_pretrained
from model_zoo.layers import last_layer
from training.checkpoints import intact
from training.state import named


def initialize(path: str | None, model, average=None) -> None:
    """Gives a model the weights of the newest checkpoint in `path`: their moving average, if that run has one.

    The last layer keeps its initial values if its shape differs, that is, with another number of classes. Says on
    standard error what was taken. Raises UserError if another layer differs.

    path: None for Keras's ImageNet weights. average: optim.average.WeightAverage of the model, which starts again, or
    None.
    """
    if path is None:
        loaded = load_pretrained(model)
        if average:
            average.restart()
        print(f"pretrained: took {loaded} of {len(model.variables)} variables from ImageNet's weights of Keras; the "
              "last layer is new", file=sys.stderr, flush=True)
        return
    for found, tensors, described in intact(Path(path)):
        saved, is_average = _weights(tensors)
        ours = named("model", model.variables)
        last = {variable.ref() for variable in last_layer(model).variables}
        new = [name for name, variable in ours.items()
               if name in saved and variable.ref() in last and saved[name].shape != tuple(variable.shape)]
        _check_fit(found, {name: tensor for name, tensor in saved.items() if name not in new},
                   {name: variable for name, variable in ours.items() if name not in new})
        for name in ours.keys() - {*new}:
            ours[name].assign(saved[name])
        if average:
            average.restart()
        what = "moving averages" if is_average else "variables"
        _say(f"took {len(ours) - len(new)} of {len(ours)} {what} from {found} (epoch {described['epoch']:g})")
        if new:
            shapes = (f"{name.split('/', 2)[-1]} {tuple(ours[name].shape)} instead of {saved[name].shape}"
                      for name in new)
            _say(f"new: {', '.join(shapes)}")
        return
    raise UserError(f"--init_checkpoint: {path} contains no readable checkpoint; give the folder RUN/checkpoints of a "
                    "training run")


def _weights(tensors: dict) -> tuple[dict, bool]:
    """Returns a checkpoint's variables of the model by name, and whether they are averages."""
    names = [name for name in sorted(tensors) if name.startswith("model/")]
    averages = [tensors[name] for name in sorted(tensors) if name.startswith("ema/")]
    values = averages or [tensors[name] for name in names]
    return dict(zip(names, values, strict=True)), bool(averages)


def _check_fit(found, saved, ours) -> None:
    for name in sorted(saved.keys() | ours.keys()):
        theirs, here = (str(tuple(values[name].shape)) if name in values else "missing" for values in (saved, ours))
        if theirs != here:
            raise UserError(f"--init_checkpoint: {found} does not fit this model: {name} is {theirs} in the checkpoint "
                            f"and {here} here; use the --model of that run; a model with dense layers before the last "
                            "one also needs its --image_size")


def _say(line: str) -> None:
    print(f"init_checkpoint: {line}", file=sys.stderr, flush=True)
