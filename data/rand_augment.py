"""RandAugment (arXiv:1909.13719) in timm's variant: a few operations for each training image, with random magnitudes.

Which operation an image gets, and its parameter, are a function of the seed and of the sample's position in the stream.
The operations are those of nvidia.dali.auto_aug. They differ from timm's, which are Pillow's, in this: rotation, shear
and translation are bilinear, where timm uses the filter of its crops, and fill with grey, where it uses the dataset's
mean colour; equalize is OpenCV's; and values are rounded that Pillow cuts off.
"""
import re
from dataclasses import dataclass

import numpy as np

from data.operation import Operation
from data.randomness import Purpose, uniforms
from data.warp import warped

MOST = 10  # the largest magnitude
FILL = 128
RADIANS = np.pi / 180  # of a degree
# operation -> its parameter, float64 (samples,), from magnitude / MOST, sign (-1 or 1) and image size in pixels, as in
# timm/data/auto_augment.py for `inc1`, with which each magnitude above another changes an image more.
PARAMETERS = {
    "auto_contrast": None, "equalize": None, "invert": None,
    "rotate": lambda share, sign, size: sign * 30 * share,  # degrees
    "posterize": lambda share, sign, size: 256 - 2 ** (4 + np.floor(4 * share)),  # mask of the 4 to 0 bits that stay
    "solarize": lambda share, sign, size: 256 - np.floor(256 * share),  # least value that is inverted
    "solarize_add": lambda share, sign, size: np.floor(110 * share),  # to values below 128
    **dict.fromkeys(("color", "contrast", "brightness", "sharpness"),  # 1: the image, 0: without colour and so on
                    lambda share, sign, size: np.maximum(0.1, 1 + sign * 0.9 * share)),
    **dict.fromkeys(("shear_x", "shear_y"), lambda share, sign, size: sign * 0.3 * share),
    **dict.fromkeys(("translate_x", "translate_y"), lambda share, sign, size: sign * 0.45 * share * size),  # pixels
}
NAMES = (*PARAMETERS, "identity")
APPLIED = 0.5  # probability of each operation that was chosen
BLUR = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13  # Pillow's SMOOTH
IDENTITY = np.pad(np.ones((1, 1), np.float32), 1)


@dataclass(frozen=True)
class RandAugment(Operation):
    """How many operations change each image, and by how much."""

    magnitude: float  # mean of the normal distribution of magnitudes, from 0 to MOST
    count: int = 2  # number of operations for each image
    deviation: float = 0.0  # standard deviation of the magnitudes

    @classmethod
    def parse(cls, text: str) -> "RandAugment | None":
        """Parses timm's notation, or none into None. Raises ValueError."""
        if text == "none":
            return None
        found = re.fullmatch(r"(?:rand-)?m(\d+)(?:-n(\d+))?(?:-mstd(\d+(?:\.\d+)?))?-inc1", text)
        if not found:
            raise ValueError(f"'{text}' is neither none nor of the form m6-n2-mstd0.5-inc1: magnitude, operations per "
                             "image, deviation of the magnitude, and operations that increase with it")
        made = cls(int(found[1]), int(found[2] or 2), float(found[3] or 0))
        if made.magnitude > MOST or not 1 <= made.count <= len(PARAMETERS):
            raise ValueError(f"'{text}': the magnitude is at most {MOST}, and n from 1 to {len(PARAMETERS)}, as there "
                             f"are {len(PARAMETERS)} operations")
        return made

    def random_numbers(self, image_size: int, seed: int, positions: np.ndarray) -> np.ndarray:
        """Returns the index in NAMES and the parameter of each operation in turn, float64 (positions, 2 * count)."""
        from scipy.special import ndtri

        u = uniforms(seed, Purpose.OPERATIONS, positions, 4 * self.count).reshape(len(positions), self.count, 4)
        index = np.minimum(u[..., 0] / APPLIED * len(PARAMETERS), len(PARAMETERS)).astype(int)
        magnitude = self.magnitude + self.deviation * ndtri(np.maximum(u[..., 1], 1e-16))
        share, sign = np.clip(magnitude, 0, MOST) / MOST, np.where(u[..., 2] < 0.5, -1, 1)
        return np.stack([index, parameters(index, share, sign, image_size)], axis=-1).reshape(len(positions), -1)

    def applied(self, images, numbers: list, transform):
        from nvidia.dali import fn, types
        from nvidia.dali.pipeline import do_not_convert

        operations = [do_not_convert(operation) for operation in do_not_convert(_operations)(transform)]
        for start in range(0, len(numbers), 2):
            index = fn.cast(numbers[start], dtype=types.INT32)
            images = _chosen(operations, index, images, numbers[start + 1])
        return images


