"""A run's folder: the names of its files, how training writes them, and how they are read.

times.jsonl has one row per evaluation: `epoch`, `samples`, and the fractions of the time before it that went to
`compute`, to waiting for `data` and to the `exchange` of gradients. If the data had to be fetched or copied ahead, it
also has `storage`, the fraction of all steps that waited for that, which is part of `data`, and the blocks fetched
(`requests`), their bytes (`fetched`), and the blocks found in the window (`hits`), of all workers. With several
workers, it has the `hosts` of the ranks, their mean seconds of a timed step (`workers`: computing, waiting for data,
exchange), and a sentence on each `slow` worker. It is separate from metrics.jsonl, whose rows are the same, bit for
bit, in a resumed run, except for the speed and the seconds. The other files are described in docs/images.md.
"""
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

from common import files, metric
from common.errors import UserError, complain

PLAN, FLAGS, SUMMARY, RUN, OUTCOMES = "plan.json", "flags.txt", "summary.json", "run.json", "outcomes.json"
METRICS, TIMES, LAYERS, STEPS = "metrics.jsonl", "times.jsonl", "trust_ratios.jsonl", "steps.jsonl"
NOISE = "noise_scale.jsonl"
CLASSES, PREDICTIONS = "classes.csv", "predictions.csv"  # of training.by_class, of --mode=evaluate
LOGS = METRICS, TIMES, LAYERS, STEPS, NOISE  # of rows
PAGE, SAMPLE_IMAGES, AUGMENTATIONS = "report.html", "samples.jpg", "augmentations.png"
CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"  # folders
OF_A_RUN = (PLAN, FLAGS, SUMMARY, RUN, OUTCOMES, *LOGS, CLASSES, PREDICTIONS, PAGE, SAMPLE_IMAGES, AUGMENTATIONS,
            CHECKPOINTS, TENSORBOARD)
REPLACED = ".replaced"  # folder with the earlier run, until one that starts over has made an update
COLUMNS, ROWS = 8, 2  # of training images in samples.jpg


def has_checkpoints(folder: Path) -> bool:
    return any((folder / CHECKPOINTS).glob("step-*"))


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return (folder / FLAGS).is_file() or has_checkpoints(folder)


def folder_of(checkpoint: str) -> Path:
    """Returns the run folder RUN of a --checkpoint, which is RUN, RUN/checkpoints, or one checkpoint in it."""
    path = Path(checkpoint).absolute()
    if (path / CHECKPOINTS).is_dir():
        return path
    if path.name == CHECKPOINTS:
        return path.parent
    return path.parent.parent if (path.parent.parent / FLAGS).is_file() else path


class Log:
    """A text file that grows by lines. What could not be written, as on a full disk, is written by a later `save`.

    lines: all lines, with their line ends, in the file or not.
    """

    def __init__(self, path: Path):
        self.path, self.lines = path, _text(path).splitlines(keepends=True)
        self._saved = len(self.lines)  # lines in the file, or None if it is to be replaced

    def keep(self, lines: list[str]) -> None:
        """Replaces the content, from the next `save` on."""
        self.lines = lines
        self._saved = None

    def save(self) -> None:
        """Writes the lines that the file lacks. Raises OSError; the file then is as before."""
        if self._saved is None or (self._saved and not self.path.exists()):
            files.write_atomically(self.path, "".join(self.lines))
        elif self._saved < len(self.lines):
            files.append(self.path, "".join(self.lines[self._saved:]))
        self._saved = len(self.lines)

    def flush(self) -> None:
        """Calls fsync on what was saved. Raises OSError."""
        if self._saved:
            try:
                files.flush(self.path)
            except OSError:
                self._saved = None  # some file systems notice only now that the disk is full
                raise


