"""Reads a run's folder for the report. The run may be in progress, or of an earlier version that wrote fewer files."""
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from common.errors import UserError
from optim.schedules import Piecewise
from reporting.run_folder import FLAGS, LAYERS, METRICS, OUTCOMES, PLAN, RUN, STEPS, SUMMARY, TIMES, RunFolder


@dataclass(frozen=True)
class RunData:
    """The content of a run's folder. What is missing is empty, or None for the summaries.

    rows: of metrics.jsonl. times, layers, steps: of times.jsonl, trust_ratios.jsonl, steps.jsonl. run: of run.json.
    outcomes: of outcomes.json. summary: summary.json of a run that reached its end. divergence: that of one that ended
    because it diverged: diverged_at (step, epoch), classes, seconds.
    """

    folder: Path
    plan: dict
    flags_text: str
    rows: list[dict]
    times: list[dict]
    layers: list[dict]
    steps: list[dict]
    run: dict
    outcomes: dict
    summary: dict | None
    divergence: dict | None = None

    @classmethod
    def read(cls, folder) -> "RunData":
        """Names what is damaged on standard error and skips it. Raises UserError if the folder is not that of a run."""
        folder = Path(folder).absolute()
        if not (folder / PLAN).is_file():
            raise UserError(f"{folder} is not the folder of a run: it contains no {PLAN}")
        files = RunFolder(folder, reader="reporting.report")
        plan, text = files.read(PLAN, required=True), "".join(files.log(FLAGS).lines)
        ending = files.read(SUMMARY) or None
        ends = (None, ending) if ending and ending.get("diverged") else (ending, None)
        return cls(folder, plan, text, files.rows(METRICS), files.rows(TIMES), files.rows(LAYERS), files.rows(STEPS),
                   files.read(RUN), files.read(OUTCOMES), *ends)

    @cached_property
    def flags(self) -> dict[str, str]:
        """Value of each flag in flags.txt, as text."""
        return flags_in(self.flags_text)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def epochs(self) -> float:
        """Number of epochs of the plan."""
        return self.plan.get("epochs", 0)

    @property
    def epoch(self) -> float:
        """Epoch of the last evaluation, 0 before the first."""
        return self.rows[-1]["epoch"] if self.rows else 0

    @property
    def is_in_progress(self) -> bool:
        """Whether the process that wrote run.json has not ended, as far as the folder tells."""
        return self.summary is None and not self.divergence and bool(self.run) and not self.run.get("stopped")

    @property
    def result(self) -> dict:
        """The newest accuracy: the last row, and what the summary adds."""
        return (self.rows[-1] if self.rows else {}) | (self.summary or {})

    @property
    def best(self) -> dict | None:
        """The highest validation top-1 (see top1_of) and its epoch: top1, epoch. None before the first evaluation."""
        ending = self.summary or self.divergence or {}
        if ending.get("best_top1") is not None:  # also if rows were lost
            return {"top1": ending["best_top1"], "epoch": ending["best_epoch"]}
        scored = [row for row in self.rows if top1_of(row) is not None]
        row = max(scored, key=top1_of, default=None)
        return row and {"top1": top1_of(row), "epoch": row["epoch"]}

    @property
    def workers(self) -> int | None:
        return (self.summary or {}).get("world_size") or self.plan.get("workers")

    def changed_flags(self) -> dict[str, tuple[str, str]]:
        """Flags that differ from those of the recipe: name -> (of the recipe, of the run)."""
        recipe = (self.run.get("recipe") or {}).get("flags", {})
        return {name: (value, self.flags[name]) for name, value in recipe.items()
                if name in self.flags and name != "data_dir" and not same(value, self.flags[name])}


def top1_of(row: dict) -> float | None:
    """Returns the validation top-1 that counts for the best, a target and a ranking, or None if there is none.

    It is that of the average of the weights if there is an average, otherwise that of the weights. row: of
    metrics.jsonl or sweep.json, or the content of summary.json.
    """
    average = row.get("ema_val_top1")
    return row.get("val_top1") if average is None else average


def first_row_at(rows: list[dict], target_top1: float) -> dict | None:
    """Returns the first row of metrics.jsonl whose validation top-1 reaches the target, or None."""
    return next((row for row in rows if (top1_of(row) or 0) >= target_top1), None)


def flags_in(text: str) -> dict[str, str]:
    """Returns the value of each flag in the text of a flags.txt."""
    values = {}
    for line in text.splitlines():
        name, separator, value = line.strip().removeprefix("--").partition("=")
        if line.startswith("--") and separator:
            values[name] = value
        elif line.startswith("--"):
            values[name.removeprefix("no")] = str(not name.startswith("no")).lower()
    return values


def same(one, other) -> bool:
    """Whether two values of a flag, texts or lists of texts, mean the same: 1e-4 and 0.0001 do, 2 and 0:2 do."""
    return _meaning(one) == _meaning(other)


def _meaning(value):
    """Returns the pairs of a number or schedule, the items of a list, or the text itself."""
    text = ",".join(value) if isinstance(value, list) else str(value)
    try:
        return Piecewise.parse(text).pairs
    except ValueError:
        items = text.split(",")
        return [_meaning(item) for item in items] if len(items) > 1 else text
