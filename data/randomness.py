"""Random numbers of a training: functions of its seed, what they are for, and an epoch or a position (order.py)."""
import enum
import zlib

import numpy as np

PERIOD = 2**256  # of Philox's counter; each value of the counter gives four numbers


class Purpose(enum.IntEnum):
    """What random numbers are for. Those of two purposes are independent.

    Dropout masks have keys of their own, in another generator (model_zoo.layers).
    """

    ORDER = 0  # of an epoch's samples
    GROUPS = 1  # of blocks
    BLOCKS = 2
    AUGMENTATION = 3
    COLOUR = 4
    CHANNELS = 5
    MIXING = 6
    OPERATIONS = 7  # of RandAugment
    FIRST_MIRRORED = 8  # which images an alternating flip mirrors in epoch 0


def philox(seed: int, purpose: Purpose | str, epoch: int = 0) -> np.random.Philox:
    """Returns the generator of a purpose, at its first number.

    purpose: or the name of one that is not in Purpose. epoch: 0 for numbers that depend on the position.
    """
    if isinstance(purpose, str):
        purpose = 2**32 + zlib.crc32(purpose.encode())  # above those of Purpose
    return np.random.Philox(np.random.SeedSequence([seed, epoch, purpose]))


def uniforms(seed: int, purpose: Purpose | str, positions: np.ndarray, count: int) -> np.ndarray:
    """Returns uniform random numbers in [0, 1) for the samples at these positions of the stream; (positions, count).

    The generator skips the numbers of all other samples, which other workers need. purpose: as in `philox`. count: a
    multiple of four.
    """
    bits = philox(seed, purpose)
    random = np.random.Generator(bits)
    numbers = np.empty((len(positions), count))
    counter = 0
    firsts = np.flatnonzero(np.diff(positions, prepend=positions[:1] - 2) != 1)
    for first, end in zip(firsts, [*firsts[1:], len(positions)], strict=True):
        wanted = int(positions[first]) * count // 4
        bits.advance((wanted - counter) % PERIOD)
        random.random(out=numbers[first:end])
        counter = wanted + int(end - first) * count // 4
    return numbers
