"""The content of summary.json."""
from distributed.world import World
from training.divergence import Diverged


def summarized(metrics: dict, train_samples: int, epochs: float, batch_size: int, world: World,
               images_per_second: float, seconds: float) -> dict:
    """Returns the content of summary.json. metrics: of an evaluation (see training.evaluate.Validation)."""
    return metrics | {
        "train_samples": train_samples, "epochs": epochs, "global_batch_size": batch_size, "world_size": world.size,
        "images_per_second": images_per_second, "seconds": seconds}


def summarized_divergence(problem: Diverged, train_samples: int, epochs: float, world: World, classes: int,
                          seconds: float) -> dict:
    """Returns the content of summary.json for a training that ended because it diverged. epochs: of the plan."""
    return {"diverged": True, "diverged_at": {"step": problem.step, "epoch": problem.epoch}, "classes": classes,
            "train_samples": train_samples, "epochs": epochs, "world_size": world.size, "seconds": seconds}
