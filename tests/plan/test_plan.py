"""The plan's arithmetic, against an independent walk through the samples."""
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data import order
from data.dataset import Split
from optim.lars import SGD
from plan.flags import parse
from plan.plan import divisors, plan_for
from plan.summary import summary
from tests.rigs.plans import plan
from training.loop import next_step


def test_by_hand():
    made = plan(batch_size="1024", workers=2, micro_batch_size=128)
    phase, = made.phases
    assert (phase.micro_batch_size, phase.accumulation_steps, phase.steps) == (128, 4, 16)  # 12 * 1437 / 1024 = 16.8
    assert made.as_json()["schedule"][6] == {
        "epoch": 6, "learning_rate": 1.25, "momentum": 0.9, "global_batch_size": 1024}
    assert len(made.as_json()["schedule"]) == 12 and plan(model="resnet50").as_json()["model"] == "resnet50"


def test_two_phases_of_imagenet():
    made = plan(batch_size="0:34816,30:69632", epochs=90.0, workers=256, samples=1281167,
                momentum_schedule="noise_scale")
    assert [phase.steps for phase in made.phases] == [1103, 1103]  # 38,435,010 / 34,816 and 76,870,020 / 69,632
    assert [made.rates(epoch)["momentum"] for epoch in (29, 30)] == pytest.approx([0.89375, 0.7875])
    starts = [interval.start for interval in made.intervals() if interval.phase is made.phases[1]]
    assert starts[0] == 30 * 1281167


@pytest.mark.parametrize(("words", "workers", "says"), [
    ([], 1, ["workers:       1, with 128 images per update", "1 worker x micro-batch 64 x 2, 134 updates"]),
    ([], 2, ["workers:       2, each with 64 images per update", "2 workers x micro-batch 64 x 1, 134 updates"]),
    (["--workers=1024", "--batch_size=65536", "--dry_run"], 1024, [
        "workers:       1,024, each with 64 images per update", "1,024 workers x micro-batch 64 x 1, 1 update"]),
    (["--epochs=1"], 1, ["training:      1 epoch, 11 updates with lars", "1 worker x micro-batch 64 x 2, 11 updates"])])
def test_a_plan_in_words(words, workers, says):
    """A cluster's forecast is for a plan with --workers."""
    asked = parse(["train.py", *words])
    lines = summary(asked, plan_for(asked, workers, 4, 1437))
    assert sum(says[0] == line or line.endswith(says[1]) for line in lines) == 2, lines
    assert any("launch.scaling` forecasts a cluster's" in line for line in lines) == ("--dry_run" in words)


def test_fractions_of_an_epoch_are_exact():
    assert plan(epochs=0.3, samples=10, batch_size="1").steps == 3
    assert [phase.steps for phase in plan(epochs=0.9, samples=10, batch_size="0:1,0.3:1,0.6:1").phases] == [3, 3, 3]


def test_a_batch_of_two_billion_is_planned_at_once():
    """In a second a loop over all numbers up to a worker's part would not be through a twentieth of them."""
    phase, = plan(batch_size=str(2**31 - 2**10), batch_norm_span="64").phases
    assert (phase.micro_batch_size, phase.global_batch_size) == (64, 2**31 - 2**10)
    with pytest.raises(UserError, match="on 1 worker; the nearest possible spans: 2 and 4"):
        plan(batch_size=str(2**31 - 2**10), batch_norm_span="3")


@pytest.mark.parametrize("number", [1, 2, 12, 97, 128, 1437, 34816])
def test_divisors(number):
    assert divisors(number) == [size for size in range(1, number + 1) if number % size == 0]


def test_the_last_evaluation_is_of_the_last_epoch_however_short():
    assert [one.epoch for one in plan(epochs=2.5, samples=100, batch_size="10").intervals()] == [1, 2, 2.5]
    assert [one.epoch for one in plan(epochs=0.08).intervals()] == [0.08]


@pytest.mark.parametrize(("flags", "message"), [
    (dict(warmup="gradual", warmup_epochs=2.0, warmup_learning_rate=0.5, learning_rate="0.05"), "would lower"),
    (dict(batch_size="128", workers=3), "126 and 129"),
    (dict(batch_size="100", workers=1, micro_batch_size=64), "64 and 128"),
    (dict(batch_size="2", workers=4), "are: 4"),
    (dict(batch_size="400000", momentum_schedule="noise_scale"), "gives no positive momentum"),
])
def test_what_cannot_be_planned(flags, message):
    with pytest.raises(UserError, match=message):
        plan(**flags)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 8), st.lists(st.integers(1, 700), min_size=1, max_size=3),
       st.integers(1, 6), st.data())
