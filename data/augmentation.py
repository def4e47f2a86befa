"""Augmentations of the training images by name, and the random numbers of each sample.

The numbers are a function of the seed and of the sample's position in the endless stream (order.py), those of an
alternating flip of the seed, the image and the epoch. They depend neither on the number of workers nor on where a
pipeline starts. This module uses only NumPy; pipeline.py applies the numbers to the images.
"""
from dataclasses import dataclass, replace

import numpy as np

from common import own
from common.errors import UserError
from data.operation import Operation
from data.randomness import Purpose, philox, uniforms

FIXED = ("aspect", "enlarge", "filling")  # the fields of an Augmentation that make nothing random
FILLINGS = ("mean", "black", "reflect")
ALTERNATING = "alternating"


@dataclass(frozen=True)
class Augmentation:
    """Which part of an image is decoded, and how it is changed."""

    # Range of the area of a random crop, as a fraction of the image (arXiv:1409.4842, section 6). None: the crop is a
    # square whose side is the image's shorter side divided by `enlarge`.
    area: tuple[float, float] | None = None
    # Range of the width / height of a random crop.
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    # Divisor of the shorter side for the central crop of validation: 256 / 224 means "resize to 256, crop 224". None:
    # images are stretched to squares first, so that validation sees the whole of each.
    enlarge: float | None = 1.0
    # Range from which training samples the divisor instead.
    rescale: tuple[float, float] | None = None
    shift: bool = False  # whether training crops at a random offset
    # Whether images are mirrored horizontally. True: each with probability 0.5. "alternating": an image that is
    # mirrored in one epoch is not mirrored in the next, and the seed decides which half begins (arXiv:2404.00498,
    # section 3.6). All copies of an image in an epoch (--repeats) are then mirrored alike.
    flip: bool | str = False
    # Pixels by which the resized image is padded on each side before training crops it at random to the size that it
    # had (arXiv:1512.03385, section 4.2). Nothing is resampled: the pixels of the crop are those of the padded image.
    padding: int = 0
    # What the padding shows: "mean", the dataset's mean colour, rounded; "black"; or "reflect", the image mirrored at
    # its outermost pixels, which are not repeated, as in numpy.pad. A folder without dataset.json has ImageNet's mean.
    filling: str = "mean"
    # Whether the same random colour is added to all pixels of an image, along the principal components of ImageNet's
    # colours (Krizhevsky et al. 2012, section 4.1).
    colour: bool = False
    # Whether the whole image is scaled, stretched, rotated, placed and mirrored in one resampling that repeats its
    # border, and then brightness and contrast of each channel are varied and noise is added. The constants below are
    # the ranges.
    warp: bool = False
    # What follows everything else, in turn. A single operation, such as a RandAugment, need not be in a tuple.
    operations: tuple[Operation, ...] = ()

    def __post_init__(self):
        if not isinstance(self.operations, tuple):
            object.__setattr__(self, "operations", (self.operations,) if self.operations else ())
        for name in ("area", "aspect", "rescale"):
            least, most = getattr(self, name) or (1, 1)
            if not 0 < least <= most or (name == "area" and most > 1):
                raise ValueError(f"{name} is ({least}, {most}), not the least and the most of a positive number"
                                 + (" up to 1" if name == "area" else ""))
        if self.flip not in (False, True, ALTERNATING):
            raise ValueError(f"flip is {self.flip!r}, not False, True or {ALTERNATING!r}")
        if self.filling not in FILLINGS:
            raise ValueError(f"filling is {self.filling!r}, not one of {', '.join(FILLINGS)}")
        if self.padding < 0 or (self.padding and self.warp):
            raise ValueError(f"padding is {self.padding}, not a number of pixels from 0 on, or 0 with warp, which "
                             "places the image itself")

    @property
    def random(self) -> bool:
        """Whether training draws random numbers: whether anything is set that changes images at random."""
        return any(value for name, value in vars(self).items() if name not in FIXED)

    def followed_by(self, operation: Operation) -> "Augmentation":
        """Returns the augmentation with an operation at its end, in place of another one of the same kind."""
        kept = [own for own in self.operations if type(own) is not type(operation)]
        return replace(self, operations=(*kept, operation))


