"""Evaluates a checkpoint on a validation set, or on a folder of test images (--mode=evaluate)."""
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import tensorflow as tf

from common import metric
from common.errors import UserError, complain, listed
from common.run_folder import CLASSES, PAGE, PREDICTIONS, SUMMARY, RunFolder
from common.version import version
from data import facts
from data.dataset import Dataset, labels_checksum
from distributed.world import World
from inference.trained import TOP
from plan.plan import make_plan
from plan.recipes import data_of_run
from plan.settings import Settings
from reporting.outcomes import outcomes_json
from reporting.progress import print_result, result_lines
from reporting.report import evaluation_page
from training import build
from training.batch_norm import ExactStatistics
from training.build import start_and_check_flags
from training.by_class import as_csv, by_class
from training.evaluate import EvaluationResult
from training.outcomes import predictions_csv
from training.restoring import differing_classes, give, has_statistics, labels_of, newest, same_classes
from training.summary import summary_json

LISTED = 20  # classes in a message


def evaluate_checkpoint(settings: Settings, dataset: Dataset) -> dict:
    """Evaluates the newest checkpoint of --checkpoint. Returns the content of summary.json.

    It writes what `write_results` does into --output_dir if that is given.
    """
    recipe, launch, run = settings.recipe, settings.launch, settings.run
    world = start_and_check_flags(settings)
    started = time.perf_counter()
    dataset = build.share_dataset(dataset, world)
    with world.raise_on_all_ranks():
        checkpoint, tensors, described = newest(run.checkpoint)
        dataset = with_all_classes(as_in_training(dataset, described, run.checkpoint), described["classes"])
    dataset = build.stage_dataset(dataset, recipe, launch, world)
    with world.raise_on_all_ranks():
        feed = build.make_feed(recipe, launch, dataset, world)
        model = build.make_model(recipe, dataset)
        average = build.make_average(recipe, model)
        give(checkpoint, tensors, model, average, is_quiet=world.rank > 0)
        model = in_order(model, described["classes"], dataset.classes)
        measure = measurement(settings, described, model, feed, world)
    evaluator = build.make_evaluator(settings, model, feed, world, average,
                                     guesses=min(TOP, len(dataset.classes)) if run.output_dir else 0)
    if world.rank == 0 and not dataset.is_synthetic:
        complain(facts.of_evaluation(dataset, described["progress"].get("labels")))
    begun = time.perf_counter()
    result = evaluator(measure=measure)
    ended = time.perf_counter()
    summary = summary_json(result, dataset, described["epoch"], recipe.batch_size.values[-1], world,
                         result.metrics[metric.VAL_SAMPLES] / (ended - begun), ended - started)
    with world.raise_on_all_ranks():
        if world.rank == 0:
            images = "test" if dataset.train.fraction.is_everything else "validation"
            lines = result_lines(summary, len(dataset.classes), images)
            print_result(lines)
            if run.output_dir:
                write_results(Path(run.output_dir), summary, lines, result, dataset, checkpoint)
    return summary


def write_results(path: Path, summary: dict, lines: list[str], result: EvaluationResult, dataset: Dataset,
                  checkpoint: Path) -> None:
    """Writes summary.json, classes.csv, predictions.csv and report.html into a folder. Raises OSError.

    The last two need images, which synthetic data has not. lines: of `result_lines`.
    """
    path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path)
    folder.write(SUMMARY, summary)
    folder.write(CLASSES, as_csv(by_class(*result.outcomes.pairs, dataset.classes)))
    if not dataset.is_synthetic:
        folder.write(PREDICTIONS, predictions_csv(
            result.outcomes, result.guesses, dataset.validation.names(), dataset.classes))
        made = outcomes_json(result.outcomes, dataset, summary["epochs"])
        folder.write(PAGE, evaluation_page(f"{path.absolute().name}: evaluation", summary, lines, made, {
            "checkpoint": str(checkpoint), "images": str(dataset.validation.paths[0]), "version": version(),
            "page written": time.strftime("%Y-%m-%d %H:%M:%S %z")}))
    folder.save_or_raise()


def as_in_training(dataset: Dataset, described: dict, checkpoint: str) -> Dataset:
    """Returns a folder of classes with the same images set aside as in training, if it is a copy of the training's.

    Any other dataset is returned as it is. described: description of the checkpoint in the path `checkpoint`.
    """
    labels = described["progress"].get("labels")
    if not dataset.validation.fraction.is_everything or not labels:
        return dataset
    divided = dataset.divided(data_of_run(checkpoint)[1])
    return divided if labels_checksum(divided.train) == labels else dataset


def with_all_classes(dataset: Dataset, names: Sequence[str]) -> Dataset:
    """Returns the dataset with the classes of a model of which it has no images, after its own.

    names: of the model's classes. Raises UserError if the dataset has another class.
    """
    ours = dataset.classes
    if same_classes(names, ours):
        return dataset
    if unknown := [name for name in ours if name not in names]:
        first, theirs, own = (listed([*map(repr, some)], most) for some, most in (
            (unknown, 1), (names, LISTED), (ours, LISTED)))
        raise UserError(f"--data_dir: the model does not know the class {first}; it knows {theirs}, and the dataset "
                        f"has {own}")
    if len({*names}) < len(names) or len({*ours}) < len(ours):
        raise UserError(f"--data_dir: {differing_classes(names, ours)}, and some names occur twice")
    return dataclasses.replace(dataset, classes=(*ours, *(name for name in names if name not in ours)))


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
    if not feed.dataset.train.samples:
        raise UserError("--data_dir: this checkpoint lacks batch norm's statistics, which are measured on training "
                        "images, and this folder has none; evaluate RUN/checkpoints/best")
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
