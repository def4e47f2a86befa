"""Bigbatch: trains a convolutional network with large batches, on one worker or on all workers of a launcher.

    uv run train.py                                       the built-in digits, on one worker
    uv run horovodrun --gloo -np 2 python train.py        the same on two
    uv run train.py --flagfile=R --dry_run                the plan of a recipe, as JSON
    uv run train.py --mode=evaluate --checkpoint=RUN/checkpoints
"""
import gc
import sys
from pathlib import Path

from common import command
from common.errors import ExitCode, UserError
from common.files import as_json
from data.named import open_named
from distributed import launcher
from distributed.allreduce_plan import check_nodes
from distributed.lost import lost_is_user_error
from training import flags
from training.plan import plan_for
from training.settings import Settings
from training.stopping import StopRequest

PAPERS_NODE = 4  # default workers per node of a cluster planned with --workers, as in arXiv:1811.05233


def main(argv) -> int:
    """Runs a command line; returns the exit code."""
    launcher.end_with_launcher()
    if command.asks_for_help(argv):
        command.print_help(flags.help_text(full=any("helpfull" in word for word in argv[1:])))
        return ExitCode.DONE
    with command.shell("train.py", barrier=finish) as ending, command.json_alone_on_stdout(), lost_is_user_error():
        settings = flags.parse(argv)
        run = settings.run
        if run.timeline and not Path(run.timeline).parent.is_dir():
            raise UserError(f"--timeline: there is no folder for {run.timeline}")
        if run.dry_run:
            dry_run(settings)
        elif run.mode == "train":
            train(settings)
        else:
            evaluate(settings)
    return ending.code


def train(settings: Settings) -> None:
    """Trains and prints the content of summary.json."""
    stop, launched, plan = StopRequest(), launcher.launched(), None
    stop.listen()
    dataset = open_named(settings.recipe.data_dir)
    if not settings.launch.elastic:  # errors in the plan show at once
        plan = plan_for(settings, launched.size, launched.local_size, dataset.train.samples)
        if settings.launch.allreduce == "torus" and not settings.launch.torus_grid:
            check_nodes()
    from training.run import make_training

    attempt = make_training(settings, dataset, plan, stop)
    finish(attempt())


def evaluate(settings: Settings) -> None:
    """Evaluates a checkpoint and prints the content of summary.json."""
    dataset = open_named(settings.recipe.data_dir)
    from training.run import evaluate_checkpoint

    finish(evaluate_checkpoint(settings, dataset))


def dry_run(settings: Settings) -> None:
    """Prints the plan."""
    run, launched = settings.run, launcher.launched()
    if launched.size > 1:  # a worker that is to train would wait for this one in vain
        from training.run import start_alike

        start_alike(settings)
    samples = run.train_samples or open_named(settings.recipe.data_dir).train.samples
    local_size = run.workers_per_node or (PAPERS_NODE if run.workers else launched.local_size)
    plan = plan_for(settings, run.workers or launched.size, local_size, samples)
    if launched.rank == 0:
        if settings.source:
            print(f"recipe: {settings.source}", file=sys.stderr)
        print(as_json(plan.as_json(), indent=1), flush=True)


def finish(summary: dict | None = None) -> None:
    """Prints a summary on rank 0. All ranks wait for each other, because mpirun kills all ranks when one exits."""
    from distributed.world import World

    world = World().renumbered()
    if summary and world.rank == 0:
        print(as_json(summary), flush=True)
    world.barrier()


if __name__ == "__main__":
    code = main(sys.argv)
    gc.freeze()  # keeps Python's last collections from walking through all of TensorFlow, which takes 0.6 s
    sys.exit(code)
