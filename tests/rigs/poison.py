"""An observer in whose training one sample of the stream makes the weights explode, each time that it is read.

The environment's POISONED_SAMPLES name their positions.
"""
import dataclasses
import os

from training import loop

POISONED = [int(position) for position in os.environ["POISONED_SAMPLES"].split(",")]
next_step = loop.next_step


def poisoned(setup, interval, first):
    step = next_step(setup, interval, first)
    if any(step.position <= position < step.position + step.batch_size for position in POISONED):
        return dataclasses.replace(step, learning_rate=1e30)
    return step


class Poison:
    def start(self, run):
        loop.next_step = poisoned
