"""Verifies a run (--mode=verify): trains from one of its checkpoints to the next evaluation, and compares that with the
row of metrics.jsonl, which contains a digest of the weights.

It trains in a copy of the checkpoint's run. The run itself is not changed.
"""
import dataclasses
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from distributed import launcher
from distributed.world import World
from reporting.run_folder import CHECKPOINTS, METRICS, RunData, RunFolder
from training.checkpoints import intact
from training.default_recipe import run_folder
from training.settings import Settings

TIMES = ("images_per_second", "seconds")  # the keys of a row that differ from run to run


@dataclass(frozen=True)
class Recorded:
    """A checkpoint of a run and the evaluation that followed it.

    path, epoch: of the checkpoint. step, workers: of its progress. row: of metrics.jsonl.
    """

    path: Path
    epoch: float
    step: int
    workers: int
    row: dict


def verified(settings: Settings, train: Callable[[Settings], dict]) -> dict:
    """Trains from a checkpoint to the next evaluation. Returns, on all ranks: from_epoch, to_epoch, reproduced, and if
    they differ, differs: key of the row -> [recorded value, value found].

    train: trains with settings. Raises UserError if there is nothing to compare with.
    """
    run, launched = RunData.read(run_folder(settings.run.checkpoint)), launcher.launched()
    recorded = newest_with_evaluation(settings.run.checkpoint, run.rows)
    settings = on_these_workers(settings, run.plan, recorded, launched.size)
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:  # rank 0's is used
        if launched.rank == 0:
            print(f"verify: trains from {recorded.path} to epoch {recorded.row['epoch']:g}", file=sys.stderr)
            shutil.copytree(recorded.path, Path(folder, CHECKPOINTS, f"step-{recorded.step:08}"))
            shutil.copy(run.folder / METRICS, folder)  # training removes the rows after the checkpoint
        train(dataclasses.replace(settings, run=dataclasses.replace(settings.run, output_dir=folder)))
        found = RunFolder(folder).rows(METRICS)[-1] if launched.rank == 0 else {}
    result = compared(recorded, World().renumbered().broadcast(found, "evaluation"))
    if launched.rank == 0:
        print(conclusion(result), file=sys.stderr)
    return result


def newest_with_evaluation(checkpoint: str, rows: list[dict]) -> Recorded:
    """Returns the newest intact checkpoint of --checkpoint that an evaluation followed. Raises UserError."""
    for path, _, described in intact(Path(checkpoint)):
        progress = described["progress"]
        row = next((row for row in rows if row["samples"] > progress["evaluated"]), None)
        if row and "weights" not in row:
            raise UserError("--mode=verify: metrics.jsonl has no digest of the weights, because an earlier version of "
                            "Bigbatch wrote it")
        if row:
            return Recorded(path.resolve(), described["epoch"], progress["step"], progress["workers"], row)
    raise UserError(f"--mode=verify: no evaluation follows a checkpoint in {checkpoint}; train with "
                    "--checkpoint_every=1, which saves one after each epoch")


def on_these_workers(settings: Settings, plan: dict, recorded: Recorded, workers: int) -> Settings:
    """Returns settings with which these workers make the run's bits. Raises UserError if they cannot.

    plan: content of the run's plan.json. By default, the micro-batch size depends on the number of workers.
    """
    launch, sizes = settings.launch, {phase["micro_batch_size"] for phase in plan["phases"]}
    if launch.sums_in_tree and len(sizes) == 1 and settings.recipe.order == "global":
        launch = dataclasses.replace(launch, micro_batch_size=sizes.pop())
    elif {plan["workers"], recorded.workers} != {workers}:
        raise UserError(f"--mode=verify: this run gives the same bits only on the same number of workers: it was "
                        f"trained on {recorded.workers}, and this is {workers}; see --deterministic, --order and "
                        "--micro_batch_size")
    return dataclasses.replace(settings, launch=dataclasses.replace(launch, workers_schedule=None))


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
