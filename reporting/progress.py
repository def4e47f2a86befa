"""Progress on standard error: a bar with images per second and the time left on a terminal, and a line per epoch."""
import sys

from tqdm import tqdm


class ProgressBar:
    """An observer of training. epochs, samples: totals of the whole training. progress: how far it has come."""

    def __init__(self, epochs: float, samples: int, progress):
        self._epochs = epochs
        self._bar = tqdm(total=samples, initial=progress.samples, unit=" images", unit_scale=True,
                         disable=not sys.stderr.isatty(), dynamic_ncols=True, smoothing=0.05, file=sys.stderr)

    def go_back(self, progress) -> None:
        self._bar.n = progress.samples
        self._bar.refresh()

    def step(self, samples: int, layers: dict) -> None:
        del layers
        self._bar.update(samples)

    def evaluation(self, row: dict, layers: dict, breakdown: dict) -> None:
        del layers
        waits = "".join(f", {name} {breakdown[name]:.0%}" for name in ("data", "exchange") if breakdown)
        tqdm.write(
            f"epoch {row['epoch']:g}/{self._epochs:g}  rate {row['learning_rate']:.4g}  train loss "
            f"{row['train_loss']:.4f} top-1 {row['train_top1']:.2%}  validation loss {row['val_loss']:.4f} top-1 "
            f"{row['val_top1']:.2%}  {row['images_per_second']:,.0f} images/s{waits}", file=sys.stderr)

    def end(self, summary: dict) -> None:
        self._bar.close()
        print(validation_line(summary), file=sys.stderr)


def validation_line(summary: dict) -> str:
    return (f"validation: top-1 {summary['val_top1']:.2%} ({summary['val_top1_count']} of {summary['val_samples']}), "
            f"top-5 {summary['val_top5']:.2%} ({summary['val_top5_count']}), loss {summary['val_loss']:.4f}; "
            f"{summary['seconds']:.0f} s")
