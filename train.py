"""Bigbatch: trains a convolutional network with large batches, on one worker or on all workers of a launcher.

    uv run train.py                                       the built-in digits, on one worker
    uv run horovodrun --gloo -np 2 python train.py        the same on two
    uv run train.py --flagfile=R --dry_run                the plan of a recipe
    uv run train.py --mode=evaluate --checkpoint=RUN/checkpoints/best
    uv run train.py --mode=export --checkpoint=RUN/checkpoints/best --output_dir=FOLDER
    uv run train.py --mode=predict --checkpoint=RUN/checkpoints/best --image=FILE
"""
from training.stopping import StopRequest

if __name__ == "__main__":  # a request to stop may come while the modules below are imported, which takes seconds
    StopRequest().install()

try:
    import absl  # noqa: F401
except ImportError:
    raise SystemExit("train.py: this Python lacks the packages; start it with `uv run train.py`") from None

import os
import sys
from pathlib import Path

from common import command, launcher, streams
from common.activity import startup
from common.errors import UserError, complain
from common.files import as_json
from common.version import version
from data import duplicates
from data.balance import check_dataset, class_counts, notes, notes_on_enlarging, notes_on_folder, notes_on_sizes
from data.dataset import Dataset
from data.named import open_named
from data.sources import BUILT_IN
from distributed import gpus
from distributed.lost import explain_horovods_errors
from launch.job import micro_batch_flags
from model_zoo.weights import check_weights
from plan import flags, output_dir
from plan.allreduce import check_nodes
from plan.plan import plan_for
from plan.recipes import data_of_run
from plan.remarks import remarks
from plan.settings import Settings
from plan.summary import summary

PAPERS_NODE = 4  # default workers per node of a cluster planned with --workers, as in arXiv:1811.05233


@command.program("train.py", None, lambda argv: [flags.help_text(argv)], lambda: finish())
@command.json_only_on_stdout()
@explain_horovods_errors()
def main(argv) -> None:
    """Runs a command line."""
    settings = flags.parse(argv)
    run = settings.run
    flags.check_own(settings, observers=launcher.launched().size == 1)
    if settings.without_effect and launcher.launched().rank == 0:
        complain("; ".join(settings.without_effect))
    if run.timeline and not Path(run.timeline).parent.is_dir():
        raise UserError(f"--timeline: the folder of {run.timeline} does not exist; create it first")
    if run.dry_run:
        dry_run(settings)
    elif run.mode == "train":
        finish(train(settings))
    elif run.mode == "evaluate":
        evaluate(settings)
    else:
        use(settings)


def train(settings: Settings) -> dict:
    """Trains; returns the content of summary.json."""
    stop, launched, plan = StopRequest(), launcher.launched(), None
    stop.install()  # the training asks this one; the first one only ends the process during the imports
    streams.Output.is_kept = True  # in summary.json
    startup.begin(launched.rank)
    if launched.rank == 0:  # other ranks may have no access
        output_dir.check(settings)
        if (unread := settings.run.checkpoint) and not os.path.exists(unread):
            raise UserError(f"--checkpoint: {unread} does not exist; training starts from the weights of another run "
                            "with --init_checkpoint, and resumes a run with its --output_dir")
        if settings.recipe.is_pretrained and not settings.run.init_checkpoint and not output_dir.resumes(settings):
            check_weights(settings.recipe.model, settings.recipe.pretrained_weights)
    recipe = settings.recipe
    dataset = open_named(recipe.data_dir, launched.rank == 0, recipe.validation_fraction)
    check_dataset(dataset)  # on all ranks: an mpirun that kills one in MPI_Init may hang
    for line in notes_on(dataset, settings) if launched.rank == 0 else ():
        complain(line)
    if not settings.launch.elastic:  # errors in the plan show at once
        check_nodes(settings.launch.allreduce, settings.launch.torus_grid)
        plan = plan_for(settings, launched.size, launched.local_size, dataset.train.samples)
    with startup.stage("loading TensorFlow"):
        from distributed.world import sees_gpus
        from reporting.run_log import observers_of
        from training.build import set_variables
        from training.run import make_training

    if launched.rank == 0 and not os.path.exists(sys.modules["tensorflow"].__spec__.cached):
        print("start-up: most of loading TensorFlow is that Python compiles it, in each command, because it may not "
              "write bytecode; `uv sync --compile-bytecode` does that once", file=sys.stderr)
    set_variables(settings)
    if launched.rank == 0 and sees_gpus(settings.launch.device):
        memory = min((gpu.memory for gpu in gpus.visible()), default=None)
        for flag in micro_batch_flags(settings, launched.size, memory, builds=False):
            complain(f"this run had {flag}, which the scripts in launch/ keep" if output_dir.resumes(settings) else
                     f"the default micro-batch does not depend on the device; {flag} suits the GPUs' memory")
    attempt = make_training(settings, dataset, plan, stop, observers_of)
    return attempt()