def test_intervals_walk_through_the_samples(samples, workers, units, epochs_a_phase, data):
    """Each phase has floor of what fits, at least 1; an evaluation comes when, and only when, an epoch is done."""
    epochs = epochs_a_phase * len(units)
    starts = [epochs_a_phase * number for number in range(len(units))]
    batch_sizes = [unit * workers for unit in units]
    text = ",".join(f"{start}:{size}" for start, size in zip(starts, batch_sizes, strict=True))
    made = plan(workers, samples, batch_size=text, epochs=float(epochs))

    expected, done = [], 0  # (position after the step, epoch evaluated)
    for number, (start, size) in enumerate(zip(starts, batch_sizes, strict=True)):
        steps = max(1, epochs_a_phase * samples // size)
        for step in range(steps):
            position = start * samples + (step + 1) * size
            last = number == len(starts) - 1 and step == steps - 1
            reached = epochs if last else min(position // samples, epochs)
            if reached > done or last:
                expected.append((position, reached))
                done = reached
    walked = [(interval.start + interval.steps * interval.phase.global_batch_size, interval.epoch)
              for interval in made.intervals() if interval.epoch is not None]
    assert walked == expected
    assert sum(interval.steps for interval in made.intervals()) == made.steps
    for phase in made.phases:
        assert workers * phase.micro_batch_size * phase.accumulation_steps == phase.global_batch_size
        assert phase.micro_batch_size <= 64


def steps_of(made) -> list:
    """What the training loop gives each step."""
    setup = SimpleNamespace(plan=made, state=SimpleNamespace(progress=SimpleNamespace(step=0, skipped=0)),
                            settings=SimpleNamespace(run=SimpleNamespace(timeline=None)))
    steps = []
    for interval in made.intervals():
        for setup.state.progress.step in range(interval.first_step, interval.end):
            steps.append(next_step(setup, interval, 0))
    return steps


def pairs(epochs, values) -> str:
    return ",".join(f"{epoch}:{value}" for epoch, value in zip(epochs, values, strict=True))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_batch_size_and_learning_rate_change_at_the_same_step(workers):
    """At epoch 0.29 of 100 and of 90 samples, between samples 26 and 27."""
    for samples in (100, 90):
        made = plan(workers, samples, batch_size="0:12,0.29:24", learning_rate="0:1,0.29:2", lr_schedule="constant",
                    epochs=1.0)
        assert [(step.batch_size, step.learning_rate) for step in steps_of(made)] == [(12, 1.0)] * 2 + [(24, 2.0)] * 2


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 400), st.integers(1, 4),
       st.lists(st.one_of(st.integers(1, 299).map(lambda hundredths: hundredths / 100), st.floats(1e-3, 2.99)),
                min_size=1, max_size=3, unique=True).map(sorted),
       st.permutations([1, 2, 5, 9]), st.sampled_from(["pairs", "multistep", "warm-up"]), st.booleans())
def test_schedules_that_name_the_same_epoch_change_at_the_same_step(samples, workers, boundaries, units, kind, elastic):
    starts = [0, *boundaries]
    sizes = [unit * workers for unit in units[:len(starts)]]
    rates = {"pairs": [1.0, 3.0, 2.0, 4.0], "multistep": [1.0, 0.1, 0.1 ** 2, 0.1 ** 3],
             "warm-up": [0.5, 1.0, 1.0, 1.0]}[kind][:len(starts)]
    schedule = {"pairs": dict(learning_rate=pairs(starts, rates), lr_schedule="constant"),
                "multistep": dict(learning_rate="1", lr_schedule="multistep", lr_boundaries=list(map(str, boundaries))),
                "warm-up": dict(learning_rate="1", lr_schedule="constant", warmup="constant",
                                warmup_epochs=boundaries[0], warmup_learning_rate=0.5)}[kind]
    made = plan(workers, samples, elastic=elastic, epochs=3.0, batch_size=pairs(starts, sizes),
                image_size=pairs(starts, range(16, 16 + len(starts))), **schedule)
    expected = dict(zip(sizes, rates, strict=True))
    for step in steps_of(made):
        assert step.learning_rate == pytest.approx(expected[step.batch_size], rel=1e-9)
    for row in made.as_json()["schedule"]:
        assert row["learning_rate"] == pytest.approx(expected[row["global_batch_size"]], rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(1, 2000))
