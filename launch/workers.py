"""Prints with what to start a training: `python -m launch.workers --workers=N [train.py's flags]`.

It prints the number of workers. That is N without --workers_schedule. With it, it is the number that the run in
--output_dir asked for when it ended its last phase, or the first of the schedule. With --next in place of --workers, it
prints only the former, or nothing.

With --micro_batch, it prints --micro_batch_size for GPUs. train.py's own default is at most 64 on any device, so that a
plan does not depend on the device. A GPU needs larger micro-batches: NVIDIA's ResNet-50 has 256 images per GPU, and
MLPerf's results have 128 to 408. It prints nothing if the user has chosen a size, if there is no GPU, or if no larger
size divides the batch and keeps the recipe's batch-norm span. From 64 on, the span itself, which is the default, is
best: TensorFlow fuses batch norm only over a whole micro-batch. Elastic training (--elastic) needs the default, which
changes with the number of workers.
"""
import sys
from pathlib import Path

from common import command
from common.errors import UsageError, UserError
from distributed import gpus
from plan import flags
from plan.plan import LARGEST_MICRO_BATCH, divisors, make_plan
from plan.run_folder import RUN, RunFolder
from plan.settings import Settings

# The largest micro-batch by the GPU's memory in GiB. ResNet-50 in float32 takes about 85 MB per image.
LARGEST = ((30, 256), (14, 128), (0, LARGEST_MICRO_BATCH))

SAMPLES = 1_281_167  # any number: whether a size divides the batch does not depend on the dataset


def next_workers(settings: Settings) -> int | None:
    """Returns the number of workers that a run needs for its next phase, or None if it did not end at one."""
    if not (settings.launch.workers_schedule and settings.run.output_dir):
        return None
    return RunFolder(Path(settings.run.output_dir), reader="launch").read(RUN).get("next_workers")


def workers_now(settings: Settings, available: int) -> int:
    """Returns the number of workers to start. Raises UserError if so many are not available."""
    schedule = settings.launch.workers_schedule
    if not schedule:
        return available
    if not settings.run.output_dir:
        raise UserError("--workers_schedule needs an --output_dir, where the next phase continues")
    if (most := max(schedule.values)) > available:
        raise UserError(f"--workers_schedule={schedule} needs {most} workers, but {available} are available")
    return next_workers(settings) or schedule.values[0]


def micro_batch_flags(settings: Settings, workers: int, memory: float | None) -> list[str]:
    """Returns a list of one flag or none. memory: of the smallest GPU, in GiB, or None without GPUs."""
    launch = settings.launch
    if memory is None or launch.device == "cpu" or launch.micro_batch_size or launch.elastic:
        return []
    if (span := settings.recipe.batch_norm_span) and min(span.values) >= LARGEST_MICRO_BATCH:
        return []
    largest = next(size for least, size in LARGEST if memory >= least)
    batches = settings.recipe.batch_size.values
    for size in reversed(divisors(max(1, batches[0] // workers))):
        if LARGEST_MICRO_BATCH < size <= largest and _fits(settings, size, workers):
            return [f"--micro_batch_size={size}"]
    return []


def _fits(settings, size, workers) -> bool:
    try:
        found = make_plan(settings.recipe, size, workers, SAMPLES, workers_schedule=settings.launch.workers_schedule)
    except UserError:
        return False
    return all(phase.neighbours == 1 for phase in found.phases)  # workers should not share statistics for its sake


@command.program("launch.workers", __doc__)
def main(argv) -> None:
    """Runs a command line."""
    own = [word for word in argv[1:] if word in ("--next", "--micro_batch") or word.startswith("--workers=")]
    settings = flags.parse(["train.py", *(word for word in argv[1:] if word not in own)])
    if "--next" in own:
        print(next_workers(settings) or "", end="")
        return
    number = next((word.partition("=")[2] for word in own if word.startswith("--workers=")), "")
    if not number.isdecimal():
        raise UsageError("--workers=N is missing")
    if "--micro_batch" in own:
        memory = min((gpu.memory for gpu in gpus.visible(settings.launch.device)), default=None)
        for flag in micro_batch_flags(settings, int(number), memory):
            print(flag)
    else:
        print(workers_now(settings, int(number)))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
