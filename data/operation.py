"""A random change of the images at the end of an augmentation. Each kind is one class, and nothing else knows it."""
import abc

import numpy as np


class Operation(abc.ABC):
    """A random operation. Make it a frozen dataclass, whose fields are its settings."""

    @abc.abstractmethod
    def random_numbers(self, image_size: int, seed: int, positions: np.ndarray) -> np.ndarray:
        """Returns what `applied` needs for the samples at these positions of the stream, (positions, columns).

        The numbers are a function of the seed and of each position, as those of data.randomness.uniforms, which takes
        the name of the operation as a purpose. image_size: of the result, in pixels.
        """

    @abc.abstractmethod
    def applied(self, images, numbers: list, transform):
        """Adds the operation to the graph of a DALI pipeline with conditionals; returns uint8 images (HWC).

        numbers: a scalar of the graph for each column. transform: data.pipeline.Transform.
        """
