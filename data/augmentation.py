"""How training images are varied: augmentations by name, and the random numbers of each sample.

The numbers are a function of the seed and of the sample's place in the endless stream (order.py): the same on any
number of workers, and wherever a pipeline is opened. NumPy only; pipeline.py does with images what they say.
"""
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Augmentation:
    """What part of an image is read, and what happens to it.

    area, aspect: ranges of the crop's area, as a fraction of the image, and of its width / height (arXiv:1409.4842,
        section 6). Without an area, the crop is a square with the shorter side / `enlarge`.
    enlarge: validation takes the central square of the shorter side divided by this: "resize to 256, crop 224".
    rescale: training divides the shorter side by a number drawn from this range instead.
    shift: training takes the square at a random place.
    flip: mirror every second image.
    colour: add a colour, the same to every pixel, along the principal components of ImageNet's (Krizhevsky et al. 2012,
        section 4.1).
    warp: turn, slant and shrink by a little, over a grey border; then vary brightness and contrast, and add noise.
    """

    area: tuple[float, float] | None = None
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    enlarge: float = 1.0
    rescale: tuple[float, float] | None = None
    shift: bool = False
    flip: bool = False
    colour: bool = False
    warp: bool = False

    @property
    def random(self) -> bool:
        return bool(self.area or self.shift or self.flip or self.warp)


AUGMENTATIONS = {
    # resize, centre crop
    "none": Augmentation(),
    # mild random-resized crop without flips, for digits and letters
    "crop": Augmentation(area=(0.7, 1.0), aspect=(0.85, 1.18)),
    # GoogLeNet's: random-resized crop and flip; validation resizes to 256/224, centre crop
    "crop_flip": Augmentation(area=(0.08, 1.0), flip=True, enlarge=256 / 224),
    # ResNet's (arXiv:1512.03385, 3.4): resize to 256/224 to 480/224, random crop, flip, colour
    "resnet": Augmentation(rescale=(256 / 224, 480 / 224), shift=True, flip=True, colour=True, enlarge=256 / 224),
    # Caffe's for 224 pixels: resize to 256/224, random crop, flip
    "caffe": Augmentation(enlarge=256 / 224, shift=True, flip=True),
    # AlexNet's: resize to 256/227, random crop, flip
    "alexnet": Augmentation(enlarge=256 / 227, shift=True, flip=True),
    # arXiv:1811.05233, 3.2: padding, scaling, rotation, resizing, distortion, flip, brightness, contrast, noise
    "full": Augmentation(area=(0.08, 1.0), flip=True, warp=True, enlarge=256 / 224),
}
UNIFORMS = 16  # random numbers a sample, a multiple of four: Philox makes four at a time
COLUMNS = {  # of the numbers that the pipeline reads
    "area": 1, "place": 2,  # both within 0 to 1: how large between the limits; how far down and to the right
    "sides": 2,  # height and width of a part of area 1
    "mirror": 1, "colour": 3, "warp": 6, "brightness": 1, "contrast": 1, "noise": 1, "noise_place": 2,
}
# Of ImageNet's pixels, 0 to 1: the standard deviations along the principal components of red, green and blue, and
# these, a column each, as published with Facebook's fb.resnet.torch.
COLOUR_SCALES = np.array([0.2175, 0.0188, 0.0045])
COLOUR_AXES = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])
COLOUR_DEVIATION = 0.1


def draw(recipe: Augmentation, image_size: int, seed: int, position: int, places: np.ndarray) -> np.ndarray:
    """The numbers of the samples at these places after a position of the stream, float32 (places, columns).

    warp: the two rows of the matrix that takes a pixel of the result to its place in the image, (x, y, 1).
    """
    bits = np.random.Philox(key=np.random.SeedSequence([seed, 1]).generate_state(2, np.uint64))
    u = np.random.Generator(bits.advance(position * UNIFORMS // 4)).random((places.max() + 1, UNIFORMS))[places]
    between = lambda column, low, high: low + (high - low) * u[:, column]  # noqa: E731
    aspect = np.exp(between(3, *np.log(recipe.aspect)))
    columns = {
        "area": u[:, 0], "place": u[:, 1:3], "sides": np.stack([aspect ** -0.5, aspect ** 0.5], axis=1),
        "mirror": u[:, 4] < 0.5,
        "colour": _colours(seed, position, places) if recipe.colour else np.zeros((len(places), 3)),
        "warp": _warp(between(5, *np.deg2rad([-10.0, 10.0])), [between(6, -0.1, 0.1), between(7, -0.1, 0.1)],
                      [between(8, 0.9, 1.1), between(9, 0.9, 1.1)], image_size / 2
                      ) if recipe.warp else np.zeros((len(places), 6)),
        "brightness": between(10, 0.8, 1.2), "contrast": between(11, 0.8, 1.2), "noise": between(12, 0.0, 8.0),
        "noise_place": u[:, 13:15],
    }
    return np.concatenate([columns[name].reshape(len(places), width) for name, width in COLUMNS.items()],
                          axis=1).astype(np.float32)


def _colours(seed, position, places) -> np.ndarray:
    """What is added to red, green and blue, 0 to 255; (places, 3). Normal numbers by Box and Muller, from four others.
    """
    bits = np.random.Philox(key=np.random.SeedSequence([seed, 2]).generate_state(2, np.uint64)).advance(position)
    u = np.random.Generator(bits).random((places.max() + 1, 4))[places]
    radius, turn = np.sqrt(-2 * np.log1p(-u[:, :2])), 2 * np.pi * u[:, 2:]
    normal = np.concatenate([radius * np.cos(turn), radius[:, :1] * np.sin(turn[:, :1])], axis=1)
    return 255 * COLOUR_DEVIATION * (normal * COLOUR_SCALES) @ COLOUR_AXES.T


def _warp(angle, shear, scale, centre) -> np.ndarray:
    """Rotation, then shear, then scale, about the centre, inverted; (count, 2, 3)."""
    one, zero = np.ones_like(angle), np.zeros_like(angle)
    rotate = _matrix([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    forward = _matrix([[scale[0], zero], [zero, scale[1]]]) @ _matrix([[one, shear[0]], [shear[1], one]]) @ rotate
    inverse = np.linalg.inv(forward)
    return np.concatenate([inverse, centre - inverse @ np.full((len(angle), 2, 1), centre)], axis=2)


def _matrix(rows) -> np.ndarray:
    return np.moveaxis(np.array(rows), -1, 0)