def test_the_number_of_workers_changes_neither_batches_nor_rates(workers, samples):
    single, shared = plan(1, samples, batch_size="96").as_json(), plan(workers, samples, batch_size="96").as_json()
    assert single["schedule"] == shared["schedule"] and single["steps"] == shared["steps"]


def test_image_sizes_cut_phases():
    """By hand: 1,437 samples an epoch in batches of 128; batch and size change at different epochs."""
    made = plan(image_size="0:16,2:24,5:32", batch_size="0:128,4:256", epochs=6.0)
    assert [(phase.start_epoch, phase.end_epoch, phase.image_size, phase.steps) for phase in made.phases] == [
        (0, 2, 16, 22), (2, 4, 24, 22), (4, 5, 24, 5), (5, 6, 32, 5)]  # 2,874 / 128 = 22.5 and 1,437 / 256 = 5.6
    assert [phase["image_size"] for phase in made.as_json()["phases"]] == [16, 24, 24, 32]
    starts = {phase: min(one.start for one in made.intervals() if one.phase is phase) for phase in made.phases}
    assert [*starts.values()] == [0, 2874, 4 * 1437, 5 * 1437]


@pytest.mark.parametrize("flag", ["mixup", "cutmix"])
def test_pairs_need_an_even_micro_batch(flag):
    assert plan(batch_size="90", **{flag: 0.2}).phases[0].micro_batch_size == 30  # not 45
    with pytest.raises(UserError, match="45 is odd"):
        plan(batch_size="90", micro_batch_size=45, **{flag: 0.2})
    with pytest.raises(UserError, match=r"by 6 workers x 2, for .*; the nearest sizes that are: 84 and 96"):
        plan(batch_size="90", workers=6, **{flag: 0.2})


def test_elastic_workers_that_do_not_divide_the_batch_share_its_micro_batches():
    """28 of the 32 workers of arXiv:1811.05233 with one node lost: 544 micro-batches of 64, 19 or 20 each."""
    whole, = plan(32, 1281167, batch_size="34816", elastic=True).phases
    made = plan(28, 1281167, batch_size="34816", elastic=True)
    phase, = made.phases
    assert (whole.micro_batch_size, whole.accumulation_steps, len(whole.micro_batches_of(5, 32))) == (64, 17, 17)
    assert (phase.micro_batch_size, phase.accumulation_steps, phase.steps) == (64, 20, whole.steps)
    own = [len(phase.micro_batches_of(rank, 28)) for rank in range(28)]
    assert set(own) == {19, 20} and sum(own) == 34816 // 64
    assert [interval.start for interval in made.intervals()] == [
        interval.start for interval in plan(32, 1281167, batch_size="34816").intervals()]
    assert plan(3, batch_size="128", micro_batch_size=32, elastic=True).phases[0].accumulation_steps == 2
    with pytest.raises(UserError, match="128 is not divisible by 5 workers x --micro_batch_size=32"):
        plan(5, batch_size="128", micro_batch_size=32, elastic=True)  # only four have something to do
    with pytest.raises(UserError, match="128 is not divisible by 3 workers; the nearest sizes that are: 126 and 129"):
        plan(3, batch_size="128")  # elastic training alone


def test_elastic_workers_share_micro_batches_rather_than_a_span():
    """144 images on 6 workers are 24 each, which no span of 16 divides, but nine micro-batches of 16."""
    phase, = plan(6, batch_size="144", batch_norm_span="16", elastic=True).phases
    assert (phase.micro_batch_size, phase.neighbours) == (16, 1)
    assert sorted(len(phase.micro_batches_of(rank, 6)) for rank in range(6)) == [1, 1, 1, 2, 2, 2]
    shared, = plan(6, batch_size="144", batch_norm_span="16").phases
    assert (shared.micro_batch_size, shared.neighbours) == (8, 2)
    even, = plan(6, batch_size="192", batch_norm_span="16", elastic=True).phases
    assert (even.micro_batch_size, even.accumulation_steps) == (32, 1)


