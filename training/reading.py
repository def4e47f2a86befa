"""The input of the training. One pipeline serves several intervals of the plan; a thread prepares the next one."""
import contextlib
import functools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from common.activity import startup
from data.feed import OpenPipeline
from plan.plan import Interval
from training.build import Setup

# Limits of the intervals that share a pipeline. Preparing and opening one takes about 3 s per million samples.
MOST_SAMPLES = 1 << 20  # of one worker
MOST_INTERVALS = 16


class TrainingInput(contextlib.AbstractContextManager):
    """Context manager for the pipeline that reads the training set.

    A thread prepares the next pipeline ahead. It is opened when the one before it is closed, so that a GPU holds the
    memory of one decoder.
    """

    def __init__(self, setup: Setup):
        self._setup = setup
        largest = MOST_SAMPLES * setup.world.size if setup.feed.dataset.train.any_order else 0
        own = (interval for interval in setup.plan.intervals() if interval.phase.workers == setup.world.size)
        self._groups = list(grouped(own, largest))
        self._pipeline = OpenPipeline()
        self._first = 0  # step at which the pipeline was opened
        self._thread = ThreadPoolExecutor(1, "input")
        self._ahead = {}  # what is prepared of later groups, by number

    def __exit__(self, *_):
        self._pipeline.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def batches_of(self, interval: Interval):
        """Returns the batches, of which those that are left of this interval come next. Opens a pipeline if needed."""
        self._setup.state.progress.begin_slice(interval.first_step)
        number = next(number for number, group in enumerate(self._groups) if interval.first_step < group[-1].end)
        wanted = [other.first_step for other in self._groups[number] if other.first_step >= interval.first_step]
        return self._pipeline.open_for(wanted, functools.partial(self._opening, number))

    @contextlib.contextmanager
    def _opening(self, number: int):
        with contextlib.ExitStack() as held:
            with startup.stage("opening the input"):
                prepared = self._ahead.pop(number).result() if number in self._ahead else self._prepare(number)
                batches = held.enter_context(self._setup.feed.open(prepared))
            self._first = self._setup.state.progress.step
            if number + 1 < len(self._groups):
                self._ahead[number + 1] = self._thread.submit(self._prepare, number + 1, True)
            yield batches

    def samples_before(self, step: int, interval: Interval) -> int:
        """Returns the number of samples that this worker has read from the pipeline before a step of the interval."""
        phase, world = interval.phase, self._setup.world
        return (step - self._first) * len(phase.micro_batches_of(world.rank, world.size)) * phase.micro_batch_size

    def _prepare(self, number: int, is_ahead: bool = False):
        """Returns what the pipeline of a group reads: all of it if it is prepared ahead, otherwise what is left."""
        group, progress = self._groups[number], self._setup.state.progress
        phase = group[0].phase
        start = step = group[0].first_step
        if not is_ahead:
            start = max(start, progress.reshard_step)
            step = progress.step
        return self._setup.feed.prepare(
            [(group[0].position(start) + progress.skipped, group[-1].end - start)], phase.global_batch_size,
            phase.micro_batch_size, step - start, phase.neighbours, phase.image_size)


def grouped(intervals: Iterable[Interval], samples: int) -> Iterator[list[Interval]]:
    """Groups consecutive intervals of a phase. A group of several has at most MOST_INTERVALS of them, and `samples`."""
    group, total = [], 0
    for interval in intervals:
        size = interval.steps * interval.phase.global_batch_size
        if group and (interval.phase is not group[0].phase or len(group) == MOST_INTERVALS or total + size > samples):
            yield group
            group, total = [], 0
        group.append(interval)
        total += size
    if group:
        yield group
