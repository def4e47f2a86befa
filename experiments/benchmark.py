"""Measures the speed of each stage on this machine: `uv run python -m experiments.benchmark --data_dir=D --model=M`.

    read        the reader of the format alone
    decode      + decoding the part of each image that the augmentation needs
    augment     + resizing, flipping and the rest of the augmentation
    pipeline    the whole pipeline as in train.py, with batches arriving in TensorFlow
    model       training steps on a batch that stays on the device
    train       training steps on batches from the pipeline

It prints the table of the GTC slides ("Throughput comparison") and what limits the speed. docs/data.md says what to
change. MB/s counts encoded images in 1e6 bytes: the rate that the disk has to deliver.

The stages take turns, so a drift of the machine affects all of them. A rate is the median over the turns of a stage.
All stages read the same samples, at most 65,536, repeatedly, so they come from the page cache if they fit. To measure
the disk, drop the cache first (echo 3 > /proc/sys/vm/drop_caches) and use short --seconds, or use a dataset larger than
memory.

Under a launcher, or with --global_batch_size, it measures training steps on all workers instead, for each batch size:
images/s, speed-up, efficiency, and the fractions of a step's time that are computing, waiting for images, and waiting
for the exchange of gradients. With --output_dir, the rows of several launches, each with another number of workers,
form one table. --topology adds the forecast of launch.scaling to it.

    for workers in 1 2 4; do
        mpirun -np $workers python -m experiments.benchmark --global_batch_size=256,2048 --output_dir=D ...
    done
"""
import contextlib
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from common import command, flags, launcher
from common.errors import UsageError
from common.flags import flag
from common.locks import LOCK, locked
from data.named import open_on_each_rank
from data.synthetic import is_synthetic
from distributed.lost import explain_horovods_errors
from plan.allreduce import check_nodes
from plan.flags import define, with_image_size
from plan.settings import Launch, Recipe, Run, Settings
from reporting import speed

EXCHANGE = ("allreduce", "torus_grid", "compression", "fusion_mb")  # flags that only have an effect on training steps
BORROWED = ("data_dir", "model", "augmentation", "image_size", "precision", "device", "dali_device", "hw_decoder_load",
            "loss_scale", "xla", "persistent_batch_norm", "batch_norm_span", *EXCHANGE)


def _threads(texts: list[str]) -> tuple[int, ...]:
    return flags.counts(texts, 1024, "needs numbers of threads from 1 to 1024, such as 2 or 1,2,4")


def _batches(texts: list[str]) -> tuple[int, ...]:
    return tuple(sorted(flags.counts(texts, 2**24, "needs batch sizes, such as 256 or 512,4096")))


@dataclass(frozen=True)
class Options:
    """This command's own flags."""

    dali_threads: tuple[int, ...] = flag([], "Number of DALI threads. Several numbers, such as 1,2,4, are measured one "
        "after another. Default: the number of cores.", parse=_threads)
    micro_batch_size: int = flag(64, "Micro-batch size. With --global_batch_size, the largest one.", low=1, high=2**20)
    global_batch_size: tuple[int, ...] = flag([], "Global batch sizes to measure on all workers, such as 512,4096. "
        "Default on several workers: workers * --micro_batch_size.", parse=_batches)
    topology: str | None = flag(None, "Cluster whose forecast is shown next to the measurements, as in launch.scaling.",
        path=True)
    seconds: float = flag(5.0, "Total time to measure each stage or batch size, in seconds.", low=0.01, high=1e6)
    output_dir: str | None = flag(None, "Folder for benchmark.json and benchmark.html, a bar chart. On several "
        "workers: speed.json and speed.html.", path=True, written=True)
    json: bool = flag(False, "Print JSON on standard output instead of the table.")


def all_flags():
    """Returns this command's own flags and those that it shares with train.py."""
    values = define(Options, borrowed=BORROWED)
    values.set_default("augmentation", "crop_flip")
    return values


def wait_for_all() -> None:
    """Barrier after an error of all ranks, because mpirun kills all ranks when one exits."""
    from distributed.world import World

    World().renumbered().barrier()


@command.program("experiments.benchmark", __doc__, lambda _: flags.described(
    all_flags(), (*BORROWED, *flags.names(Options))), wait_for_all)
@command.json_only_on_stdout()
@explain_horovods_errors()
def main(argv) -> None:
    """Runs a command line."""
    values = flags.read(all_flags(), argv)
    options = flags.parsed(values, Options)
    for name in (*EXCHANGE, "topology"):
        if values[name].present and not on_all_workers(options):
            raise UsageError(f"--{name} only has an effect on training steps; start several workers or give "
                             "--global_batch_size")
    recipe = with_image_size(flags.parsed(values, Recipe, BORROWED))
    run(recipe, flags.parsed(values, Launch, BORROWED), options)


def on_all_workers(options: Options) -> bool:
    """Whether to measure training steps on all workers instead of stages on this one."""
    return bool(options.global_batch_size) or launcher.launched().size > 1


def run(recipe: Recipe, launch: Launch, options: Options) -> None:
    """Measures. Rank 0 prints the results and writes them to --output_dir."""
    in_stages = not on_all_workers(options)
    rank = launcher.launched().rank
    if in_stages and is_synthetic(recipe.data_dir):
        raise UsageError(f"flag --data_dir={recipe.data_dir}: synthetic data has nothing to read; give a real dataset, "
                         "or --global_batch_size to measure only training steps")
    if not in_stages:
        if len(options.dali_threads) > 1:
            raise UsageError("--dali_threads: give one number to measure training steps")
        check_nodes(launch.allreduce, launch.torus_grid)
        launch = replace(launch, dali_threads=next(iter(options.dali_threads), None))
    dataset = open_on_each_rank(recipe.data_dir, recipe.validation_fraction, recipe.label_column)
    from experiments.measure import measure

    world, result = measure(Settings(recipe, launch, Run(), {}, ""), options, dataset, in_stages)
    with world.raise_on_all_ranks():
        if rank == 0:
            lines = show_stages(result, options) if in_stages else show_steps(result, options)
            command.output(*([json.dumps(result)] if options.json else lines))
    world.barrier()


def show_stages(result: dict, options: Options) -> list[str]:
    """Writes the page, and returns the table for a terminal."""
    if options.output_dir:
        print(f"report: {speed.write_stages(Path(options.output_dir), result)}", file=sys.stderr)
    return speed.stage_lines(result)


def show_steps(result: dict, options: Options) -> list[str]:
    """Adds the rows of earlier launches in --output_dir, writes the page, and returns the table for a terminal."""
    folder = options.output_dir and Path(options.output_dir)
    with contextlib.ExitStack() as held:
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(folder / LOCK, wait=True))
        result["rows"] = speed.merged(folder, result["rows"])
        if folder:
            print(f"report: {speed.write_speed(folder, result['rows'])}", file=sys.stderr)
    return speed.lines(result["rows"])


if __name__ == "__main__":
    command.end(main(sys.argv))
