"""The benchmark of one worker: every stage measured, and the line that names the limit."""
import json
import re
import shutil
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import printed_json, run

from common.errors import UserError
from data import formats
from data.augmentation import AUGMENTATIONS
from data.dataset import Split, open_dataset
from data.feed import Feed
from data.pipeline import STAGES
from experiments import benchmark, measure
from experiments.measure import Measured
from reporting import speed

NAMES = ["read", "decode", "augment", "pipeline", "model", "train"]


def bench(*flags):
    return run("python", 1, "-m", "experiments.benchmark", *flags)


def row_of(stages, name):
    return next(row for row in stages if row["name"] == name)


@pytest.fixture(scope="module")
def large_photos(tmp_path_factory):
    """Images of 768 x 768 pixels, which take longer to decode than a small network to train on."""
    from PIL import Image

    folder, random = tmp_path_factory.mktemp("large photos"), np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 2)):
        for number in range(count):
            file = folder / split / "class" / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            noise = Image.fromarray(random.integers(0, 256, (96, 96, 3), np.uint8))
            noise.resize((768, 768), Image.Resampling.BICUBIC).save(file, quality=90)
    return folder


@pytest.mark.trainings
def test_a_model_that_takes_longer_than_its_input(tmp_path):
    done = bench("--data_dir=digits", "--model=convnet", "--image_size=64", "--seconds=0.2", "--json",
                 "--dali_threads=2,1,2", f"--output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    result = printed_json(done)
    assert result == json.loads((tmp_path / "benchmark.json").read_text())
    assert [row["name"] for row in result["stages"]] == [name for name in NAMES for _ in range(1 + (name != "model"))]
    assert {row["threads"] for row in result["stages"]} == {None, 1, 2}
    for row in result["stages"]:
        assert row.keys() == {"name", "images_per_second", "megabytes_per_second", "threads"}
        assert row["images_per_second"] > 0
        assert row["megabytes_per_second"] == pytest.approx(row["images_per_second"] * result["image_bytes"] / 1e6)
    assert result["limit"] == "device" == speed.limit(result["stages"], "cpu")["limit"]
    assert row_of(result["stages"], "model")["threads"] is None
    page = (tmp_path / "benchmark.html").read_text()
    assert '<dl class="bars">' in page and "device limited" in page and "whole pipeline" in page


@pytest.mark.trainings
def test_photos_that_take_longer_than_the_model(large_photos):
    done = bench(f"--data_dir={large_photos}", "--model=convnet", "--image_size=32", "--micro_batch_size=16",
                 "--seconds=0.1")
    assert done.returncode == 0, done.stderr
    assert "\n\nhost or I/O limited: " in done.stdout
    table = [line.split("  ")[0] for line in done.stdout.split("\n\n")[0].splitlines()[1:]]
    assert table == [speed.STAGES[name] for name in NAMES]


@pytest.mark.parametrize("name", formats.WRITTEN)
def test_the_parts_of_the_pipeline_read_every_format(name, digits, tmp_path):
    source = open_dataset(digits).train
    kind = formats.get(name)
    path = tmp_path / f"shard{kind.SUFFIX}"
    kind.write(path, source.kind.records(source.paths[0], source.entries[0], range(64)))
    images = [image for image, _ in source.kind.records(source.paths[0], source.entries[0], range(64))]
    dataset = open_dataset(digits)
    dataset = dataset.__class__(**vars(dataset) | {"train": Split(name, (path,), (64,))})
    feed, calls = Feed(dataset, 32, AUGMENTATIONS["nnabla"], 0), {}
    prepared = feed.prepare([(0, 4)], 16, 16)
    with ExitStack() as held:
        for part in STAGES:
            opened = held.enter_context(feed.pipeline(prepared, until=part, again=True))
            calls[part] = measure.stage_call(*opened, prepared.batch_size)
        read = Measured("read", calls["read"], None, 16, 16)
        assert measure.mean_size(read, 4) == pytest.approx(np.mean([len(image) for image in images]))
        decoded, ready = (np.array(calls[part]()[0].at(0)) for part in ("decode", "augment"))
    assert decoded.shape[2] == 3 and ready.shape == (32, 32, 3)
    with feed.open(prepared) as batches:
        assert (next(batches)[0][0].numpy() == ready).all()


WRONG = [
    ["--dali_threads=0"], ["--dali_threads=1,two"], ["--micro_batch_size=0"], ["--model=resnet51"], ["--sekonds=1"],
    ["--seconds=0"], ["--data_dir=synthetic:64"], ["--allreduce=torus"],
    ["--topology=abci"], ["--global_batch_size=64,none"], ["--dali_threads=1,2", "--global_batch_size=64"],
    ["digits"]]


def test_a_wrong_flag_is_one_line_without_tensorflow():
    program = (f"import sys\nfrom experiments import benchmark\nfor flags in {WRONG}:\n"
               "    print(benchmark.main(['experiments.benchmark', *flags]), 'tensorflow' in sys.modules)")
    done = run("python", 1, "-c", program, cold=True)
    assert done.stdout.splitlines() == ["2 False"] * len(WRONG)
    for flags, line in zip(WRONG, done.stderr.splitlines(), strict=True):
        assert line.startswith("experiments.benchmark: ")
        assert flags[0].strip("-").split("=")[0].replace("sekonds", "'sekonds'") in line


def test_no_dataset_there(tmp_path, capsys):
    assert benchmark.main(["experiments.benchmark", f"--data_dir={tmp_path}"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_help_is_fast_and_names_every_flag(capsys):
    assert benchmark.main(["experiments.benchmark", "--help"]) == 0
    shown = capsys.readouterr().out
    for name in (*benchmark.BORROWED, *benchmark.flags.names(benchmark.Options)):
        assert f"  --{name}: " in shown or f"  --{name} (" in shown


def test_the_old_name_of_a_flag_leads_to_the_new_one(capsys):
    assert benchmark.main(["experiments.benchmark", "--batch_size=64"]) == 2
    assert "did you mean --micro_batch_size?" in capsys.readouterr().err


def test_a_damaged_image_is_named(large_photos, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(large_photos, folder)
    damaged = folder / "train" / "class" / "5.jpg"
    damaged.write_bytes(damaged.read_bytes()[:2000])
    feed = Feed(open_dataset(folder), 32, AUGMENTATIONS["crop_flip"], 0)
    prepared = feed.prepare([(0, 4)], 4, 4)
    with feed.open(prepared) as batches:
        calls = [batches.__next__]
        for part in ("decode", "augment"):
            with feed.pipeline(prepared, until=part) as (pipeline, _):
                pipeline.build()
            calls.append(pipeline.run)
        for call in calls:
            with pytest.raises(UserError, match=r"^a stage: ") as raised:
                Measured("a stage", call, batches, images=4, own_images=4).run(8)
            assert str(damaged) in str(raised.value) and "\n" not in str(raised.value)


def stages_of(*rates, threads=2):
    """Rows of six stages with these rates."""
    return [{"name": name, "images_per_second": float(rate), "threads": None if name == "model" else threads}
            for name, rate in zip(NAMES, rates, strict=True)]


@pytest.mark.parametrize(("rates", "limit", "because"), [
    ((90_000, 2000, 1500, 1400, 5000, 1300), "input", "decoding takes 68%.*--resize_shorter=256"),
    ((500, 490, 480, 470, 5000, 460), "input", "file reading takes 94%.*--stage_dir"),
    ((90_000, 9000, 1500, 1400, 5000, 1300), "input", "augmentation takes 78%.*--dali_device=gpu"),
    ((90_000, 9000, 8500, 1400, 5000, 1300), "input", "passing batches to TensorFlow takes 84%.*--micro_batch_size"),
    ((90_000, 2000, 1500, 1400, 300, 290), "device", "97% of the speed of the model alone.*--xla"),
    ((90_000, 2000, 1500, 1400, 700, 470), "device", "2.0 times the images.*a cheaper --augmentation"),
])
def test_the_limit_follows_from_the_numbers(rates, limit, because):
    found = speed.limit(stages_of(*rates), "cpu")
    assert found["limit"] == limit and re.search(because, found["because"])


def test_the_limit_is_that_of_the_number_of_threads_that_trains_fastest():
    one, four = stages_of(1000, 100, 90, 80, 300, 70, threads=1), stages_of(3000, 2600, 2400, 2300, 300, 290, threads=4)
    assert speed.limit(one, "cpu")["limit"] == "input"
    assert speed.limit(one + [row for row in four if row["threads"]], "cpu")["limit"] == "device"


class Clock:
    """Time that passes only in calls: so many seconds each, after some that cost nothing because they are ready."""

    def __init__(self, ready):
        self.now, self.ready, self.calls = 0.0, ready, 0

    def call(self):
        self.calls += 1
        self.now += 1e-9 if self.calls <= self.ready else 0.5

    def perf_counter(self):
        return self.now


def test_what_was_prefetched_is_not_measured(monkeypatch):
    clock = Clock(ready=4)
    monkeypatch.setattr(measure, "time", clock)
    stage = Measured("read", clock.call, None, images=8, own_images=8, ahead=4)
    stage.warm_up(seconds=2.0, world=SimpleNamespace(broadcast=lambda value, name: value))
    assert stage.calls == 4
    clock.calls = 0  # the queue fills again while other stages have their turns
    stage.turn()
    assert stage.rates == pytest.approx([16.0]) and clock.calls == 8
