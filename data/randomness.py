"""Random numbers of samples: functions of the seed and of the sample's position in the endless stream (order.py)."""
import numpy as np

PERIOD = 2**256  # of Philox's counter; each value of the counter gives four numbers


def uniforms(seed: int, purpose: int, start: int, positions: np.ndarray, count: int) -> np.ndarray:
    """Returns the numbers of the samples at `start + positions` of the stream, in [0, 1); (positions, count).

    purpose: distinguishes the uses of a seed. count: a multiple of four. Only the numbers of these samples are
    generated, because another worker needs the others.
    """
    key = np.random.SeedSequence([seed, purpose]).generate_state(2, np.uint64)
    bits, counter = np.random.Philox(key=key), 0
    random, found = np.random.Generator(bits), np.empty((len(positions), count))
    firsts = np.flatnonzero(np.diff(positions, prepend=positions[:1] - 2) != 1)
    for first, end in zip(firsts, [*firsts[1:], len(positions)], strict=True):
        wanted = (start + int(positions[first])) * count // 4
        bits.advance((wanted - counter) % PERIOD)
        random.random(out=found[first:end])
        counter = wanted + int(end - first) * count // 4
    return found