def parameters(index: np.ndarray, share: np.ndarray, sign: np.ndarray, image_size: int) -> np.ndarray:
    """Returns the parameter of the operation NAMES[index] for each magnitude / MOST and sign; 0 if it has none."""
    found = np.zeros(index.shape)
    for number, parameter in enumerate(PARAMETERS.values()):
        if parameter:
            found = np.where(index == number, parameter(share, sign, image_size), found)
    return found


def _chosen(operations, index, images, parameter):
    """Applies the operation that an image's index chooses. A pipeline with conditionals splits the batch at each if."""
    if len(operations) == 1:
        return operations[0](images, parameter)
    half = len(operations) // 2
    if index < half:
        return _chosen(operations[:half], index, images, parameter)
    else:
        return _chosen(operations[half:], index - half, images, parameter)


def _operations(transform) -> list:
    """Returns a function of (images, parameter) for each of NAMES."""
    from nvidia.dali import fn, types
    from nvidia.dali.auto_aug import augmentations as dali

    on_device = transform.on_device

    def sharpness(images, parameter):
        kernel = types.Constant(BLUR) + types.Constant(IDENTITY - BLUR) * parameter
        return fn.filter(images, on_device(kernel))

    by_name = {
        "equalize": lambda images, parameter: fn.equalize(images),
        "posterize": lambda images, parameter: images & on_device(fn.cast(parameter, dtype=types.UINT8)),
        "solarize": lambda images, parameter: dali.solarize.op(images, on_device(parameter)),
        "solarize_add": lambda images, parameter: dali.solarize_add.op(
            images, on_device(fn.cast(parameter, dtype=types.UINT8))),
        "sharpness": sharpness,
        **(_moved_on_gpu() if transform.device.name == "gpu" else _moved_on_cpu(transform.size)),
    }
    return [by_name.get(name) or getattr(dali, name).op for name in NAMES]


def _moved_on_gpu() -> dict:
    """Returns the operations that move pixels."""
    from nvidia.dali import fn
    from nvidia.dali.auto_aug import augmentations as dali

    def moved(name, is_vertical):
        def operation(images, parameter):
            pair = (0.0, parameter) if is_vertical else (parameter, 0.0)
            return getattr(dali, name).op(images, fn.stack(*pair), fill_value=FILL)
        return operation

    return {"rotate": lambda images, parameter: dali.rotate.op(images, parameter, fill_value=FILL)} | {
        f"{kind}_{axis}": moved(name, axis == "y") for axis in "xy" for kind, name in (
            ("shear", f"shear_{axis}"), ("translate", f"translate_{axis}_no_shape"))}


def _moved_on_cpu(size: int) -> dict:
    """Returns the operations that move pixels, as matrices from the result to the image."""
    from nvidia.dali import math

    def rotated(parameter):
        cos, sin, centre = math.cos(parameter * RADIANS), math.sin(parameter * RADIANS), size / 2
        return (cos, -sin, (1 - cos + sin) * centre), (sin, cos, (1 - cos - sin) * centre)

    rows = {
        "rotate": rotated,
        "shear_x": lambda parameter: ((1.0, -parameter, 0.0), (0.0, 1.0, 0.0)),
        "shear_y": lambda parameter: ((1.0, 0.0, 0.0), (-parameter, 1.0, 0.0)),
        "translate_x": lambda parameter: ((1.0, 0.0, -parameter), (0.0, 1.0, 0.0)),
        "translate_y": lambda parameter: ((1.0, 0.0, 0.0), (0.0, 1.0, -parameter)),
    }
    return {name: lambda images, parameter, row=row: warped(images, *row(parameter), size, fill=FILL)
            for name, row in rows.items()}
