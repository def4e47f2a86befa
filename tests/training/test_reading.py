"""Pipelines that span several intervals: which intervals, how many pipelines, and the same bits as one for each."""
import dataclasses
from collections import Counter
from types import SimpleNamespace
from typing import ClassVar

import horovod.tensorflow as hvd
import numpy as np
import pytest

import model_zoo
from data.augmentation import AUGMENTATIONS
from data.dataset import open_dataset
from data.feed import Feed
from distributed.exchange import GradientExchange
from distributed.world import World
from plan import flags
from plan.plan import plan_for
from tests.rigs import bn_train
from tests.rigs.plans import plan
from training import build, loop, reading
from training.observer import Observer
from training.reading import grouped
from training.state import Progress, Snapshot, State


def test_which_intervals_share_a_pipeline():
    """Epochs of 1,437 samples: those of a phase, as far as they fit."""
    made = plan(batch_size="0:64,3:96", epochs=7.0)
    intervals = list(made.intervals())
    spans = list(grouped(intervals, 10_000))
    assert [interval for span in spans for interval in span] == intervals
    assert [{id(one.phase) for one in span} for span in spans] == [{id(phase)} for phase in made.phases]
    assert [len(span) for span in grouped(intervals[:3], 3000)] == [2, 1]
    assert [len(span) for span in grouped(intervals[:3], 0)] == [1, 1, 1]  # never fewer than one
    many = list(plan(batch_size="64", epochs=40.0).intervals())
    assert [len(span) for span in grouped(many, 10**9)] == [16, 16, 8]


class Counted(Feed):
    opened: ClassVar = Counter()

    def open(self, prepared, again=False):
        self.opened["validation" if prepared.split is self.dataset.validation else "training"] += 1
        return super().open(prepared, again)


def trained(folder, *more):
    """(weights, results of the evaluations, number of pipelines opened) of a training of three epochs on a worker."""
    hvd.init()
    settings = flags.parse(["train.py", "--model=convnet", "--image_size=8", "--batch_size=192", "--epochs=3",
                            "--micro_batch_size=96", "--augmentation=crop", "--optimizer=sgd", "--learning_rate=0.02",
                            "--warmup=none", "--deterministic", *more])
    recipe = dataclasses.replace(settings.recipe, model=bn_train.NAME)
    settings = dataclasses.replace(settings, recipe=recipe)
    dataset = open_dataset(folder)
    Counted.opened = Counter()
    feed = Counted(dataset.in_order(recipe.order), 8, AUGMENTATIONS[recipe.augmentation], 0)
    model = build.make_model(recipe, dataset)
    average = build.make_average(recipe, model)
    state = State(model, build.make_optimizer(recipe, model), average=average)
    setup = build.make_setup(settings, plan_for(settings, 1, 1, dataset.train.samples), World(), feed, state,
                             GradientExchange())
    found = []
    recovery = SimpleNamespace(signals=lambda: (0.0, 0.0), is_due_after=lambda signals: False,
                               snapshot=lambda: Snapshot({}, state.progress, {"model": 0}),
                               stop_is_asked=lambda: False, after_evaluation=lambda *_, **__: None)
    observer = SimpleNamespace(step=lambda update: None, launching=Observer().launching,
                               evaluation=lambda one: found.append((one.row["val_loss"], np.stack(one.outcomes))))
    loop.follow_plan(setup, recovery, [observer])
    return [v.numpy() for v in model.variables], found, dict(Counted.opened)


@pytest.mark.trainings
@pytest.mark.parametrize(("name", "more", "pipelines"), [
    ("tfrecord", ("--batch_norm_statistics=exact", "--ema_decay=0.9"), {"training": 2, "validation": 1}),
    ("lmdb", ("--order=file",), {"training": 3, "validation": 3})])
def test_a_pipeline_for_all_epochs_gives_the_bits_of_one_for_each(in_format, name, more, pipelines, monkeypatch):
    """Exact statistics and averaged weights read the training set, too: each evaluation twice."""
    monkeypatch.setitem(model_zoo.MODELS, bn_train.NAME, bn_train.INFO)
    weights, evaluations, opened = trained(in_format(name), *more)
    # Three of training in one pipeline, all measurements in another; a format read file by file has one for each.
    assert opened == pipelines
    monkeypatch.setattr(reading, "MOST_INTERVALS", 1)
    apart, also, opened = trained(in_format(name), *more)
    assert opened["training"] >= 3 and len(evaluations) == len(also) == 3
    for ours, theirs in zip(weights, apart, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for (loss, outcomes), (other, theirs) in zip(evaluations, also, strict=True):
        assert loss == other and np.array_equal(outcomes, theirs)


def test_samples_read_before_a_step_name_a_damaged_record(in_format):
    """The pipeline of a resumed run begins at its step."""
    progress = Progress(step=7)
    made = plan(batch_size="96", epochs=3.0)
    feed = Feed(open_dataset(in_format("tfrecord")), 8, AUGMENTATIONS["none"], 0)
    setup = SimpleNamespace(plan=made, feed=feed, world=dataclasses.replace(World(), size=1),
                            state=SimpleNamespace(progress=progress))
    intervals = list(made.intervals())
    with reading.TrainingInput(setup) as training_input:
        first = training_input.batches_of(intervals[0])
        assert training_input.samples_before(9, intervals[0]) == 2 * 96
        progress.step = intervals[0].end
        assert training_input.batches_of(intervals[1]) is first
        assert training_input.samples_before(20, intervals[1]) == 13 * 96
        assert progress.reshard_step == intervals[1].first_step
