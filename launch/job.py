"""Answers what a launch script has to know: `python -m launch.job [options] RECIPE|-- [train.py's flags]`.

The answer is lines of bash:

    workers=N            number of workers to start. With --workers_schedule, that of the phase that comes next
    training=(FLAG...)   flags of train.py: those that read the recipe; those of RECIPE.launch, which say how its paper
                         trained, if that file exists; a micro-batch for GPUs; those that were given
    output=FOLDER        with --paths, in place of the others: --output_dir, or nothing
    paths=(PATH...)      with --paths: what a container needs, namely the recipe's files and the values of flags

With -- in place of RECIPE, train.py chooses the recipe. In a container job, this program runs inside the container.

train.py's own micro-batch is at most 64 on any device, so that a plan does not depend on the device. A GPU needs larger
ones: NVIDIA's ResNet-50 has 256 images per GPU, and MLPerf's results have 128 to 408. The size for GPUs is the largest
up to 256 for which an estimate from the model, its image size and the precision fits the memory. It is smaller than 64
only where 64 images do not fit. A resumed run keeps the size that it had. There is none if the user has chosen a size,
if there is no GPU, or if no such size divides the batch and keeps the recipe's batch-norm span. From 64 on, the span
itself, which is the default, is best: TensorFlow fuses batch norm only over a whole micro-batch. Elastic training
(--elastic) needs the default, which changes with the number of workers.
"""
import contextlib
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from common import TRAIN, command, streams
from common.errors import UsageError, UserError, complain
from common.flags import define, described, file_text, flag, names, parsed, read, split
from common.run_folder import PLAN, RUN, RunFolder
from distributed import gpus
from launch.binding import workers_here
from model_zoo import cost
from plan import flags
from plan.output_dir import resumes
from plan.plan import LARGEST_MICRO_BATCH, divisors, make_plan
from plan.recipes import recipe_path
from plan.settings import Settings

LARGEST = 256  # larger micro-batches are hardly faster
# Of a GPU's memory. The rest is for CUDA, NCCL, DALI and temporary values. ResNet-50 in float32, which was measured to
# take about 85 MB per image, then has 128 images in 14 GiB, and 256 in 30.
USABLE = 0.81

IMAGES = 1_281_167  # of a plan. Any number would do: whether a size divides the batch does not depend on the dataset


