"""Prints --micro_batch_size for a recipe on GPUs: `python -m launch.micro_batch --workers=N [train.py's flags]`.

train.py's own default is at most 64 on any device, so that a plan does not depend on the device. A GPU needs larger
micro-batches: NVIDIA's ResNet-50 has 256 images per GPU, and MLPerf's results have 128 to 408. It prints nothing if the
user has chosen a size, if there is no GPU, or if no larger size divides the batch and keeps the recipe's batch-norm
span. Elastic training (--elastic) needs the default, which changes with the number of workers.
"""
import sys

from common import command
from common.errors import UserError
from distributed import gpus
from launch.workers import parse
from training.plan import DEFAULT_LARGEST_MICRO_BATCH, divisors, make_plan
from training.settings import Settings

# The largest micro-batch by the GPU's memory in GiB. ResNet-50 in float32 takes about 85 MB per image.
LARGEST = ((30, 256), (14, 128), (0, DEFAULT_LARGEST_MICRO_BATCH))

SAMPLES = 1_281_167  # any number: whether a size divides the batch does not depend on the dataset


def micro_batch_flags(settings: Settings, workers: int, memory: float | None) -> list[str]:
    """Returns a list of one flag or none. memory: of the smallest GPU, in GiB, or None without GPUs."""
    launch = settings.launch
    if memory is None or launch.device == "cpu" or launch.micro_batch_size or launch.elastic:
        return []
    largest = next(size for least, size in LARGEST if memory >= least)
    batches = settings.recipe.batch_size.values
    for size in reversed(divisors(max(1, batches[0] // workers))):
        if DEFAULT_LARGEST_MICRO_BATCH < size <= largest and _fits(settings, size, workers):
            return [f"--micro_batch_size={size}"]
    return []


def _fits(settings, size, workers) -> bool:
    try:
        make_plan(settings.recipe, size, workers, SAMPLES, workers_schedule=settings.launch.workers_schedule)
    except UserError:
        return False
    return True


def main(argv) -> int:
    """Runs a command line; returns the exit code."""
    with command.shell("launch.micro_batch") as ending:
        workers, settings = parse(argv)
        memory = min((gpu.memory for gpu in gpus.visible(settings.launch.device)), default=None)
        found = micro_batch_flags(settings, workers, memory)
        print(*found, sep="", end="\n" if found else "")
    return ending.code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