class Augmentations(dict):
    """The augmentations by name. It also has an entry for each MODULE:NAME, an Augmentation of the user's own."""

    def __missing__(self, name):
        if ":" not in name:
            raise KeyError(name)
        made = own.load("--augmentation", name)
        if not isinstance(made, Augmentation):
            raise UserError(f"--augmentation={name}: it is {type(made).__name__}, not a data.augmentation.Augmentation")
        return made


AUGMENTATIONS = Augmentations({
    # resize, centre crop
    "none": Augmentation(),
    # mild random-resized crop without flips, for digits and letters
    "crop": Augmentation(area=(0.7, 1.0), aspect=(0.85, 1.18)),
    # GoogLeNet's: random-resized crop and flip; validation resizes to 256/224, centre crop
    "crop_flip": Augmentation(area=(0.08, 1.0), flip=True, enlarge=256 / 224),
    # the same with a validation crop of 95 %, as in arXiv:2110.00476
    "crop_flip_95": Augmentation(area=(0.08, 1.0), flip=True, enlarge=1 / 0.95),
    # mild random-resized crop and flip of the stretched image, for few photographs
    "crop_flip_mild": Augmentation(area=(0.7, 1.0), aspect=(0.85, 1.18), flip=True, enlarge=None),
    # ResNet's (arXiv:1512.03385, 3.4): resize to 256/224 to 480/224, random crop, flip, colour
    "resnet": Augmentation(rescale=(256 / 224, 480 / 224), shift=True, flip=True, colour=True, enlarge=256 / 224),
    # Caffe's for 224 pixels: resize to 256/224, random crop, flip
    "caffe": Augmentation(enlarge=256 / 224, shift=True, flip=True),
    # AlexNet's: resize to 256/227, random crop, flip
    "alexnet": Augmentation(enlarge=256 / 227, shift=True, flip=True),
    # ResNet's for CIFAR (arXiv:1512.03385, 4.2): pad 4 pixels with the mean colour, random crop, flip
    "pad_crop_flip": Augmentation(padding=4, flip=True),
    # airbench94's for CIFAR (arXiv:2404.00498): pad 2 pixels by reflection, random crop, alternating flip
    "reflect_crop_alternate_flip": Augmentation(padding=2, filling="reflect", flip=ALTERNATING),
    # Sony's (arXiv:1811.05233, 3.2), without distortion; validation resizes to 256/224, centre crop
    "nnabla": Augmentation(warp=True, enlarge=256 / 224),
})
UNIFORMS = 16  # random numbers per sample
# What image_augmentation of Sony's Neural Network Libraries does in the oldest ImageNet script of nnabla-examples.
SIZE = (1.1, 2.2)  # of the shorter side, in sizes of the result
ASPECT = 1.3  # of the stretched image, at most
ANGLE = 0.5  # radians
BRIGHTNESS = 25.5  # grey levels
CONTRAST = 1.1  # a factor
NOISE = 25.5  # grey levels
# The columns that the pipeline reads, each only if the augmentation needs it:
# area: area of a random crop, from 0 for the least to 1 for the most that is allowed.
# offset: position of the crop, from 0 to 1, downwards and to the right.
# sides: height and width of a crop of area 1.
# corner: upper left corner (down, right) of the crop of a padded image, in pixels from that of the image itself.
# warp: rows of a matrix from a pixel's offset (x, y) from the centre of the result to that from the scaled image's.
# shorter: shorter side of the scaled image in pixels.
# reach: height and width of the part of the scaled image that the result shows, in its pixels, without rotation.
# brightness, contrast: of red, green and blue. noise: its deviation. noise_offset: as offset, in the noise.
# Standard deviations of ImageNet's pixels (0 to 1) along their principal components, and these components of red, green
# and blue, one per column, as published with Facebook's fb.resnet.torch.
COLOUR_SCALES = np.array([0.2175, 0.0188, 0.0045])
COLOUR_AXES = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
COLOUR_DEVIATION = 0.1


def mirrored_in_turn(samples: int, seed: int, chosen: np.ndarray, epochs: np.ndarray) -> np.ndarray:
    """Returns which images an alternating flip mirrors, bool (chosen,).

    samples: size of the training set. chosen, epochs: the number of each image in it, and the epoch that shows it.
    """
    begins = np.random.Generator(philox(seed, Purpose.FIRST_MIRRORED)).random(samples) < 0.5
    return begins[chosen] ^ (epochs % 2 == 1)


