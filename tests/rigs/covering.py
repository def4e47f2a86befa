"""Covering arrays: few combinations in which each pair of values of two factors occurs at least once."""
import itertools
import random
from collections.abc import Callable, Mapping, Sequence

TRIES = 40  # rows that are made, of which the one with the most new pairs is kept


def pairs(row: Mapping) -> set[frozenset]:
    """Each pair of (factor, value) of a row."""
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def possible_pairs(factors: Mapping[str, Sequence], is_possible: Callable[[dict], bool]) -> set[frozenset]:
    return {frozenset(row.items()) for one, other in itertools.combinations(factors, 2)
            for row in ({one: a, other: b} for a in factors[one] for b in factors[other]) if is_possible(row)}


def covering_array(factors: Mapping[str, Sequence], is_possible: Callable[[dict], bool], seed: int = 0) -> list[dict]:
    """Rows, each with a value of every factor, in which every possible pair occurs. The same seed gives the same rows.

    factors: name -> values. is_possible: whether a row, or a part of one, can occur. Greedy, as in AETG (Cohen et al.,
    "The AETG system", 1997): each row starts from a pair that is not covered yet, and takes, in a random order of the
    factors, the values that cover the most.
    """
    rng, rows, left = random.Random(seed), [], possible_pairs(factors, is_possible)
    order = sorted(left, key=lambda pair: sorted(map(repr, pair)))
    while left:
        open_pairs = [pair for pair in order if pair in left]
        made = [_filled(dict(rng.choice(open_pairs)), factors, is_possible, left, rng) for _ in range(TRIES)]
        best = max(filter(None, made), key=lambda row: len(pairs(row) & left))
        rows.append({name: best[name] for name in factors})
        left -= pairs(best)
    return rows


def _filled(row, factors, is_possible, left, rng):
    """The row with a value of every factor, or None if there is none that is possible."""
    for name in rng.sample([*factors], len(factors)):
        values = [value for value in factors[name] if is_possible(row | {name: value})]
        if name in row:
            continue
        if not values:
            return None
        rng.shuffle(values)
        row[name] = max(values, key=lambda value, name=name: sum(
            frozenset([(name, value), chosen]) in left for chosen in row.items()))
    return row
