"""Starts the observers of a training, which are rank 0's, and contains what the users' own raise."""
import contextlib
import dataclasses
import functools
import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common import own
from common.errors import UserError, complain, one_line
from data.pipeline import DecoderSettings
from model_zoo.cost import counted
from plan.run_folder import RunFolder
from plan.summary import doubts
from training.build import Job
from training.observer import Observer, RunInfo

# A forecast's assumptions: multiply-adds per second of a CPU core, and those of an update per one of the forward pass.
CORE, BACKWARD = 20e9, 3
LONG = 60  # minutes
PROCESSORS = Path("/proc/cpuinfo")
METHODS = ("start", "step", "evaluation", "rewind", "end", "close")


class UserObserver(Observer):
    """An observer of the user's own. It declares what it wants by the methods that it has.

    An exception in `start` ends training before the first step. Later exceptions are reported once for each method, and
    training continues.

    methods: those of METHODS that it has, by name.
    """

    def __init__(self, name: str, observer):
        self._name = name
        self.methods = {method: call for method in METHODS if callable(call := getattr(observer, method, None))}
        self._failed = set()
        self._is_started = False

    def start(self, run) -> None:
        try:
            self.methods.get("start", _ignore)(run)
        except Exception as error:
            raise UserError(f"--observer={self._name}: {described(error)}") from None
        self._is_started = True

    def step(self, update) -> None:
        self._call("step", update)

    def evaluation(self, evaluation) -> None:
        self._call("evaluation", evaluation)

    def rewind(self, progress) -> None:
        self._call("rewind", progress)

    def end(self, summary) -> None:
        self._call("end", summary)

    def close(self) -> None:
        if self._is_started:
            self._call("close")

    def _call(self, method, *arguments):
        try:
            self.methods.get(method, _ignore)(*arguments)
        except Exception as error:
            if method not in self._failed:
                complain(f"warning: --observer={self._name}: {method}() failed, training continues: "
                         f"{described(error)}")
            self._failed.add(method)


def _ignore(*_):
    pass


def described(error: Exception) -> str:
    """Returns an error of the user's code, and where it was raised, on one line."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without the frame that called it
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {one_line(error)}{where}"


def load_observers(names: Sequence[str]) -> list[UserObserver]:
    """Creates the observers of --observer=MODULE:NAME. The current folder is searched for modules last.

    Raises UserError for whatever goes wrong, in the user's code, too.
    """
    if names:
        own.search_here()
    return [_load(name) for name in names]


def _load(name) -> UserObserver:
    module, _, attribute = name.partition(":")
    try:
        made = importlib.import_module(module)
        for part in attribute.split("."):
            made = getattr(made, part)
        observer = UserObserver(name, made())
    except Exception as error:
        raise UserError(f"--observer={name}: {described(error)}") from None
    if not observer.methods:
        raise UserError(f"--observer={name}: {attribute}() has none of the methods {', '.join(METHODS)}; see "
                        "docs/observers.md")
    return observer


def start_observers(job: Job, folder: RunFolder, hosts: dict[str, int], observers: Sequence[Observer],
                    held: contextlib.ExitStack) -> None:
    """Starts the observers, and says what is about to be trained. `held` closes them.

    hosts: number of workers on each host.
    """
    settings = job.settings
    images = None if job.feed.dataset.is_synthetic else functools.partial(training_images, job)
    run = RunInfo(folder.path, job.plan.as_json(), settings.given, settings.text, settings.recipe_file,
                  job.feed.dataset, hosts, job.state.progress, settings.origins, images)
    if settings.source:
        print("recipe:", settings.source, *settings.fitted, file=sys.stderr)
    for line in (*doubts(settings, job.plan), *forecast(job)):
        print(line, file=sys.stderr)
    print(f"run: {folder.path}", file=sys.stderr)
    for observer in observers:
        held.callback(observer.close)
        observer.start(run)


def forecast(job: Job) -> list[str]:
    """Returns a line about the time that a training on CPUs will take, and what is smaller if that is long.

    Its unit is an hour or a minute, because the speed of a processor is only assumed.
    """
    plan, model, cores = job.plan, job.state.model, job.world.size * job.world.cores
    if job.world.gpu is not None or None in model.input_shape[1:]:
        return []
    images = plan.samples - plan.position(job.state.progress.step)
    if not images:
        return []
    minutes = images * BACKWARD * counted(model).multiply_adds / (CORE * cores) / 60
    if minutes < LONG:
        return [f"forecast: about {max(1, round(minutes))} min on {cores} CPU cores"]
    faster = "--model=resnet10_narrow --image_size=64"
    if job.settings.recipe.precision == "float32" and has_bfloat16():
        faster += " or --precision=mixed_bfloat16"
    return [f"forecast: about {round(minutes / 60):,} h on {cores} CPU cores; without a GPU, {faster} is faster"]


def has_bfloat16(about: Path = PROCESSORS) -> bool:
    """Whether the processor multiplies bfloat16. oneDNN then trains ResNet-50 in 0.6 of float32's time."""
    return about.exists() and bool({"avx512_bf16", "amx_bf16"} & {*about.read_text().split()})


def training_images(job: Job, number: int, largest: int) -> tuple[np.ndarray, list[str]]:
    """Returns the first images of the training after augmentation, uint8 (number, size, size, 3), and their classes.

    It uses an input pipeline of its own, on the CPU. largest: greatest size. Images of a larger model are made smaller.
    """
    feed = dataclasses.replace(job.feed, shard=0, shards=1, device=DecoderSettings())
    size = min(job.plan.phases[0].image_size or feed.image_size, largest)
    with feed.train(0, 1, number, number, image_size=size) as batches:
        images, labels, *_ = next(batches)
    return images.numpy(), [job.feed.dataset.classes[label] for label in labels.numpy().flat]
