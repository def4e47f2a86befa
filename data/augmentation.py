"""How training images are varied: augmentations by name, and the random numbers of each sample.

The numbers are a function of the seed and of the sample's place in the endless stream (order.py): the same on any
number of workers, and wherever a pipeline is opened. NumPy only; pipeline.py does with images what they say.
"""
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Augmentation:
    """What part of an image is read, and what happens to it.

    area, aspect: the part's ranges of area, of the image's, and of width over height, as arXiv:1409.4842 (section 6)
        has them; without an area, the part is a square, of the shorter side divided by `enlarge`.
    enlarge: validation takes the central square of the shorter side divided by this: "resize to 256, crop 224".
    shift: training takes the square at a random place.
    flip: mirror every second image.
    warp: turn, slant and shrink by a little, over a grey border; then vary brightness and contrast, and add noise.
    """

    area: tuple[float, float] | None = None
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    enlarge: float = 1.0
    shift: bool = False
    flip: bool = False
    warp: bool = False

    @property
    def random(self) -> bool:
        return bool(self.area or self.shift or self.flip or self.warp)


AUGMENTATIONS = {
    # resize, centre crop
    "none": Augmentation(),
    # mild random-resized crop without flips, for digits and letters
    "crop": Augmentation(area=(0.7, 1.0), aspect=(0.85, 1.18)),
    # ResNet's: random-resized crop and flip; validation resizes to 256/224, centre crop
    "crop_flip": Augmentation(area=(0.08, 1.0), flip=True, enlarge=256 / 224),
    # AlexNet's: resize to 256/227, random crop, flip
    "alexnet": Augmentation(enlarge=256 / 227, shift=True, flip=True),
    # arXiv:1811.05233, 3.2: padding, scaling, rotation, resizing, distortion, flip, brightness, contrast, noise
    "full": Augmentation(area=(0.08, 1.0), flip=True, warp=True, enlarge=256 / 224),
}
UNIFORMS = 16  # random numbers a sample, a multiple of four: Philox makes four at a time
COLUMNS = {  # of the numbers that the pipeline reads
    "area": 1, "place": 2,  # both within 0 to 1: how large between the limits; how far down and to the right
    "sides": 2,  # height and width of a part of area 1
    "mirror": 1, "warp": 6, "brightness": 1, "contrast": 1, "noise": 1, "noise_place": 2,
}


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
        "warp": _warp(between(5, *np.deg2rad([-10.0, 10.0])), [between(6, -0.1, 0.1), between(7, -0.1, 0.1)],
                      [between(8, 0.9, 1.1), between(9, 0.9, 1.1)], image_size / 2
                      ) if recipe.warp else np.zeros((len(places), 6)),
        "brightness": between(10, 0.8, 1.2), "contrast": between(11, 0.8, 1.2), "noise": between(12, 0.0, 8.0),
        "noise_place": u[:, 13:15],
    }
    return np.concatenate([columns[name].reshape(len(places), width) for name, width in COLUMNS.items()],
                          axis=1).astype(np.float32)


def _warp(angle, shear, scale, centre) -> np.ndarray:
    """Rotation, then shear, then scale, about the centre, inverted; (count, 2, 3)."""
    one, zero = np.ones_like(angle), np.zeros_like(angle)
    rotate = _matrix([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    forward = _matrix([[scale[0], zero], [zero, scale[1]]]) @ _matrix([[one, shear[0]], [shear[1], one]]) @ rotate
    inverse = np.linalg.inv(forward)
    return np.concatenate([inverse, centre - inverse @ np.full((len(angle), 2, 1), centre)], axis=2)


def _matrix(rows) -> np.ndarray:
    return np.moveaxis(np.array(rows), -1, 0)