def random_numbers(augmentation: Augmentation, image_size: int, seed: int, positions: np.ndarray,
                   mirrored: np.ndarray | None = None) -> np.ndarray:
    """Returns the random numbers of the samples at these positions of the stream, float32 (positions, columns).

    mirrored: whether a flip mirrors each sample, bool (positions,). None: a function of its position.
    """
    parts = columns(augmentation, image_size, seed, positions, mirrored).values()
    return np.concatenate([part.reshape(len(positions), -1) for part in parts], axis=1).astype(np.float32)


def by_name(augmentation: Augmentation, row) -> dict:
    """Returns the columns of a row of `random_numbers` by the keys of `columns`: scalars, or vectors of several.

    Those of an operation are a list of scalars. row: a tensor of DALI's graph.
    """
    found, start = {}, 0
    for key, values in columns(augmentation, 1, 0, np.arange(1)).items():
        end = start + values.size
        found[key] = row[start] if values.ndim == 1 else row[start:end]
        if isinstance(key, Operation):
            found[key] = [row[column] for column in range(start, end)]
        start = end
    return found


def columns(augmentation: Augmentation, image_size: int, seed: int, positions: np.ndarray,
            mirrored: np.ndarray | None = None) -> dict[str | Operation, np.ndarray]:
    """Returns the columns that an augmentation needs, (positions,) or (positions, width), by name or by operation.

    mirrored: as in `random_numbers`.
    """
    u = uniforms(seed, Purpose.AUGMENTATION, positions, UNIFORMS)
    mirrored = u[:, 4] < 0.5 if mirrored is None else mirrored
    between = lambda column, low, high: low + (high - low) * u[:, column]  # noqa: E731
    found = {}
    if augmentation.area or augmentation.rescale:
        found["area"] = u[:, 0]
    if augmentation.area or augmentation.shift or augmentation.warp:
        found["offset"] = u[:, 1:3]
    if augmentation.area:
        aspect = np.exp(between(3, *np.log(augmentation.aspect)))
        found["sides"] = np.stack([aspect ** -0.5, aspect ** 0.5], axis=1)
    if augmentation.flip and not augmentation.warp:
        found["mirror"] = mirrored
    if augmentation.padding:
        found["corner"] = np.floor(u[:, 8:10] * (2 * augmentation.padding + 1)) - augmentation.padding
    if augmentation.colour:
        found["colour"] = _colours(seed, positions)
    if augmentation.warp:
        channels = 2 * uniforms(seed, Purpose.CHANNELS, positions, 8) - 1
        found |= _warp(between, mirrored, image_size) | {
            "brightness": BRIGHTNESS * channels[:, :3], "contrast": CONTRAST ** channels[:, 3:6],
            "noise": between(12, 0.0, NOISE), "noise_offset": u[:, 13:15]}
    return found | {one: one.random_numbers(image_size, seed, positions) for one in augmentation.operations}


def _colours(seed, positions) -> np.ndarray:
    """Returns random offsets of red, green and blue for pixels of 0 to 255; (positions, 3).

    The Box-Muller transform makes the normal numbers from four uniform ones.
    """
    u = uniforms(seed, Purpose.COLOUR, positions, 4)
    radius = np.sqrt(-2 * np.log1p(-u[:, :2]))
    turn = 2 * np.pi * u[:, 2:]
    normal = np.concatenate([radius * np.cos(turn), radius[:, :1] * np.sin(turn[:, :1])], axis=1)
    return 255 * COLOUR_DEVIATION * (normal * COLOUR_SCALES) @ COLOUR_AXES.T


def _warp(between, is_mirrored, image_size: int) -> dict[str, np.ndarray]:
    """Returns the columns of the geometry. between: as in `columns`."""
    angle = between(5, -ANGLE, ANGLE)
    stretch = ASPECT ** between(7, -0.5, 0.5)
    cos, sin = np.cos(angle), np.sin(angle)
    sign = np.where(is_mirrored, -1.0, 1.0)
    matrix = np.stack([sign * cos / stretch, sin / stretch, -sign * sin * stretch, cos * stretch], axis=1)
    return {"warp": matrix, "shorter": image_size * np.exp(between(6, *np.log(SIZE))),
            "reach": image_size * np.stack([stretch, 1 / stretch], axis=1)}
