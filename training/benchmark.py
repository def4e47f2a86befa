"""Where the time goes, stage by stage, on this machine: `uv run python -m training.benchmark --data_dir=D --model=M`.

    read        the format's reader alone
    decode      + the decoder, of the part of each image that the augmentation asks for
    augment     + resizing, flipping and what else the augmentation does
    pipeline    all of it as train.py has it, batches arriving in TensorFlow
    model       steps of training on a batch that stays on the device
    train       both together: steps of training on what the pipeline gives

It prints the table of the GTC slides ("Throughput comparison"), which stage limits, and what to change. MB/s are always
those of the encoded images, in 1e6 bytes: what a disk has to deliver at that rate.

The stages take turns, so that a drift of the machine touches all alike; a rate is the median of a stage's turns.
Reading is measured warm: the same samples, 65,536 at most, are read again and again, and stay in the page cache where
they fit. For the disk's own speed drop the cache before (echo 3 > /proc/sys/vm/drop_caches) and take short --seconds,
or a dataset larger than memory.
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
        raise ValueError("wants numbers of threads, such as 2 or 1,2,4")
    return tuple(dict.fromkeys(map(int, texts)))


@dataclass(frozen=True)
class Options:
    """This command's own flags.

    dali_threads: DALI's threads; several numbers, 1,2,4, to measure with each; by default as many as there are cores.
    batch_size: Micro-batch: images that are read, and trained on, at a time.
    seconds: How long each stage is measured, in all.
    output_dir: A folder for benchmark.json and benchmark.html, a bar chart.
    json: Print JSON on standard output instead of the table.
    """

    dali_threads: tuple[int, ...] = flag([], parse=_threads)
    batch_size: int = flag(64, low=1, high=2**20)
    seconds: float = flag(5.0, low=0.01, high=1e6)
    output_dir: str | None = None
    json: bool = False


def all_flags():
    """Some of train.py's, and this command's own."""
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
    with command.shell("training.benchmark") as ending, command.json_alone_on_stdout():
        values = flags.read(all_flags(), argv)
        if values.data_dir.startswith(f"{synthetic.NAME}:"):
            raise UsageError(f"flag --data_dir={values.data_dir}: there is nothing to read; the stage `model` measures "
                             "without input, whatever the dataset")
        options = flags.parsed(values, Options)
        recipe, launch = (group(**{name: values[name].value for name in flags.names(group) if name in BORROWED})
                          for group in (Recipe, Launch))
        from training.stage_times import measure

        result = measure(with_image_size(recipe), launch, options, open_named(recipe.data_dir))
        if options.output_dir:
            print(f"report: {report.write_stages(Path(options.output_dir), result)}", file=sys.stderr)
        print(json.dumps(result) if options.json else "\n".join(report.lines(result)), flush=True)
    return ending.code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
