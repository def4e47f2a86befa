"""Sums in one order on any number of workers, so that rounding gives the same bits (--deterministic).

The terms, one of each micro-batch, are the leaves of a tree over the global batch. Its levels have the prime factors of
their number as branches, 2 last: of 12 terms, threes are added, then pairs of these sums, then both halves. A worker's
consecutive micro-batches are a subtree if the factors of their number are the first ones. The worker then adds them by
itself, with one partial sum in memory for each level, and the workers add the results of the subtrees in the order of
the upper levels.
"""
from collections.abc import Callable, Sequence


def branches(terms: int) -> tuple[int, ...]:
    """Returns the number of branches at each level of the tree over a number of terms, from the leaves on."""
    factors, factor = [], 2
    while terms > 1:
        if terms % factor:
            factor += 1
        else:
            factors.append(factor)
            terms //= factor
    return tuple(sorted(factors, key=lambda one: (one == 2, one)))


def is_subtree(terms: int, workers: int) -> bool:
    """Whether each worker's part of the terms is a subtree, if all have the same number of them."""
    return terms % workers == 0 and branches(terms // workers) + branches(workers) == branches(terms)


def total(parts: Sequence):
    """Adds the workers' sums in the order of the tree."""
    leaves = ([part] for part in parts)
    return summed(lambda: next(leaves), branches(len(parts)))[0]


def path(leaf: int, levels: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Returns (levels whose partial sums are added to a leaf, level that keeps the result as its partial sum).

    Leaves come in their order. The last one has the total, which no level keeps: the second value is len(levels).
    """
    added = []
    for level, count in enumerate(levels):
        leaf, branch = divmod(leaf, count)
        if branch:
            added.append(level)
        if branch < count - 1:
            return tuple(added), level
    return tuple(added), len(levels)


def summed(leaf: Callable[[], list], levels: Sequence[int]) -> list:
    """Calls `leaf` for one list of terms after another, in their order, and returns their sums."""
    if not levels:
        return leaf()
    *lower, count = levels
    sums = summed(leaf, lower)
    for _ in range(count - 1):
        sums = [a + b for a, b in zip(sums, summed(leaf, lower), strict=True)]
    return sums
