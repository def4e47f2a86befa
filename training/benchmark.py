"""Measures the speed of each stage on this machine: `uv run python -m training.benchmark --data_dir=D --model=M`.

    read        the reader of the format alone
    decode      + decoding the part of each image that the augmentation needs
    augment     + resizing, flipping and the rest of the augmentation
    pipeline    the whole pipeline as in train.py, with batches arriving in TensorFlow
    model       training steps on a batch that stays on the device
    train       training steps on batches from the pipeline

It prints the table of the GTC slides ("Throughput comparison"), the stage that limits the speed, and what to change.
MB/s counts encoded images in 1e6 bytes: the rate that the disk has to deliver.

The stages take turns, so a drift of the machine affects all of them. A rate is the median over the turns of a stage.
All stages read the same samples, at most 65,536, repeatedly, so they come from the page cache if they fit. To measure
the disk, drop the cache first (echo 3 > /proc/sys/vm/drop_caches) and use short --seconds, or use a dataset larger than
memory.
"""
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from common import command, flags
from common.errors import UsageError
from common.flags import flag
from data import synthetic
from data.named import open_named
from reporting import stages as report
from training.flags import define, with_image_size
from training.settings import Launch, Recipe

BORROWED = ("data_dir", "model", "augmentation", "image_size", "precision", "device", "dali_device", "hw_decoder_load",
            "xla")


def _threads(texts: list[str]) -> tuple[int, ...]:
    if not all(text.isdecimal() and 0 < int(text) <= 1024 for text in texts):
        raise ValueError("needs numbers of threads from 1 to 1024, such as 2 or 1,2,4")
    return tuple(dict.fromkeys(map(int, texts)))


@dataclass(frozen=True)
class Options:
    """This command's own flags.

    dali_threads: Number of DALI threads. Several numbers, such as 1,2,4, are measured one after another. Default: the
        number of cores.
    batch_size: Micro-batch size.
    seconds: Total time to measure each stage, in seconds.
    output_dir: Folder for benchmark.json and benchmark.html, a bar chart.
    json: Print JSON on standard output instead of the table.
    """

    dali_threads: tuple[int, ...] = flag([], parse=_threads)
    batch_size: int = flag(64, low=1, high=2**20)
    seconds: float = flag(5.0, low=0.01, high=1e6)
    output_dir: str | None = None
    json: bool = False


def all_flags():
    """Returns this command's own flags and those that it shares with train.py."""
    values, borrowed = flags.define(Options), define()
    for name in BORROWED:
        values[name] = borrowed[name]
    values.set_default("augmentation", "crop_flip")
    return values


def main(argv) -> int:
    """Runs a command line; returns the exit code."""
    if command.asks_for_help(argv):
        command.print_help(__doc__, *flags.described(all_flags(), (*BORROWED, *flags.names(Options))))
        return 0
    with command.shell("training.benchmark") as ending, command.json_only_on_stdout():
        values = flags.read(all_flags(), argv)
        if values.data_dir.startswith(f"{synthetic.NAME}:"):
            raise UsageError(f"flag --data_dir={values.data_dir}: synthetic data has nothing to read; give a real "
                             "dataset. The stage `model` measures without input on any dataset")
        options = flags.parsed(values, Options)
        recipe, launch = (flags.parsed(values, group, BORROWED) for group in (Recipe, Launch))
        from training.stage_times import measure

        result = measure(with_image_size(recipe), launch, options, open_named(recipe.data_dir))
        if options.output_dir:
            print(f"report: {report.write_stages(Path(options.output_dir), result)}", file=sys.stderr)
        print(json.dumps(result) if options.json else "\n".join(report.lines(result)), flush=True)
    return ending.code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
