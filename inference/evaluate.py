"""Evaluates a checkpoint on the validation set (--mode=evaluate)."""
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import tensorflow as tf

from common import metric
from common.errors import complain
from common.run_folder import CLASSES, SUMMARY, RunFolder
from data.dataset import Dataset
from distributed.world import World
from plan.plan import make_plan
from plan.settings import Settings
from reporting.progress import result_lines
from training import build
from training.batch_norm import ExactStatistics
from training.build import start_and_check_flags
from training.by_class import as_csv, by_class
from training.restoring import has_statistics, labels_of, load_model
from training.summary import summarized


def evaluate_checkpoint(settings: Settings, dataset: Dataset) -> dict:
    """Evaluates the newest checkpoint of --checkpoint. Returns the content of summary.json.

    It writes summary.json and classes.csv into --output_dir if that is given.
    """
    recipe, launch, run = settings.recipe, settings.launch, settings.run
    world = start_and_check_flags(settings)
    started = time.perf_counter()
    dataset = build.stage_dataset(build.share_dataset(dataset, world), recipe, launch, world)
    with world.raise_on_all_ranks():
        feed = build.make_feed(recipe, launch, dataset, world)
        model = build.make_model(recipe, dataset)
        average = build.make_average(recipe, model)
        described = load_model(run.checkpoint, model, average, classes=dataset.classes, is_quiet=world.rank > 0)
        model = in_order(model, described["classes"], dataset.classes)
        measure = measurement(settings, described, model, feed, world)
    evaluator = build.make_evaluator(launch, model, feed, world, average)
    begun = time.perf_counter()
    result = evaluator(measure=measure)
    ended = time.perf_counter()
    summary = summarized(result, dataset, described["epoch"], recipe.batch_size.values[-1], world,
                         result.metrics[metric.VAL_SAMPLES] / (ended - begun), ended - started)
    with world.raise_on_all_ranks():
        if world.rank == 0:
            print(*result_lines(summary, len(dataset.classes)), sep="\n", file=sys.stderr)
            if run.output_dir:
                Path(run.output_dir).mkdir(parents=True, exist_ok=True)
                folder = RunFolder(run.output_dir)
                folder.write(SUMMARY, summary)
                folder.write(CLASSES, as_csv(by_class(*result.outcomes[:, :2].T, dataset.classes)))
                folder.save_or_raise()
    return summary


def in_order(model, names: Sequence[str], classes: Sequence[str]):
    """Returns a model whose logits are in the order of `classes`. names: those of the model, or none."""
    if not names or [*names] == [*classes]:
        return model
    logits = tf.gather(model.output, labels_of(classes, names), axis=1)
    return tf.keras.Model(model.input, logits, name=model.name)


def measurement(settings: Settings, described: dict, model, feed, world: World) -> Callable[[], None]:
    """Returns a function that measures batch norm's exact statistics for a checkpoint that was saved without them.

    It reads the same training samples as an evaluation at this step. Raises UserError.
    """
    recipe = settings.recipe
    if recipe.batch_norm_statistics != "exact" or has_statistics(described):
        return lambda: None
    progress = described["progress"]
    epoch = described["epoch"]
    span = recipe.batch_norm_span and recipe.batch_norm_span(epoch)  # one micro-batch, even if workers shared it
    plan = make_plan(dataclasses.replace(recipe, batch_norm_span=None), span or settings.launch.micro_batch_size,
                     world.size, feed.dataset.train.samples, uneven=True)
    phase = plan.phase_at(epoch)
    position = plan.position(progress["step"]) + progress["skipped"]
    if world.rank == 0:
        complain("batch norm's statistics are measured again, because the checkpoint was saved between two evaluations")
    return functools.partial(ExactStatistics(model, world).measure, feed, [position], phase)
