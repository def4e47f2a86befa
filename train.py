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

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from common import command, launcher, open_mpi, streams
from common.activity import startup
from common.cores import cores_of_worker
from common.errors import UsageError, UserError, complain
from common.files import as_json
from common.version import version
from data import facts
from data.balance import check_dataset
from data.dataset import Dataset
from data.named import is_table, open_named, open_on_each_rank
from data.sources import BUILT_IN
from distributed import gpus
from distributed.lost import explain_horovods_errors
from hints.before import on_images, on_plan
from hints.hint import Hint
from model_zoo.cost import forward
from model_zoo.weights import check_weights
from plan import flags, output_dir
from plan.allreduce import check_nodes
from plan.forecast import cpu_time
from plan.plan import plan_for
from plan.recipes import data_of_run
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
        with open_mpi.ended_together():
            check_files(settings)
    recipe = settings.recipe
    if settings.is_given("label_column") and not is_table(recipe.data_dir):
        raise UsageError("--label_column names a column of a table; give that as --data_dir=TABLE")
    dataset = open_on_each_rank(recipe.data_dir, recipe.validation_fraction, recipe.label_column)
    check_dataset(dataset)  # on all ranks: an mpirun that kills one in MPI_Init may hang
    if launched.rank == 0:
        with open_mpi.ended_together():
            tell(dataset, settings)
    if not settings.launch.elastic:  # errors in the plan show at once
        check_nodes(settings.launch.allreduce, settings.launch.torus_grid)
        plan = plan_for(settings, launched.size, launched.local_size, dataset.train.samples)
    with startup.stage("loading TensorFlow"):
        from reporting.run_log import observers_of
        from training.build import set_variables
        from training.run import make_training

    if launched.rank == 0 and not os.path.exists(sys.modules["tensorflow"].__spec__.cached):
        print("start-up: most of loading TensorFlow is that Python compiles it, in each command, because it may not "
              "write bytecode; `uv sync --compile-bytecode` does that once", file=sys.stderr)
    set_variables(settings)
    attempt = make_training(settings, dataset, plan, stop, observers_of)
    return attempt()


def check_files(settings: Settings) -> None:
    """Raises UserError and OSError if a training cannot write its folder, or lacks what it starts from."""
    output_dir.check(settings)
    if (unread := settings.run.checkpoint) and not os.path.exists(unread):
        raise UserError(f"--checkpoint: {unread} does not exist; training starts from the weights of another run "
                        "with --init_checkpoint, and resumes a run with its --output_dir")
    check_initial_weights(settings)


def check_initial_weights(settings: Settings) -> None:
    """Raises UserError if a training would start from weights for a network of Keras that cannot be had."""
    if settings.recipe.is_pretrained and not settings.run.init_checkpoint and not output_dir.resumes(settings):
        check_weights(settings.recipe.model, settings.recipe.pretrained_weights)


def tell(dataset: Dataset, settings: Settings) -> None:
    """Prints what the dataset is, and hints on its images."""
    is_divided = dataset.train.fraction.is_part
    with startup.stage("comparing images") if is_divided else contextlib.nullcontext():
        lines = facts.of_dataset(dataset, settings.recipe.data_dir in BUILT_IN, is_divided)
    if not is_divided and settings.is_given("validation_fraction"):
        lines.append(f"--validation_fraction has no effect, because {dataset.folder} has validation images")
    for line in lines:
        complain(line)
    say(hints_on(dataset, settings))


def hints_on(dataset: Dataset | None, settings: Settings) -> list[Hint]:
    """Returns the hints on the images of a training. dataset: None in a dry run without it."""
    is_on_cpu = not (settings.run.workers or gpus.visible(settings.launch.device))
    counts = dataset.class_counts[0] if dataset and settings.recipe.data_dir not in BUILT_IN else None
    if counts is None:
        return on_images(settings, {}, 0, is_on_cpu)
    by_class = dict(zip(dataset.classes, counts.tolist(), strict=True))
    return on_images(settings, by_class, facts.typical_side(dataset.train), is_on_cpu)


def forecast(settings: Settings, samples: int) -> list[str]:
    """Returns the line that says how long this launch would take on CPUs. samples: size of the training set.

    There is none on GPUs, for several image sizes, and if only the model that is built would tell.
    """
    recipe, launched = settings.recipe, launcher.launched()
    multiply_adds = forward(recipe.model, recipe.final_image_size)
    if not multiply_adds or len(recipe.image_size.values) > 1 or gpus.visible(settings.launch.device):
        return []
    return [cpu_time(recipe, recipe.epochs * samples, multiply_adds,
                     launched.size * cores_of_worker(launched.local_size))]


def say(lines: Iterable) -> None:
    """Prints hints and other lines on standard error."""
    for line in lines:
        print(line, file=sys.stderr)


def evaluate(settings: Settings) -> None:
    """Evaluates a checkpoint and prints the content of summary.json."""
    if launcher.launched().rank == 0:
        with open_mpi.ended_together():
            output_dir.check(settings)
    data_dir = settings.recipe.data_dir
    trained_on, fraction = data_of_run(settings.run.checkpoint)
    is_own = trained_on and os.path.realpath(data_dir) == os.path.realpath(trained_on)
    dataset = open_on_each_rank(data_dir, fraction if is_own else 1, settings.recipe.label_column)
    for line in facts.of_folder(dataset):
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
    """Prints the plan: in words to a person, otherwise as JSON, with forecast and hints on standard error."""
    run, launched = settings.run, launcher.launched()
    if launched.size > 1:  # a worker that trains would wait for this one forever
        from training.build import start_and_check_flags

        start_and_check_flags(settings)
    if settings.recipe.pretrained_weights and not run.train_samples:  # with which files may be elsewhere
        check_initial_weights(settings)
    dataset = None if run.train_samples else open_named(
        settings.recipe.data_dir, fraction=settings.recipe.validation_fraction,
        label_column=settings.recipe.label_column)
    samples = run.train_samples or dataset.train.samples
    local_size = run.workers_per_node or (PAPERS_NODE if run.workers else launched.local_size)
    schedule = settings.launch.workers_schedule
    plan = plan_for(settings, run.workers or (schedule.values[0] if schedule else launched.size), local_size, samples)
    if launched.rank == 0:
        if settings.source.is_default:
            print("recipe:", settings.source.file, *settings.source.fitted, file=sys.stderr)
        for_person = command.is_read_by_a_person()
        if not for_person:
            command.output(as_json(plan.as_json(), indent=1))
        say([*(summary(settings, plan) if for_person else ()), *(() if run.workers else forecast(settings, samples)),
             *on_plan(settings, plan, local_size), *hints_on(dataset, settings)])


def finish(result: dict | None = None) -> None:
    """Waits for all ranks, because mpirun kills all of them when one exits. Before that, rank 0 prints the result."""
    from distributed.world import World

    world = World().renumbered()
    if result and world.rank == 0 and not command.is_read_by_a_person():  # it is on standard error
        command.output(as_json(result))
    world.barrier()


if __name__ == "__main__":
    command.end(main(sys.argv))
