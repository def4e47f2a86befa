"""The content of summary.json."""
from distributed.world import World


def summarized(metrics: dict, train_samples: int, epochs: float, batch_size: int, world: World,
               images_per_second: float, seconds: float) -> dict:
    """Returns the content of summary.json. metrics: of an evaluation (see training.evaluate.Validation)."""
    return metrics | {
        "train_samples": train_samples, "epochs": epochs, "global_batch_size": batch_size, "world_size": world.size,
        "images_per_second": images_per_second, "seconds": seconds}