@dataclass(frozen=True)
class Options:
    """This command's own flags, which come before the recipe."""

    script: str = flag("launch.job", "Script that asks. Its name begins each message.")
    workers: int | None = flag(None, "Number of workers that can be started. Default: one per GPU here, or one without "
        "a GPU.", low=1)
    workers_per_node: int | None = flag(None, "Print the plan of --workers workers, with so many per node, instead of "
        "the answer.", low=1)
    next: bool = flag(False, "Print `workers` alone. It is empty unless the run has ended a phase of "
        "--workers_schedule.")
    paths: bool = flag(False, "Print `output` and `paths` alone. None of these paths has to exist.")


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
    """Returns [--micro_batch_size=N] for GPUs, or an empty list where train.py's default is kept.

    memory: of the smallest GPU in GiB; None without GPUs.
    """
    launch = settings.launch
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
    largest = min(LARGEST, _images(settings.recipe, memory))
    least = LARGEST_MICRO_BATCH if largest >= LARGEST_MICRO_BATCH else 0
    for size in reversed(divisors(max(1, settings.recipe.batch_size.values[0] // workers))):
        if least < size <= largest and {size} != default and _sizes(settings, size, workers):
            return [f"--micro_batch_size={size}"]
    return []


def _images(recipe, memory) -> int:
    """Returns how many images fit into `memory` GiB. It is the default for a model that cannot be built: the training
    then reports the error."""
    bytes_per_value = 4 if recipe.precision == "float32" else 2
    with streams.redirected(1, 2), contextlib.redirect_stdout(sys.stderr), contextlib.suppress(Exception):
        if not cost.is_known(recipe.model):
            import tensorflow as tf

            tf.config.set_visible_devices([], "GPU")  # a launcher must not reserve the workers' memory
        per_image, fixed = cost.training_memory(recipe.model, max(recipe.image_size.values), bytes_per_value,
                                                recipe.freeze)
        return int((USABLE * memory * 2**30 - fixed) / per_image)
    return LARGEST_MICRO_BATCH


def _sizes(settings, size, workers) -> set[int]:
    """Returns the micro-batch sizes of a plan's phases. size: --micro_batch_size.

    The set is empty if the plan is impossible, or if workers would have to share batch-norm statistics.
    """
    try:
        found = make_plan(settings.recipe, size, workers, IMAGES, workers_schedule=settings.launch.workers_schedule)
    except UserError:
        return set()
    return {phase.micro_batch_size for phase in found.phases if all(one.neighbours == 1 for one in found.phases)}


def recipe_flags(words: list[str], script: str) -> tuple[list[str], list[str]]:
    """Returns (flags that read the recipe and, if it exists, RECIPE.launch; the given flags).

    words: RECIPE [--] [flags], or -- [flags] without a recipe. script: says on standard error what RECIPE.launch adds.
    "": nothing is said.
    """
    if not words:
        raise UsageError("the recipe is missing; see --help")
    given = words[2:] if words[1:2] == ["--"] else words[1:]
    if words[0] == "--":
        return [], given
    recipe = recipe_path(words[0])
    launch = recipe.with_suffix(".launch")
    if not launch.is_file():
        return [f"--flagfile={recipe}"], given
    added = " ".join(line for line in file_text(launch).splitlines() if line.startswith("--"))
    if script:
        complain(f"{launch.name} adds {added}", script)
    return [f"--flagfile={recipe}", f"--flagfile={launch}"], given


def paths_in(words: list[str]) -> tuple[str, list[str]]:
    """Returns (--output_dir or "", the flag files, and the paths that are the values of flags) of train.py's flags."""
    files, rest = flags.recipes_first(words)
    values = flags.define()
    for name in values:
        values[name].validators.clear()  # that of --expect reads a file
    read(values, ["train.py", *files, *rest])
    found = [values[name].value for name, about in flags.FLAGS.items() if about["path"] and not about["repeated"]]
    return values.output_dir or "", [file.partition("=")[2] for file in files] + [path for path in found if path]


def print_plan(training: list[str], workers: int, workers_per_node: int) -> int:
    """Has train.py print the plan of a training; returns its exit code. training: flags of train.py."""
    return subprocess.call([sys.executable, TRAIN, *training, "--dry_run", f"--workers={workers}",
                            f"--workers_per_node={workers_per_node}"])


def main(argv) -> int:
    """Runs a command line; returns the exit code."""
    own, words = split(define(Options), argv)
    script = next((word.partition("=")[2] for word in own if word.startswith("--script=")), Options.script)
    program = command.program(script, __doc__, lambda _: described(define(Options), names(Options)))
    return program(lambda own: answer(parsed(read(define(Options), own), Options), words))(own)


def answer(options: Options, words: list[str]) -> int:
    """Prints an answer; returns the exit code. words: recipe and flags of train.py. Raises UserError."""
    recipe, given = recipe_flags(words, "" if options.paths else options.script)
    if options.workers_per_node:
        if not options.workers:
            raise UsageError("--workers_per_node needs --workers, the number of all workers")
        return print_plan([*recipe, *given], options.workers, options.workers_per_node)
    if options.paths:
        output, paths = paths_in([*recipe, *given])
        print(f"output={shlex.quote(output)}\npaths=({shlex.join(paths)})")
        return 0
    settings = flags.parse(["train.py", *recipe, *given])
    if options.next:
        print(f"workers={next_workers(settings) or ''}")
        return 0
    workers = workers_now(settings, options.workers or workers_here())
    memory = min((gpu.memory for gpu in gpus.visible(settings.launch.device)), default=None)
    chosen = micro_batch_flags(settings, workers, memory)  # given flags override it
    print(f"workers={workers}\ntraining=({shlex.join([*recipe, *chosen, *given])})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
