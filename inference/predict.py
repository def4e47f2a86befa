"""Predicts the classes of image files (--mode=predict)."""
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tensorflow as tf

from common.cores import cores_of_worker
from common.errors import UserError, complain, one_line, reason
from data.image_files import images, left_out_line
from data.images import READ, Rejected, Rules, store
from inference.preprocessing import preprocess
from inference.trained import TOP, Trained

BATCH_SIZE = 32
ENDING = "{} of {} images could not be read; the lines above name them"


def image_files(names) -> list[Path]:
    """Returns the given files, and the images in the given folders and their subfolders, sorted by name.

    Names on standard error what it leaves out, such as hidden files. Raises UserError if a folder has no images.
    """
    files = []
    for path in map(Path, names):
        if not path.is_dir():
            files.append(path)
            continue
        found, left_out = images(path)
        if not found:
            raise UserError(f"--image: {path} contains no images; these formats are read: {', '.join(READ)}")
        for line in left_out_line(path, left_out):
            complain(line)
        files += map(path.joinpath, found)
    return files


def predict(trained: Trained, files: list[Path]) -> Iterator[dict]:
    """Yields a dict for each file: `file`, and `top`, its most probable classes, each with `class` and `probability`.

    Threads read the next batch while the network predicts one. A file that cannot be read is named on standard error;
    after the other files, UserError is raised.
    """
    pixels_of = tf.function(functools.partial(preprocess, image_size=trained.image_size, enlarge=trained.enlarge),
                            input_signature=[tf.TensorSpec([], tf.string)], autograph=False)
    unread = 0
    batches = [files[start:start + BATCH_SIZE] for start in range(0, len(files), BATCH_SIZE)]
    with ThreadPoolExecutor(cores_of_worker(1)) as pool:
        reading = [pool.submit(_read, file, pixels_of) for file in batches[0]]
        for batch, following in zip(batches, [*batches[1:], []], strict=True):
            found = [(file, *one.result()) for file, one in zip(batch, reading, strict=True)]
            reading = [pool.submit(_read, file, pixels_of) for file in following]
            for file, _, problem in found:
                if problem:
                    complain(f"{file}: {problem}")
            read = [(file, pixels) for file, pixels, problem in found if not problem]
            unread += len(batch) - len(read)
            rows = trained.probabilities(np.stack([pixels for _, pixels in read])).numpy() if read else ()
            for (file, _), probabilities in zip(read, rows, strict=True):
                yield {"file": str(file), "top": most_probable(trained.classes, probabilities)}
    if unread:
        raise UserError(ENDING.format(unread, len(files)))


def most_probable(classes, probabilities) -> list[dict]:
    """Returns the names and probabilities of the five most probable classes."""
    labels = np.argsort(-probabilities, kind="stable")[:TOP]
    return [{"class": classes[label], "probability": round(float(probabilities[label]), 4)} for label in labels]


def as_line(row: dict) -> str:
    """Returns a row of `predict` as a line of a table."""
    return "  ".join([row["file"], *(f"{guess['class']} {guess['probability']:.1%}" for guess in row["top"])])


def _read(file: Path, pixels_of) -> tuple[np.ndarray | None, str]:
    """Returns (pixels, "") of a file, or (None, problem) if it cannot be read.

    Formats that TensorFlow does not read are converted as data.prepare converts them.
    """
    try:
        return pixels_of(store(file.read_bytes(), Rules(for_tensorflow=True)).encoded).numpy(), ""
    except (OSError, Rejected) as error:
        return None, getattr(error, "strerror", None) or one_line(error)
    except tf.errors.OpError as error:
        return None, reason(error)
