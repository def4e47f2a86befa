"""Checks that a run can be reproduced: `python -m experiments.verify RUN [--workers=N] [flags of train.py]`.

It trains from a checkpoint of the run to the next evaluation, with the run's flags and on its number of workers, and
compares that evaluation with the row of metrics.jsonl, which contains a digest of the weights. The run has to be one
with --deterministic, which gives the same bits again.

RUN is the folder of a run, its checkpoints/ or one checkpoint in it. The newest checkpoint that an evaluation follows
is taken. Other flags, such as --data_dir, replace those of the run. Training happens in a temporary folder; the run is
not changed. The JSON on standard output has from_epoch, to_epoch, reproduced, and if they differ, differs: key of the
row -> [recorded value, value found]. The exit code is 0 if all is equal, 1 if not.
"""
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import command, flags
from common.errors import ExitCode, Stopped, UsageError, UserError
from common.files import as_json
from common.flags import flag
from experiments.trainings import TRAIN, all_flags, passed_on, started, stops_passed_on
from reporting.run_folder import CHECKPOINTS, FLAGS, METRICS, RunData, RunFolder
from training import flags as train_flags
from training.default_recipe import run_folder
from training.settings import Settings

PROGRAM = "experiments.verify"
TIMES = ("images_per_second", "seconds")  # the keys of a row that differ from run to run
POLL = 0.1  # seconds between two looks for the evaluation


@dataclass(frozen=True)
class Options:
    """This command's own flags.

    workers: Number of workers to train on. Default: that of the run.
    """

    workers: int | None = flag(low=1)


@dataclass(frozen=True)
class Recorded:
    """A checkpoint of a run and the evaluation that followed it.

    path, epoch: of the checkpoint. step, workers: of its progress. before: rows of metrics.jsonl up to it. row: the
    next one.
    """

    path: Path
    epoch: float
    step: int
    workers: int
    before: list[dict]
    row: dict


