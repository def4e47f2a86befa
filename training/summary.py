"""The content of summary.json."""
from common import metric
from data.dataset import Dataset
from distributed.world import World
from training.by_class import averages, by_class, effective_samples, weakest
from training.divergence import Diverged
from training.evaluate import EvaluationResult
from training.outcomes import Outcomes
from training.state import Progress


def summary_json(result: EvaluationResult, dataset: Dataset, epochs: float, batch_size: int, world: World,
                 images_per_second: float, seconds: float) -> dict:
    """Returns the content of summary.json, from the last evaluation."""
    return result.metrics | of_classes(result.outcomes, dataset) | {
        "train_samples": dataset.train.samples, "epochs": epochs, "global_batch_size": batch_size,
        "world_size": world.size, "images_per_second": images_per_second, "seconds": seconds}


def of_classes(outcomes: Outcomes, dataset: Dataset) -> dict:
    """Returns what summary.json says of the classes. outcomes: of the validation samples."""
    rows = by_class(*outcomes.pairs, dataset.classes)
    return averages(rows) | {metric.BALANCED_SAMPLES: effective_samples(rows),
                             metric.WEAKEST_CLASSES: [] if dataset.is_synthetic else weakest(rows)}


def milestones(progress: Progress, target_top1: float | None, checkpoint: str | None) -> dict:
    """Returns the best validation top-1 and its epoch, and when the target was reached: None if it was not.

    They are those of the average of the weights if there is one. There are none before the first evaluation.

    checkpoint: path, in the run's folder, of the checkpoint that has this top-1, or None if it is not on disk.
    """
    if not progress.best:
        return {}
    best = {"best_top1": progress.best["top1"], "best_epoch": progress.best["epoch"],
            "best_checkpoint": checkpoint}
    if target_top1 is None:
        return best
    first = next((record for record in progress.records if record["top1"] >= target_top1), {})
    return best | {"target_top1": target_top1, "epochs_to_target": first.get("epoch"),
                    "seconds_to_target": first.get("seconds")}


def divergence_json(problem: Diverged, train_samples: int, epochs: float, world: World, classes: int,
                    seconds: float, advice: list[str]) -> dict:
    """Returns the content of summary.json for a training that ended because it diverged, or lies below --expect.

    epochs: of the plan. advice: sentences on what to try.
    """
    return {"diverged": True, "diverged_at": {"step": problem.step, "epoch": problem.epoch},
            "below_expected": problem.is_below_expected, "classes": classes, "train_samples": train_samples,
            "epochs": epochs, "world_size": world.size, "seconds": seconds, "advice": advice}
