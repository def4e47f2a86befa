"""Evaluates a checkpoint on the validation set (--mode=evaluate)."""
import sys
import time
from pathlib import Path

from data.dataset import Dataset
from reporting.progress import validation_line
from reporting.run_folder import SUMMARY, RunFolder
from training import build
from training.checkpoints import load_model
from training.run import start_and_check_flags
from training.settings import Settings
from training.summary import summarized


def evaluate_checkpoint(settings: Settings, dataset: Dataset) -> dict:
    """Evaluates the newest checkpoint of --checkpoint. Returns the content of summary.json.

    It writes summary.json into --output_dir if that is given.
    """
    recipe, launch, run = settings.recipe, settings.launch, settings.run
    world = start_and_check_flags(settings)
    started = time.perf_counter()
    dataset = build.stage_dataset(build.share_dataset(dataset, world), launch, world)
    with world.raise_on_all_ranks():
        feed = build.make_feed(recipe, launch, dataset, world)
        model = build.make_model(recipe, dataset)
        average = build.make_average(recipe, model)
        epoch = load_model(run.checkpoint, model, average)
    evaluator, begun = build.make_evaluator(launch, model, feed, world, average), time.perf_counter()
    metrics = evaluator().metrics
    ended = time.perf_counter()
    summary = summarized(metrics, dataset.train.samples, epoch, recipe.batch_size.values[-1], world,
                         metrics["val_samples"] / (ended - begun), ended - started)
    with world.raise_on_all_ranks():
        if world.rank == 0:
            print(validation_line(summary), file=sys.stderr)
            if run.output_dir:
                Path(run.output_dir).mkdir(parents=True, exist_ok=True)
                folder = RunFolder(run.output_dir)
                folder.write(SUMMARY, summary)
                folder.save_or_raise()
    return summary