def verified(checkpoint: str, asked: int | None, given: Sequence[str]) -> dict:
    """Trains from a checkpoint to the next evaluation. Returns the content of the JSON above.

    asked: number of workers, or None for the run's. given: flags that replace the run's. Raises UserError if there is
    nothing to compare with or the training fails, and Stopped after a request to stop.
    """
    if not Path(checkpoint).exists():
        raise UserError(f"{checkpoint} does not exist; give the folder of a run, such as runs/NAME")
    run = RunData.read(run_folder(checkpoint), PROGRAM)
    if run.flags.get("elastic") == "true" or run.flags.get("deterministic", "false") == "false":
        raise UserError(f"{run.folder} was trained with --elastic or without --deterministic: it does not give the "
                        "same bits again")
    settings = train_flags.parse(["train.py", f"--flagfile={run.folder / FLAGS}", *given])
    recorded = newest_with_evaluation(checkpoint, run.rows)
    workers = asked or recorded.workers
    own = flags_for(settings, run.plan, recorded, workers)
    print(f"{PROGRAM}: trains from {recorded.path} to epoch {recorded.row['epoch']:g}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="verify-") as scratch:
        recipe, files = Path(scratch, FLAGS), RunFolder(Path(scratch, "run"), reader=PROGRAM)
        recipe.write_text("".join(line for line in run.flags_text.splitlines(keepends=True)
                                  if not line.startswith("--workers_schedule=")))
        shutil.copytree(recorded.path, files.path / CHECKPOINTS / f"step-{recorded.step:08}")
        for row in recorded.before:
            files.append(METRICS, row)
        files.save_or_raise()
        words = [f"--flagfile={recipe}", *own, *given, f"--output_dir={files.path}"]
        found = next_evaluation(files.path, len(recorded.before), [*on_workers(workers), *words])
    return compared(recorded, found)


def newest_with_evaluation(checkpoint: str, rows: list[dict]) -> Recorded:
    """Returns the newest intact checkpoint that an evaluation followed. Raises UserError."""
    from training.checkpoints import intact

    for path, _, described in intact(Path(checkpoint)):
        progress = described["progress"]
        before = [row for row in rows if row["samples"] <= progress["evaluated"]]
        row = next(iter(rows[len(before):]), None)
        if row and "weights" not in row:
            raise UserError("metrics.jsonl has no digest of the weights, because an earlier version of Bigbatch wrote "
                            "it")
        if row:
            return Recorded(path.resolve(), described["epoch"], progress["step"], progress["workers"], before, row)
    raise UserError(f"no evaluation follows a checkpoint in {checkpoint}; train with --checkpoint_every=1, which saves "
                    "one after each epoch")


def flags_for(settings: Settings, plan: dict, recorded: Recorded, workers: int) -> list[str]:
    """Returns the flags with which these workers make the run's bits. Raises UserError if they cannot.

    plan: content of the run's plan.json. By default, the micro-batch size depends on the number of workers.
    """
    sizes = {phase["micro_batch_size"] for phase in plan["phases"]}
    if settings.launch.sums_in_tree and len(sizes) == 1 and settings.recipe.order == "global":
        return [f"--micro_batch_size={sizes.pop()}"]
    if {plan["workers"], recorded.workers} != {workers}:
        raise UserError(f"this run gives the same bits only on the same number of workers: it was trained on "
                        f"{recorded.workers}, and this is {workers}; see --deterministic, --order and "
                        "--micro_batch_size")
    return []


def on_workers(workers: int) -> list[str]:
    """Returns the words that start train.py on workers of this machine."""
    start = [sys.executable, str(TRAIN)]
    if workers == 1:
        return start
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    options = ["--allow-run-as-root", "--bind-to", "none", "--map-by", ":oversubscribe"]
    return [mpirun, *options, "-np", str(workers), *start]


def next_evaluation(folder: Path, before: int, words: list[str]) -> dict:
    """Trains until metrics.jsonl in a folder has one row more than `before`, and returns that row.

    The request to stop that ends the training may reach it after its own end. Raises UserError, Stopped.
    """
    process = started(words)
    with stops_passed_on(process) as received:
        while process.poll() is None and not received and len(rows(folder)) == before:
            time.sleep(POLL)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        code = process.wait()
    if received:
        raise Stopped("stopped on request")
    found = rows(folder)[before:]
    if not found:
        raise UserError(f"the training failed with exit code {code}; see the lines above")
    return found[0]


def rows(folder: Path) -> list[dict]:
    return RunFolder(folder, reader=PROGRAM).rows(METRICS)


def compared(recorded: Recorded, found: dict) -> dict:
    """Returns the result of `verified`. found: the row of the evaluation."""
    row = recorded.row
    differs = {key: [row.get(key), found.get(key)] for key in row | found
               if key not in TIMES and row.get(key) != found.get(key)}
    result = {"from_epoch": recorded.epoch, "to_epoch": row["epoch"], "reproduced": not differs}
    return result | ({"differs": differs} if differs else {})


def conclusion(result: dict) -> str:
    """Returns the result in one line."""
    epochs = f"epoch {result['from_epoch']:g} to {result['to_epoch']:g}"
    if result["reproduced"]:
        return f"{epochs} reproduced to the bit"
    key, (before, now) = next(iter(result["differs"].items()))
    return f"{epochs} not reproduced: {key} was {before} and is now {now}"


def main(argv) -> int:
    """Runs a command line; returns the exit code."""
    if command.asks_for_help(argv):
        command.print_help(__doc__, *flags.described(flags.define(Options), flags.names(Options)))
        return ExitCode.DONE
    with command.shell(PROGRAM) as ending, command.json_only_on_stdout():
        values = all_flags(Options)
        values.set_gnu_getopt(True)  # flags may follow the run
        runs = flags.read_with_arguments(values, argv)
        if len(runs) != 1:
            raise UsageError("give the folder of one run, such as runs/NAME")
        result = verified(runs[0], flags.parsed(values, Options).workers, passed_on(values, Options))
        print(conclusion(result), file=sys.stderr)
        print(as_json(result), flush=True)
        ending.code = ExitCode.DONE if result["reproduced"] else ExitCode.WRONG
    return ending.code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
