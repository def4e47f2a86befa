"""Prints --micro_batch_size for a recipe on GPUs: `python -m launch.micro_batch --workers=N [train.py's flags]`.

train.py's own default is at most 64 on any device, so that a plan does not depend on the device. A GPU needs larger
micro-batches: NVIDIA's ResNet-50 has 256 images per GPU, and MLPerf's results have 128 to 408. It prints nothing if the
user has chosen a size, if there is no GPU, or if no larger size divides the batch and keeps the recipe's batch-norm
span. From 64 on, the span itself, which is the default, is best: TensorFlow fuses batch norm only over a whole
micro-batch. Elastic training (--elastic) needs the default, which changes with the number of workers.
"""
import sys

from common import command
from common.errors import UserError
from distributed import gpus
from launch.workers import parse
from plan import micro_batches
from plan.micro_batches import divisors
from plan.plan import make_plan
from plan.settings import Settings

# The largest micro-batch by the GPU's memory in GiB. ResNet-50 in float32 takes about 85 MB per image.
LARGEST = ((30, 256), (14, 128), (0, micro_batches.LARGEST))

SAMPLES = 1_281_167  # any number: whether a size divides the batch does not depend on the dataset


def micro_batch_flags(settings: Settings, workers: int, memory: float | None) -> list[str]:
    """Returns a list of one flag or none. memory: of the smallest GPU, in GiB, or None without GPUs."""
    launch = settings.launch
    if memory is None or launch.device == "cpu" or launch.micro_batch_size or launch.elastic:
        return []
    if (span := settings.recipe.batch_norm_span) and min(span.values) >= micro_batches.LARGEST:
        return []
    largest = next(size for least, size in LARGEST if memory >= least)
    batches = settings.recipe.batch_size.values
    for size in reversed(divisors(max(1, batches[0] // workers))):
        if micro_batches.LARGEST < size <= largest and _fits(settings, size, workers):
            return [f"--micro_batch_size={size}"]
    return []


def _fits(settings, size, workers) -> bool:
    try:
        found = make_plan(settings.recipe, size, workers, SAMPLES, workers_schedule=settings.launch.workers_schedule)
    except UserError:
        return False
    return all(phase.neighbours == 1 for phase in found.phases)  # workers should not share statistics for its sake


@command.program("launch.micro_batch", __doc__)
def main(argv) -> None:
    """Runs a command line."""
    workers, settings = parse(argv)
    memory = min((gpu.memory for gpu in gpus.visible(settings.launch.device)), default=None)
    for flag in micro_batch_flags(settings, workers, memory):
        print(flag)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
