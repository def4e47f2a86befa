"""What the report shows of a run's folder."""
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from common import VERSION, files, locks, metric, run_folder
from common.errors import UserError
from common.run_folder import top1_of
from plan import recipes
from plan.values import same

NEWEST = {run_folder.RUN: "origins", run_folder.PLAN: "learning_rate_breakpoints"}  # keys that old runs lack


def validation_set(run: dict) -> dict:
    """Returns what identifies a run's validation set: keys of ranking.VALIDATION. run: content of run.json."""
    data = run.get("dataset") or {}
    known = {"classes": data.get("classes"), "samples": data.get("validation_samples")}
    return {key: value for key, value in known.items() if value} | data.get("validation_content", {})


@dataclass(frozen=True)
class RunData:
    """The content of a run's folder, for the report. The run may be in progress. Missing files are empty here."""

    folder: Path
    plan: dict  # plan.json
    flags_text: str  # flags.txt
    rows: list[dict]  # metrics.jsonl
    times: list[dict]  # times.jsonl
    layers: list[dict]  # trust_ratios.jsonl
    steps: list[dict]  # steps.jsonl
    noise: list[dict]  # noise_scale.jsonl
    run: dict  # run.json
    outcomes: dict  # outcomes.json
    summary: dict | None  # summary.json of a run that reached its end, otherwise None
    divergence: dict | None  # summary.json of a run that ended because it diverged, otherwise None

    @classmethod
    def read(cls, folder, reader: str = "reporting.report") -> "RunData":
        """Reads a run's folder. Skips damaged rows and files, with a warning on standard error.

        Raises UserError if it is no run's folder, or a run of a version with other files. reader: name of the program,
        for the warnings.
        """
        folder = Path(folder).absolute()
        for name in (run_folder.PLAN, run_folder.FLAGS, run_folder.RUN):
            if not (folder / name).is_file():
                kind = "the folder of an evaluation, whose page is its report.html, and not of a run" if (
                    folder / run_folder.PREDICTIONS).is_file() else "not the folder of a run"
                raise UserError(f"{folder} is {kind}: it contains no {name}")
        files = run_folder.RunFolder(folder, reader)
        summary = files.ending() or None
        has_diverged = bool(summary and summary.get("diverged"))
        run, plan = (files.read(name, required=True) for name in NEWEST)
        for content, (name, key) in zip((run, plan), NEWEST.items(), strict=True):
            if key not in content:
                theirs = run.get("versions", {}).get("bigbatch", "of another version")
                raise UserError(f"{folder} is a run of Bigbatch {theirs}, which {VERSION} does not read: {name} lacks "
                                f"{key}; use the version that wrote it")
        return cls(
            folder=folder, plan=plan, flags_text="".join(files.log(run_folder.FLAGS).lines),
            rows=files.rows(run_folder.METRICS), times=files.rows(run_folder.TIMES),
            layers=files.rows(run_folder.LAYERS), steps=files.rows(run_folder.STEPS),
            noise=files.rows(run_folder.NOISE), run=run, outcomes=files.read(run_folder.OUTCOMES),
            summary=None if has_diverged else summary, divergence=summary if has_diverged else None)

    @cached_property
    def flags(self) -> dict[str, str]:
        """Value of each flag in flags.txt, as text."""
        return recipes.flags_in(self.flags_text)

    @property
    def epochs(self) -> float:
        """Number of epochs of the plan."""
        return self.plan["epochs"]

    @property
    def epoch(self) -> float:
        """How far training has come: the epoch of the last evaluation or logged update, 0 before the first."""
        return max((row["epoch"] for row in (*self.rows[-1:], *self.steps[-1:])), default=0)

    @cached_property
    def state(self) -> str:
        """finished, diverged, below --expect, unfinished (run.json has the reason), killed, or in progress."""
        if self.divergence:
            return "below --expect" if self.divergence.get("below_expected") else "diverged"
        if self.summary:
            return "finished"
        if self.run.get("stopped"):
            return "unfinished"
        return "killed" if files.is_abandoned(self.folder / locks.LOCK) else "in progress"

    @property
    def has_top5(self) -> bool:
        """Whether there are so many classes that top-5 means something."""
        return self.run["dataset"]["classes"] >= metric.TOP5_CLASSES

    @property
    def result(self) -> dict:
        """The columns of the last evaluation, and those of the summary if there is one."""
        return (self.rows[-1] if self.rows else {}) | (self.summary or {})

    @property
    def shown(self) -> dict:
        """The columns of the best evaluation, or of the last one if the row of the best was lost."""
        epoch = self.best and self.best["epoch"]
        return next((row for row in self.rows if row["epoch"] == epoch), self.result)

    @property
    def is_best_last(self) -> bool:
        """Whether the best evaluation is the last one. So it is before the first evaluation."""
        return not self.rows or self.shown["epoch"] == self.rows[-1]["epoch"]

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
    def workers(self) -> int:
        return self.summary["world_size"] if self.summary else self.plan["workers"]

    @property
    def trust_ratios(self) -> dict[str, list[float | None]]:
        """Trust ratio of each variable that has one, for each row of trust_ratios.jsonl."""
        names = self.layers[0]["layers"] if self.layers else ()
        ratios = {name: [ratio for row in self.layers for ratio in row["layers"][name][2:]] for name in names}
        return {name: values for name, values in ratios.items() if any(value != 1 for value in values)}

    @property
    def changes(self) -> str:
        """The flags that differ from those of the recipe, in words, without --data_dir."""
        recipe = (self.run["recipe"] or {}).get("flags", {})
        return ", ".join(f"--{name}={self.flags[name]} instead of {value}" for name, value in recipe.items()
                         if name in self.flags and name != "data_dir" and not same(value, self.flags[name]))
