"""Checks that a run can be reproduced: `python -m experiments.verify RUN [--workers=N] [flags of train.py]`.

It trains from a checkpoint of the run to the next evaluation, with the run's flags and on its number of workers, and
compares that evaluation with the row of metrics.jsonl, which contains a checksum of the weights. The run has to be one
with --deterministic, which gives the same bits again.

RUN is the folder of a run, its checkpoints/ or one checkpoint in it. The newest checkpoint that an evaluation follows
is taken. Other flags, such as --data_dir, replace those of the run. Training happens in a temporary folder; the run is
not changed. The JSON on standard output has from_epoch, to_epoch, reproduced, and if they differ, differs: key of the
row -> [recorded value, value found], and versions: those of this code and its libraries that have changed since, if
any. The exit code is 0 if all is equal, 1 if not.
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

from common import TRAIN, command, flags
from common.errors import ExitCode, Stopped, UsageError, UserError
from common.files import as_json
from common.flags import flag
from common.run_folder import CHECKPOINTS, FLAGS, METRICS, RunFolder, folder_of
from common.version import ROOT, git_revision, revision_text
from data.named import open_named
from experiments.trainings import passed_on, started, stops_passed_on
from plan import flags as train_flags
from plan.output_dir import changed_flag
from plan.settings import Settings
from reporting.about import versions
from reporting.run_data import RunData

PROGRAM = "experiments.verify"
TIMES = ("images_per_second", "seconds")  # the keys of a row that differ from run to run
POLL = 0.1  # seconds between two readings of metrics.jsonl


@dataclass(frozen=True)
class Options:
    """This command's own flags."""

    workers: int | None = flag(None, "Number of workers to train on. Default: that of the run.", low=1)


@dataclass(frozen=True)
class Recorded:
    """A checkpoint of a run and the evaluation that followed it."""

    path: Path  # of the checkpoint
    epoch: float  # of the checkpoint
    progress: dict  # training.state.Progress at the checkpoint
    before: list[dict]  # rows of metrics.jsonl up to the checkpoint
    row: dict  # the next row

    def is_answered_by(self, rows: list[dict]) -> bool:
        """Whether the first of these rows, which follow the checkpoint, can be compared with the recorded one.

        If the recorded run was rolled back after the checkpoint, its row comes after the rollback. An evaluation with
        fewer skipped samples may then be repeated by a rollback, until training has passed the skipped samples.
        """
        skipped = self.row.get("skipped", 0)
        return bool(rows) and (rows[0].get("skipped", 0) == skipped or rows[-1]["samples"] >= (
            self.progress["samples"] + skipped - self.progress["skipped"]))


