"""Prints with what to start a training: `python -m launch.workers --workers=N [train.py's flags]`.

It prints the number of workers. That is N without --workers_schedule. With it, it is the number that the run in
--output_dir asked for when it ended its last phase, or the first of the schedule. With --next in place of --workers, it
prints only the former, or nothing.

With --micro_batch, it prints --micro_batch_size for GPUs. train.py's own default is at most 64 on any device, so that a
plan does not depend on the device. A GPU needs larger micro-batches: NVIDIA's ResNet-50 has 256 images per GPU, and
MLPerf's results have 128 to 408. The size is the largest up to 256 for which an estimate from the model, its image size
and the precision fits the memory. It is smaller than 64 only where 64 images do not fit. A resumed run keeps the size
that it had. Nothing is printed if the user has chosen a size, if there is no GPU, or if no such size divides the batch
and keeps the recipe's batch-norm span. From 64 on, the span itself, which is the default, is best: TensorFlow fuses
batch norm only over a whole micro-batch. Elastic training (--elastic) needs the default, which changes with the number
of workers.
"""
import contextlib
import sys
from pathlib import Path

from common import command
from common.errors import UsageError, UserError
from common.run_folder import PLAN, RUN, RunFolder
from distributed import gpus
from model_zoo import cost
from plan import flags
from plan.output_dir import resumes
from plan.plan import LARGEST_MICRO_BATCH, divisors, make_plan
from plan.settings import Settings

LARGEST = 256  # larger micro-batches are hardly faster
# Of a GPU's memory. The rest is for CUDA, NCCL, DALI and temporary values. ResNet-50 in float32, which was measured to
# take about 85 MB per image, then has 128 images in 14 GiB, and 256 in 30.
USABLE = 0.81

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


def micro_batch_flags(settings: Settings, workers: int, memory: float | None, builds: bool = True) -> list[str]:
    """Returns a list of one flag or none. memory: of the smallest GPU, in GiB, or None without GPUs.

    builds: whether to build a model whose memory is not known, in this process. If not, there is none for such a model.
    """
    launch, model = settings.launch, settings.recipe.model
    if memory is None or launch.device == "cpu" or launch.micro_batch_size or launch.elastic:
        return []
    if (span := settings.recipe.batch_norm_span) and min(span.values) >= LARGEST_MICRO_BATCH:
        return []
    default = _sizes(settings, None, workers)
    plan = RunFolder(settings.run.output_dir, reader="launch").read(PLAN) if resumes(settings) else {}
    before = {phase["micro_batch_size"] for phase in plan.get("phases", ())}
    if before == default or len(before) > 1:  # only the default has several
        return []
    if before and _sizes(settings, *before, workers):
        return [f"--micro_batch_size={size}" for size in before]
    if not (builds or cost.is_known(model)):
        return []
    largest = min(LARGEST, _images(settings.recipe, memory))
    least = LARGEST_MICRO_BATCH if largest >= LARGEST_MICRO_BATCH else 0
    for size in reversed(divisors(max(1, settings.recipe.batch_size.values[0] // workers))):
        if least < size <= largest and {size} != default and _sizes(settings, size, workers):
            return [f"--micro_batch_size={size}"]
    return []


def _images(recipe, memory) -> int:
    """Returns how many images fit in so many GiB. A model that cannot be built has the default: training says why."""
    bytes_per_value = 4 if recipe.precision == "float32" else 2
    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(Exception):
        if not cost.is_known(recipe.model):
            import tensorflow as tf

            tf.config.set_visible_devices([], "GPU")  # a launcher must not reserve the workers' memory
        per_image, fixed = cost.training_memory(recipe.model, max(recipe.image_size.values), bytes_per_value)
        return int((USABLE * memory * 2**30 - fixed) / per_image)
    return LARGEST_MICRO_BATCH


def _sizes(settings, size, workers) -> set[int]:
    """Returns the micro-batch sizes of a plan; none if it cannot be carried out, or if workers would share statistics.
    """
    try:
        found = make_plan(settings.recipe, size, workers, SAMPLES, workers_schedule=settings.launch.workers_schedule)
    except UserError:
        return set()
    return {phase.micro_batch_size for phase in found.phases if all(one.neighbours == 1 for one in found.phases)}


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
