"""What records and shows a training: the observers of every run, on rank 0."""
import io
import math

import numpy as np

from plan.run_folder import AUGMENTATIONS, RunFolder
from plan.settings import Run
from reporting.progress import ProgressDisplay
from reporting.report_writer import ReportWriter
from reporting.run_log import RunLog
from reporting.tensorboard import TensorBoard
from training.observer import Observer, RunInfo

SHOWN = 64  # images of augmentations.png
LARGEST = 4096  # pixels, their largest size


def observers_of(run: Run, folder: RunFolder) -> list[Observer]:
    """Returns the observers of a run that writes to a folder, in the order in which they are called."""
    observers = [RunLog(folder), ProgressDisplay(), *([Augmentations(folder)] if run.save_augmentations else []),
                 TensorBoard(folder), ReportWriter(folder)]
    return sorted(observers, key=lambda observer: observer.reads_folder)


class Augmentations(Observer):
    """--save_augmentations: writes augmentations.png, training images as the model sees them."""

    def __init__(self, folder: RunFolder):
        self._folder = folder

    def start(self, run: RunInfo) -> None:
        if run.images:
            images, _ = run.images(SHOWN, LARGEST)
            self._folder.write(AUGMENTATIONS, grid(images))
            self._folder.save()


def grid(images: np.ndarray) -> bytes:
    """Returns images, uint8 (number, height, width, 3), as one PNG with about as many rows as columns."""
    from PIL import Image

    number, height, width, channels = images.shape
    columns = math.ceil(math.sqrt(number))
    filled = np.pad(images, [(0, -number % columns), (0, 0), (0, 0), (0, 0)])
    rows = filled.reshape(-1, columns, height, width, channels).swapaxes(1, 2)
    saved = io.BytesIO()
    Image.fromarray(rows.reshape(-1, columns * width, channels)).save(saved, "PNG")
    return saved.getvalue()