def verified(checkpoint: str, asked: int | None, given: Sequence[str]) -> dict:
    """Trains from a checkpoint to the next evaluation. Returns the content of the JSON above.

    asked: number of workers, or None for the run's. given: flags that replace the run's. Raises UserError if there is
    nothing to compare with or the training fails, and Stopped after a request to stop.
    """
    if not Path(checkpoint).exists():
        raise UserError(f"{checkpoint} does not exist; give the folder of a run, such as runs/NAME")
    run = RunData.read(folder_of(checkpoint), PROGRAM)
    inexact = ("without --deterministic" if run.flags.get("deterministic", "false") == "false" else
               "with --elastic" if run.flags.get("elastic") == "true" else None)
    if inexact:
        raise UserError(f"{run.folder} was trained {inexact}: it does not give the same bits again")
    settings = train_flags.parse(["train.py", f"--flagfile={run.folder / FLAGS}", *given])
    check_same_training(run, settings)
    recorded = newest_with_evaluation(checkpoint, run.rows)
    workers = asked or recorded.progress["workers"]
    own = flags_for(settings, run.plan, recorded, workers)
    print(f"{PROGRAM}: trains from {recorded.path} to epoch {recorded.row['epoch']:g}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="verify-") as scratch:
        recipe = Path(scratch, FLAGS)
        files = RunFolder(Path(scratch, "run"), reader=PROGRAM)
        recipe.write_text("".join(line for line in run.flags_text.splitlines(keepends=True)
                                  if not line.startswith("--workers_schedule=")))
        shutil.copytree(recorded.path, files.path / CHECKPOINTS / f"step-{recorded.progress['step']:08}")
        for row in recorded.before:
            files.append(METRICS, row)
        files.save_or_raise()
        words = [f"--flagfile={recipe}", *own, *given, f"--output_dir={files.path}"]
        row = next_evaluation(files.path, recorded, [*on_workers(workers), *words])
    result = compared(recorded, row)
    changed = [] if result["reproduced"] else changed_versions(run.run)
    return result | ({"versions": changed} if changed else {})


def check_same_training(run: RunData, settings: Settings) -> None:
    """Raises UsageError for flags of another training. train.py would name the temporary copy instead of the run."""
    dataset = open_named(settings.recipe.data_dir, fraction=settings.recipe.validation_fraction,
                         label_column=settings.recipe.label_column)
    samples = "train_samples", run.plan["train_samples"], dataset.train.samples
    name, before, now = changed_flag(run.folder, settings) or samples
    if before != now:
        raise UsageError(f"{run.folder} was trained with {name} {before}, and not with {now}; give what the run had")


def newest_with_evaluation(checkpoint: str, rows: list[dict]) -> Recorded:
    """Returns the newest intact checkpoint that an evaluation followed. Raises UserError."""
    from training.restoring import check_meaning, intact

    for path, _, described in intact(Path(checkpoint)):
        check_meaning(path, described)  # such as that of a row's `weights`
        progress = described["progress"]
        before = [row for row in rows if row["samples"] <= progress["evaluated"]]
        if row := next(iter(rows[len(before):]), None):
            return Recorded(path.resolve(), described["epoch"], progress, before, row)
    raise UserError(f"no evaluation follows a checkpoint in {checkpoint}; train with --checkpoint_every=1, which saves "
                    "one after each epoch")


def ties_to_workers(settings: Settings) -> list[str]:
    """Returns the flags with which --deterministic gives the same bits on the same number of workers alone."""
    ties = {"--deterministic=same_workers": settings.launch.deterministic == "same_workers",
            "--compression=fp16": settings.launch.compression == "fp16",
            "--order=file": settings.recipe.order == "file"}
    return [flag for flag, is_set in ties.items() if is_set]


def flags_for(settings: Settings, plan: dict, recorded: Recorded, workers: int) -> list[str]:
    """Returns the flags with which these workers reproduce the run bit for bit. Raises UserError if they cannot.

    plan: content of the run's plan.json. By default, the micro-batch size depends on the number of workers.
    """
    sizes = {phase["micro_batch_size"] for phase in plan["phases"]}
    if settings.launch.is_deterministic and not ties_to_workers(settings) and len(sizes) == 1:
        return [f"--micro_batch_size={sizes.pop()}"]
    trained_on = recorded.progress["workers"]
    if {plan["workers"], trained_on} != {workers}:
        raise UserError(f"this run gives the same bits only on the same number of workers: it was trained on "
                        f"{trained_on}, and this is {workers}; see --deterministic, --order and "
                        "--micro_batch_size")
    return []


def on_workers(workers: int) -> list[str]:
    """Returns the words that start train.py on workers of this machine."""
    start = [sys.executable, TRAIN]
    if workers == 1:
        return start
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    options = ["--allow-run-as-root", "--bind-to", "none", "--map-by", ":oversubscribe"]
    return [mpirun, *options, "-np", str(workers), *start]


def next_evaluation(folder: Path, recorded: Recorded, words: list[str]) -> dict:
    """Trains until metrics.jsonl in a folder has the row that follows the checkpoint, and returns it.

    Then it stops the training. Raises UserError if training fails, Stopped after a request to stop this program.
    """
    def new_rows() -> list[dict]:
        return RunFolder(folder, reader=PROGRAM).rows(METRICS)[len(recorded.before):]

    process, rows = started(words), []
    with stops_passed_on(process) as received:
        while process.poll() is None and not received and not recorded.is_answered_by(rows := new_rows()):
            time.sleep(POLL)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        code = process.wait()
    if received:
        raise Stopped("stopped on request")
    rows = rows if recorded.is_answered_by(rows) else new_rows()  # a rollback before the stop may have removed them
    if not rows:
        raise UserError(f"the training failed with exit code {code}; see the lines above")
    return rows[0]


def compared(recorded: Recorded, row: dict) -> dict:
    """Returns the result of `verified`. row: of the new evaluation."""
    before = recorded.row
    differs = {key: [before.get(key), row.get(key)] for key in before | row
               if key not in TIMES and before.get(key) != row.get(key)}
    result = {"from_epoch": recorded.epoch, "to_epoch": before["epoch"], "reproduced": not differs}
    return result | ({"differs": differs} if differs else {})


def changed_versions(made: dict) -> list[str]:
    """Returns the versions of this code and its libraries that have changed since the run, in words.

    made: content of run.json. Other versions may give other bits.
    """
    then, now = (of["versions"] | {"git": revision_text(of["git"])} for of in (
        {"versions": {}, "git": None} | made, {"versions": versions(), "git": git_revision(ROOT)}))
    return [f"{name} {then[name]} (now {now.get(name)})" for name in then if then[name] and then[name] != now.get(name)]


def conclusion(result: dict) -> str:
    """Returns the result in one line."""
    epochs = f"epoch {result['from_epoch']:g} to {result['to_epoch']:g}"
    if result["reproduced"]:
        return f"{epochs} reproduced to the bit"
    key, (before, now) = next(iter(result["differs"].items()))
    others = f"; the run was made with {', '.join(result['versions'])}" if "versions" in result else ""
    return f"{epochs} not reproduced: {key} was {before} and is now {now}{others}"


@command.program(PROGRAM, __doc__, lambda _: flags.described(flags.define(Options)), is_alone=True)
@command.json_only_on_stdout()
def main(argv) -> int:
    """Runs a command line; returns the exit code."""
    values = train_flags.define(Options)
    runs = flags.read_with_arguments(values, argv)
    if len(runs) != 1:
        raise UsageError("give the folder of one run, such as runs/NAME")
    result = verified(runs[0], flags.parsed(values, Options).workers, passed_on(values, Options))
    print(conclusion(result), file=sys.stderr)
    command.output(as_json(result))
    return ExitCode.DONE if result["reproduced"] else ExitCode.WRONG


if __name__ == "__main__":
    sys.exit(main(sys.argv))