class RunFolder:
    """The files of a run, for the training that writes them and for programs that read them.

    Rows and contents are kept in memory until `save` writes them. If that fails, as on a full disk, one line says so,
    and training continues; a later `save` writes all. Its methods may be called from several threads.

    reader: name of the program that reads the folder, perhaps while a training writes to it, or None in the training.
    """

    def __init__(self, path: Path | str, reader: str | None = None):
        self.path = Path(path)
        self._replaced, self._moving = self.path / REPLACED, self.path / f"{REPLACED}.part"
        self._reader = reader
        self._logs = {}
        self._contents = {}
        self._lock = threading.RLock()
        self._is_failing = False

    def rows(self, name: str, start: int = 0) -> list[dict]:
        """Returns the rows of a log with one JSON object per line, on disk or not, from the row number `start` on.

        Names damaged lines on standard error and leaves them out.
        """
        with self._lock:
            return [json.loads(line) for line in self._log_of_rows(name).lines[start:]]

    def append(self, name: str, row: dict) -> None:
        with self._lock:
            self._log_of_rows(name).lines.append(files.as_json(row) + "\n")

    def keep(self, name: str, is_kept: Callable[[dict], bool]) -> None:
        """Removes the other rows of a log."""
        with self._lock:
            log = self._log_of_rows(name)
            kept = [line for line in log.lines if is_kept(json.loads(line))]
            if len(kept) < len(log.lines):
                log.keep(kept)

    def log(self, path) -> Log:
        """Returns a log whose lines are not rows. `save` saves it, too. path: in the folder, or elsewhere."""
        with self._lock:
            return self._logs.setdefault(path, Log(self.path / path))

    def read(self, name: str, required: bool = False) -> dict:
        """Returns the content of a JSON file, empty if it is missing or damaged. Names a damaged one.

        required: raise UserError if it is damaged.
        """
        path = self.path / name
        if not path.exists():
            return {}
        content = _json_object(_text(path))
        if content is None and required:
            raise UserError(f"{path} is damaged: it is not JSON; the next training in the folder writes it again")
        if content is None:
            self._warn(f"{path} is damaged and was skipped: it is not JSON")
        return content or {}

    def ending(self) -> dict:
        """Returns the content of summary.json if a training that has ended wrote it, otherwise an empty dict.

        An evaluation of a checkpoint writes one, too, which has no advice.
        """
        summary = self.read(SUMMARY)
        return summary if "advice" in summary else {}

    def remove(self, name: str) -> None:
        """Removes a file that is written as a whole."""
        with self._lock:
            self._contents.pop(name, None)
            (self.path / name).unlink(missing_ok=True)

    def write(self, name: str, content: dict | str | bytes) -> None:
        """Replaces a file at the next `save`. content: a dict is written as JSON."""
        with self._lock:
            self._contents[name] = files.as_json(content, indent=1) + "\n" if isinstance(content, dict) else content

    def save(self) -> None:
        """Writes what is not in the files yet. A failure is one line, and the next one only after a success."""
        try:
            self.save_or_raise()
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                self._warn(f"{error.filename or self.path} cannot be written: {error.strerror}; training continues, "
                           "and it is written when that is possible")
            self._is_failing = True

    def save_or_raise(self) -> None:
        """Writes all that can be written. Raises OSError if anything cannot."""
        problem = None
        with self._lock:
            for log in self._logs.values():
                try:
                    log.save()
                except OSError as error:
                    problem = problem or error
            for name, content in [*self._contents.items()]:
                try:
                    files.write_atomically(self.path / name, content)
                    del self._contents[name]
                except OSError as error:
                    problem = problem or error
        if problem:
            raise problem

    def flush(self) -> None:
        """Writes the rows to disk, so that a checkpoint can count them. Raises OSError."""
        with self._lock:
            logs = [self._logs[name] for name in LOGS if name in self._logs]
            for log in logs:
                log.save()
        for log in logs:  # without the lock, because a disk may be slow
            log.flush()
        files.flush(self.path)

    def set_aside(self) -> None:
        """Moves the run in the folder away, for one that starts over: `restore` brings it back, `forget` deletes it.

        If this or `restore` is interrupted, a later `restore` still finds each file. Raises OSError.
        """
        self._moving.mkdir()
        for name in OF_A_RUN:
            if os.path.lexists(self.path / name):
                (self.path / name).rename(self._moving / name)
        self._moving.rename(self._replaced)

    def restore(self) -> None:
        """Brings back the run that was set aside, if any, in place of what the new one has written. Raises OSError."""
        if self._replaced.exists():
            for name in OF_A_RUN:
                files.remove(self.path / name)
            self._replaced.rename(self._moving)
        if self._moving.exists():
            for path in self._moving.iterdir():
                path.rename(self.path / path.name)
            self._moving.rmdir()

    def forget(self) -> None:
        """Deletes the run that was set aside, if any. Raises OSError."""
        if self._replaced.exists():
            old = self._replaced.with_suffix(".old")
            files.remove(old)
            self._replaced.rename(old)  # so that a deletion that is interrupted brings nothing back
            files.remove(old)

    def _log_of_rows(self, name: str) -> Log:
        """Returns a log with one JSON object per line. It leaves out damaged lines."""
        if name not in self._logs:
            log = self.log(name)
            damaged = [number for number, line in enumerate(log.lines, 1) if "epoch" not in (_json_object(line) or {})]
            if damaged and not (self._reader and damaged == [len(log.lines)]):  # training may be writing the last line
                which = f"line {damaged[0]} is" if len(damaged) == 1 else f"{len(damaged)} lines are"
                self._warn(f"{log.path}: {which} damaged and left out")
            if damaged or (log.lines and not log.lines[-1].endswith("\n")):
                log.keep([f"{line.rstrip()}\n" for number, line in enumerate(log.lines, 1) if number not in {*damaged}])
        return self._logs[name]

    def _warn(self, message: str) -> None:
        complain(f"warning: {message}", self._reader)


def _text(path: Path) -> str:
    """Returns the text of a file, empty if it is missing. What is not text is replaced."""
    return path.read_text(errors="replace") if path.is_file() else ""


def _json_object(text: str) -> dict | None:
    try:
        content = json.loads(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def top1_of(row: dict) -> float | None:
    """Returns the validation top-1 that counts for the best, a target and a ranking, or None if there is none.

    It is that of the average of the weights if there is an average, otherwise that of the weights; of a run that
    diverged, that of guessing. row: of metrics.jsonl or sweep.json, or the content of summary.json.
    """
    if row.get("diverged") and "classes" in row:
        return 1 / row["classes"]
    average = row.get(metric.EMA_VAL_TOP1)
    return row.get(metric.VAL_TOP1) if average is None else average