def notes_on(dataset: Dataset, settings: Settings) -> list[str]:
    """Returns what to tell the user about the images of a training."""
    counts = class_counts(dataset)
    lines = notes(dataset, bool(settings.recipe.class_weights), counts)
    if settings.recipe.data_dir not in BUILT_IN:
        lines += notes_on_sizes(dataset, counts)
        if counts[0] is not None and not (settings.has_initial_weights or settings.is_given("image_size")):
            lines += notes_on_enlarging(dataset, settings.recipe.final_image_size)
    if dataset.train.fraction:
        with startup.stage("comparing images"):
            lines += duplicates.notes(dataset)
    elif settings.is_given("validation_fraction"):
        lines.append(f"--validation_fraction has no effect, because {dataset.folder} has validation images")
    return lines


def evaluate(settings: Settings) -> None:
    """Evaluates a checkpoint and prints the content of summary.json."""
    if launcher.launched().rank == 0:
        output_dir.check(settings)
    data_dir = settings.recipe.data_dir
    trained_on, fraction = data_of_run(settings.run.checkpoint)
    is_own = trained_on and os.path.realpath(data_dir) == os.path.realpath(trained_on)
    dataset = open_named(data_dir, launcher.launched().rank == 0, fraction if is_own else 1)
    for line in notes_on_folder(dataset):
        complain(line)
    from inference.evaluate import evaluate_checkpoint

    finish(evaluate_checkpoint(settings, dataset))


def use(settings: Settings) -> None:
    """Exports a checkpoint and prints where, or predicts images and prints a line for each."""
    run = settings.run
    if run.mode == "predict":
        output_dir.check(settings)
    from inference.export import export
    from inference.predict import as_line, image_files, predict
    from inference.predictions import write_predictions
    from inference.trained import load_trained

    files = image_files(run.image)  # errors in the names show at once
    trained, rows = load_trained(settings), []
    if run.mode == "export":
        command.output(as_json(export(trained, Path(run.output_dir), run.tflite)))
        return
    try:
        for row in predict(trained, files):
            command.output(as_line(row) if command.is_read_by_a_person() else as_json(row, ensure_ascii=False))
            rows.append(row)
    finally:  # also if some files could not be read
        if run.output_dir and rows:
            write_predictions(Path(run.output_dir), rows, {"checkpoint": run.checkpoint, "version": version()})


def dry_run(settings: Settings) -> None:
    """Prints the plan: in words to a person, otherwise as JSON, with the remarks on standard error."""
    run, launched = settings.run, launcher.launched()
    if launched.size > 1:  # a worker that trains would wait for this one forever
        from training.build import start_and_check_flags

        start_and_check_flags(settings)
    samples = run.train_samples or open_named(
        settings.recipe.data_dir, fraction=settings.recipe.validation_fraction).train.samples
    local_size = run.workers_per_node or (PAPERS_NODE if run.workers else launched.local_size)
    schedule = settings.launch.workers_schedule
    plan = plan_for(settings, run.workers or (schedule.values[0] if schedule else launched.size), local_size, samples)
    if launched.rank == 0:
        if settings.source.is_default:
            print("recipe:", settings.source.file, *settings.source.fitted, file=sys.stderr)
        for_person = command.is_read_by_a_person()
        if not for_person:
            command.output(as_json(plan.as_json(), indent=1))
        for line in (summary if for_person else remarks)(settings, plan, local_size):
            print(line, file=sys.stderr)


def finish(summary: dict | None = None) -> None:
    """Waits for all ranks, because mpirun kills all of them when one exits. Before that, rank 0 prints the summary."""
    from distributed.world import World

    world = World().renumbered()
    if summary and world.rank == 0 and not command.is_read_by_a_person():  # it is on standard error
        command.output(as_json(summary))
    world.barrier()


if __name__ == "__main__":
    command.end(main(sys.argv))