@pytest.mark.parametrize("shards", [1, 3, 5, 7, 12])
@pytest.mark.parametrize("any_order", [True, False])
def test_uneven_workers_read_each_sample_once(shards, any_order):
    split = Split("tfrecord" if any_order else "recordio", (Path("a"),), (5000,))
    found = [order.worker_positions(split, 4, 96, shard, shards, micro_batch_size=8) for shard in range(shards)]
    assert sorted(np.concatenate(found).tolist()) == list(range(4 * 96))
    assert {len(one) for one in found} <= {4 * 8 * (12 // shards), 4 * 8 * (12 // shards + 1)}
    if any_order:  # each step reads the samples of its global batch
        for one in found:
            assert (one.reshape(4, -1) // 96 == np.arange(4)[:, None]).all()


@pytest.mark.parametrize("every", [1, 2, 3, 5])
def test_evaluations_follow_whole_multiples_of_their_epochs_and_the_end(every):
    made = plan(batch_size="96", epochs=7.0, evaluate_every=every)
    intervals, once = list(made.intervals()), list(plan(batch_size="96", epochs=7.0).intervals())
    assert [one.epoch for one in intervals] == [*range(every, 7, every), 7]
    ends = {one.epoch: one.end for one in once}
    assert [one.end for one in intervals] == [ends[one.epoch] for one in intervals]  # where they would be anyway
    assert [one.evaluations for one in intervals] == list(range(1, len(intervals) + 1))


def test_momentum_correction_is_the_rate_outside_the_buffer():
    """w <- w - rate * u, u <- momentum * u + g, as in Goyal et al., over a warm-up, a drop and two phases."""
    plain, corrected = (plan(
        epochs=6.0, batch_size="0:64,4:128", learning_rate="0.5", warmup="gradual", warmup_epochs=2.0,
        warmup_learning_rate=0.1, lr_schedule="multistep", lr_boundaries=[3.0], momentum_correction=chosen)
        for chosen in (False, True))
    assert {plain.step_momentum(step) for step in range(plain.steps)} == {0.9}
    random, optimizer = np.random.default_rng(0), SGD(0.0)
    weight, expected, outside = tf.Variable([1.0, -2.0]), np.array([1.0, -2.0]), np.zeros(2)
    for step in range(corrected.steps):
        rate, gradient = corrected.learning_rate(corrected.epoch_of(step)), random.normal(size=2)
        optimizer.learning_rate.assign(rate)
        optimizer.momentum.assign(corrected.step_momentum(step))
        optimizer.apply_gradients([(tf.constant(gradient, tf.float32), weight)])
        outside = 0.9 * outside + gradient
        expected = expected - rate * outside
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-4)
    from_zero = plan(warmup="gradual", warmup_epochs=2.0, momentum_correction=True)
    assert from_zero.step_momentum(0) == from_zero.step_momentum(1) == 0.9  # the rate before is 0


def test_a_decay_may_end_at_a_rate():
    """MLPerf's reference: (29 - 0.0001) (1 - t)^2 + 0.0001, after the warm-up."""
    made = plan(learning_rate="29", end_learning_rate=1e-4, warmup="gradual", warmup_epochs=2.0, epochs=12.0,
                decay_from="warmup_end")
    for epoch in (2, 5, 11.5, 12):
        assert made.learning_rate(epoch) == pytest.approx(1e-4 + (29 - 1e-4) * (1 - (epoch - 2) / 10) ** 2, rel=1e-12)
    assert made.learning_rate(1) == pytest.approx(14.5)


@pytest.mark.parametrize(("workers", "per_node", "flags", "shared"), [
    (4, 4, "", True), (2, 4, "", True), (8, 4, "", False),
    (1, 1, "--share_orthogonalization", False), (4, 4, "--xla", False),
    (8, 4, "--share_orthogonalization", True), (4, 4, "--share_orthogonalization=false", False)])
def test_workers_of_one_node_share_the_orthogonalization(workers, per_node, flags, shared):
    words = ["train.py", "--data_dir=digits", "--optimizer=muon", *flags.split()]
    assert plan_for(parse(words), workers, per_node, 1437).as_json()["shares_orthogonalization"] == shared
    on_others = shared if "--" in flags else workers > 1  # whose processors differ
    assert plan_for(parse(words), workers, per_node, 1437, None, False).shares_orthogonalization == on_others
    others = parse(["train.py", "--data_dir=digits", "--optimizer=lars", "--batch_size=128"])
    assert not plan_for(others, 4, 4, 1437).shares_orthogonalization


def test_xla_cannot_contain_the_exchange_of_the_update():
    words = ["train.py", "--data_dir=digits", "--optimizer=muon", "--xla", "--share_orthogonalization"]
    with pytest.raises(UserError, match="not with --xla=true"):
        plan_for(parse(words), 4, 4, 1437)
