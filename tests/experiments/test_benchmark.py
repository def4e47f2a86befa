"""The benchmark: every stage measured, a verdict from the numbers, advice from both."""
import json
import shutil

import numpy as np
import pytest
from conftest import printed_json, run

from common.errors import UserError
from data import formats
from data.dataset import Split, open_dataset
from data.feed import Feed
from experiments import benchmark, stage_times
from reporting import stages as report

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


def test_a_model_that_takes_longer_than_its_input(tmp_path):
    done = bench("--data_dir=digits", "--model=convnet", "--image_size=64", "--seconds=0.2", "--json",
                 "--dali_threads=2,1,2", f"--output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    result = printed_json(done)
    assert result == json.loads((tmp_path / "benchmark.json").read_text())
    assert [row["name"] for row in result["stages"]] == [name for name in NAMES for _ in range(1 + (name != "model"))]
    assert {row["threads"] for row in result["stages"]} == {None, 1, 2} and result["threads"] == [2, 1]
    for row in result["stages"]:
        assert row.keys() == {"name", "images_per_second", "megabytes_per_second", "threads"}
        assert row["images_per_second"] > 0
        assert row["megabytes_per_second"] == pytest.approx(row["images_per_second"] * result["image_bytes"] / 1e6)
    assert result["limit"] == "device" == report.conclude(result)["limit"]
    assert row_of(result["stages"], "model")["threads"] is None
    page = (tmp_path / "benchmark.html").read_text()
    assert "<svg" in page and "device limited" in page and "whole pipeline" in page


def test_photos_that_take_longer_than_the_model(large_photos):
    done = bench(f"--data_dir={large_photos}", "--model=convnet", "--image_size=32", "--batch_size=16",
                 "--seconds=0.1")
    assert done.returncode == 0, done.stderr
    assert "host or I/O limited" in done.stdout and "--resize_shorter=37" in done.stdout
    table = [line.split("  ")[0] for line in done.stdout.split("\n\n")[0].splitlines()[1:]]
    assert table == [report.TITLES[name] for name in NAMES]


@pytest.mark.parametrize("name", formats.WRITTEN)
def test_the_parts_read_every_format(name, digits, tmp_path):
    source = open_dataset(digits).train
    kind = formats.get(name)
    path = tmp_path / f"shard{kind.SUFFIX}"
    kind.write(path, source.kind.records(source.paths[0], source.entries[0], range(64)))
    images = [image for image, _ in source.kind.records(source.paths[0], source.entries[0], range(64))]
    feed = Feed(open_dataset(digits), 32, "full", 0)
    feed = Feed(feed.dataset.__class__(**vars(feed.dataset) | {"train": Split(name, (path,), (64,))}), 32, "full", 0)
    parts = {part: stage_times.part_of_pipeline(part, feed, np.arange(64), 16) for part in stage_times.PARTS}
    assert stage_times.mean_size(parts["read"], 4) == pytest.approx(np.mean([len(image) for image in images]))
    assert [image.shape for image in map(np.array, parts["augment"].run()[0])] == [(32, 32, 3)] * 16
    assert all(shape[2] == 3 for shape in parts["decode"].run()[0].shape())
    assert stage_times.shorter_side(feed.dataset.train) == 32


@pytest.mark.parametrize("flags", [
    ["--dali_threads=0"], ["--dali_threads=1,two"], ["--batch_size=0"], ["--model=resnet51"], ["--sekonds=1"],
    ["--seconds=0"], ["--data_dir=synthetic:64"], ["--allreduce=torus"],
    ["--topology=abci"], ["--global_batch_size=64,none"], ["--dali_threads=1,2", "--global_batch_size=64"],
    ["digits"]])
def test_a_wrong_flag_is_one_line_without_tensorflow(flags):
    program = ("import sys; from experiments import benchmark; code = benchmark.main(sys.argv); "
               "sys.exit(99 if 'tensorflow' in sys.modules else code)")
    done = run("python", 1, "-c", program, *flags, cold=True)
    assert done.returncode == 2 and not done.stdout
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("experiments.benchmark: ")
    assert flags[0].strip("-").split("=")[0].replace("sekonds", "'sekonds'") in done.stderr


def test_no_dataset_there(tmp_path, capsys):
    assert benchmark.main(["experiments.benchmark", f"--data_dir={tmp_path}"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_help_is_fast_and_names_every_flag(capsys):
    assert benchmark.main(["experiments.benchmark", "--help"]) == 0
    shown = capsys.readouterr().out
    for name in (*benchmark.BORROWED, *benchmark.flags.names(benchmark.Options)):
        assert f"  --{name}: " in shown or f"  --{name} (" in shown


def test_a_damaged_image_is_named(large_photos, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(large_photos, folder)
    damaged = folder / "train" / "class" / "5.jpg"
    damaged.write_bytes(damaged.read_bytes()[:2000])
    feed = Feed(open_dataset(folder), 32, "crop_flip", 0)
    with feed.train(0, 4, 4, 4) as batches:
        parts = [stage_times.part_of_pipeline(name, feed, batches.samples, 4).run for name in ("decode", "augment")]
        for batch in (*parts, batches.__next__):
            stage = stage_times.Stage("pipeline", 2, batch, batches)
            with pytest.raises(UserError, match=r"^pipeline: ") as raised, stage_times.errors_in_one_line(stage, 4):
                stage.turn(4, 1.0)
            assert str(damaged) in str(raised.value) and "\n" not in str(raised.value)


def result_of(*rates, threads=2, **other):
    """A result whose six stages have these rates."""
    rows = [{"name": name, "images_per_second": float(rate), "megabytes_per_second": rate / 10,
             "threads": None if name == "model" else threads} for name, rate in zip(NAMES, rates, strict=True)]
    return {"stages": rows, "threads": [threads], "cores": 2, "gpu": False, "dali_device": "cpu", "format": "tfrecord",
            "image_size": 224, "shorter_side": 375, "precision": "mixed_bfloat16"} | other


@pytest.mark.parametrize(("result", "limit", "expected", "unexpected"), [
    (result_of(90_000, 2000, 1500, 1400, 5000, 1300), "input",
     ["Decoding takes", "--resize_shorter=256", "this machine has none"], ["--stage_dir", "threads help"]),
    (result_of(90_000, 2000, 1500, 1400, 5000, 1300, gpu=True), "input", ["--dali_device=gpu"], ["has none"]),
    (result_of(90_000, 2000, 1500, 1400, 5000, 1300, gpu=True, dali_device="gpu"), "input", ["--hw_decoder_load"],
     ["--dali_device=gpu"]),
    (result_of(90_000, 2000, 1500, 1400, 5000, 1300, shorter_side=256), "input", ["Decoding"], ["--resize_shorter"]),
    (result_of(500, 490, 480, 470, 5000, 460), "input", ["Reading files", "--stage_dir"], ["tfrecord"]),
    (result_of(500, 490, 480, 470, 5000, 460, format="folder"), "input", ["--format=tfrecord"], []),
    (result_of(90_000, 9000, 1500, 1400, 5000, 1300), "input", ["Augmentation takes", "--augmentation"], []),
    (result_of(90_000, 9000, 8500, 1400, 5000, 1300), "input", ["batches to TensorFlow", "--batch_size"], []),
    (result_of(90_000, 2000, 1500, 1400, 5000, 1300, cores=16), "input", ["--dali_threads=2,16"], []),
    (result_of(90_000, 2000, 1500, 1400, 300, 290), "device", ["97%", "fast enough"], ["--precision"]),
    (result_of(90_000, 2000, 1500, 1400, 300, 290, precision="float32"), "device", ["mixed_bfloat16"], []),
    (result_of(90_000, 2000, 1500, 1400, 700, 470), "device", ["share the CPU cores", "--resize_shorter"], []),
    (result_of(90_000, 2000, 1500, 1400, 700, 470, gpu=True), "device", ["larger --batch_size"], ["share the"]),
])
def test_the_advice_follows_from_the_numbers(result, limit, expected, unexpected):
    concluded = report.conclude(result)
    advice = " ".join(concluded["advice"])
    assert concluded["limit"] == limit
    assert all(words in advice for words in expected) and not any(words in advice for words in unexpected)
    assert report.VERDICTS[limit] in "\n".join(report.lines(result | concluded))


def test_more_threads_are_advised_where_they_helped():
    one, four = (result_of(90_000, *rates, threads=threads) for threads, rates in (
        (1, (1000, 800, 700, 5000, 650)), (4, (3000, 2600, 2400, 5000, 2300))))
    result = one | {"stages": one["stages"] + [row for row in four["stages"] if row["threads"]], "cores": 8}
    advice = report.conclude(result)["advice"][0]
    assert "2,400 images/s with --dali_threads=4, 700 with 1; try more than 4" in advice
    assert report.best(result["stages"])["read"] == 90_000 and report.best(result["stages"])["pipeline"] == 2400


def test_a_stage_s_turn_leaves_out_what_lay_ready():
    calls = []
    stage = stage_times.Stage("read", 1, lambda: calls.append(len(calls)), ahead=3)
    stage.turn(batch_size=8, seconds=0.01)
    assert stage.done == len(calls) > 4 and stage.rates[0] > 0
