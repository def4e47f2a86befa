"""The benchmark of training steps on several workers: its rows, its table, its forecast, and its errors."""
import json

import pytest
from conftest import printed_json, run

from reporting import speed

LATENCY, BANDWIDTH = 0.002, 5e6  # seconds, bytes per second
ONE_WORKER = {8: 200.0, 16: 320.0}  # images per second of convnet


def bench(kind, workers, *flags, **options):
    return run(kind, workers, "-m", "experiments.benchmark", "--data_dir=digits", "--model=convnet", "--seconds=0.2",
               *flags, **options)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """One worker measured, then two, in the same folder; with the forecast of a made-up cluster."""
    folder = tmp_path_factory.mktemp("speed")
    link = {"latency": LATENCY, "bandwidth": BANDWIDTH}
    per_image = (16 / ONE_WORKER[16] - 8 / ONE_WORKER[8]) / 8  # the line through the two speeds
    times = {"fixed": 8 / ONE_WORKER[8] - 8 * per_image, "per_image": per_image}
    described = {"local_size": 2, "within": link, "between": link, "slowdown": 1, "overlap": 0,
                 "compute": {"resnet50": {"fixed": 0, "per_image": 1}, "convnet": times}}
    (folder / "here.json").write_text(json.dumps(described))
    flags = ("--micro_batch_size=16", f"--topology={folder}/here.json", f"--output_dir={folder}/table")
    one = bench("python", 1, *flags, "--global_batch_size=16,64")
    two = bench("mpirun", 2, *flags, "--global_batch_size=64,32", "--json")
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    return folder / "table", one, two


@pytest.mark.trainings
def test_the_rows_of_several_launches_form_one_table(table):
    folder, one, two = table
    rows = printed_json(two)["rows"]
    assert rows == json.loads((folder / "speed.json").read_text())
    assert [(row["global_batch_size"], row["workers"], row["micro_batch_size"], row["accumulation_steps"])
            for row in rows] == [(16, 1, 16, 1), (32, 2, 16, 1), (64, 1, 16, 4), (64, 2, 16, 2)]
    for row in rows:
        assert row["images_per_second"] == pytest.approx(row["global_batch_size"] / row["step_seconds"])
        assert row["compute"] + row["data"] + row["exchange"] == pytest.approx(1)
        assert min(row[part] for part in speed.PARTS) > 0
        assert (row["allreduce"], row["grid"]) == (("none", [1, 1]) if row["workers"] == 1 else ("ring", [2, 1]))
    rate = {(row["global_batch_size"], row["workers"]): row["images_per_second"] for row in rows}
    assert [row["speedup"] for row in rows] == [None, None, None, pytest.approx(rate[64, 2] / rate[64, 1])]
    assert [row["efficiency"] for row in rows] == [None, pytest.approx(rate[32, 2] / rate[16, 1] / 2), None, None]
    assert len(one.stdout.splitlines()) == 4 and "convnet on digits, 32 pixels, CPU" in one.stdout.splitlines()[0]
    page = (folder / "speed.html").read_text()
    assert "batch 64, ring, forecast" in page and "16 x 4" in page and "Where the time of a step goes" in page


@pytest.mark.trainings
def test_the_forecast_by_hand(table):
    """The line through the two given speeds, the ring of two, and the small message, which nothing hides."""
    rows = printed_json(table[2])["rows"]
    seconds = {size: size / rate for size, rate in ONE_WORKER.items()}
    per_image = (seconds[16] - seconds[8]) / 8
    compute = seconds[8] + 8 * per_image
    weights = 9 * (3 * 16 + 16 * 32 + 32 * 64) + 112 + 4 * 4 * 64 * 128 + 128 + 128 * 10 + 10
    for row in rows:
        exchange = 0.0
        if row["workers"] == 2:
            exchange = 2 * 2 * LATENCY + (4 * weights + 4 * 5) / BANDWIDTH  # two signals, loss, hits, samples
        expected = row["accumulation_steps"] * compute + exchange
        assert row["forecast_images_per_second"] == pytest.approx(row["global_batch_size"] / expected)


def row_of(workers, batch, micro, rate, **other):
    return {"data_dir": "imagenet", "device": "gpu", "model": "resnet50", "image_size": 224, "precision": "float32",
            "augmentation": "crop_flip", "compression": "none", "allreduce": "ring" if workers > 1 else "none",
            "grid": [workers, 1], "workers": workers, "workers_per_node": min(workers, 4), "global_batch_size": batch,
            "micro_batch_size": micro, "accumulation_steps": batch // workers // micro, "step_seconds": batch / rate,
            "images_per_second": rate, "compute": 0.9, "data": 0.02, "exchange": 0.08} | other


def test_the_papers_own_tables(tmp_path):
    """arXiv:1708.03888, tables 8 and 9; arXiv:1811.05233, table 6. A newer measurement replaces an older one."""
    lars = [row_of(4, 512, 128, 6627), row_of(8, 512, 64, 5771), row_of(4, 4096, 1024, 6585),
            row_of(8, 4096, 512, 15379)]
    assert [round(row["speedup"], 2) for row in speed.merged(None, lars) if row["speedup"]] == [0.87, 2.34]
    sony = [row_of(4, 128, 32, 2565), *(row_of(workers, 32 * workers, 32, rate, allreduce="torus")
                                        for workers, rate in ((1024, 556522), (4096, 1929054)))]
    assert all(row["efficiency"] is None for row in speed.merged(None, sony[1:2]))
    rows = speed.merged(None, [row | {"allreduce": "torus"} for row in sony])
    assert [row["efficiency"] and round(row["efficiency"], 4) for row in rows] == [None, 0.8475, 0.7344]
    speed.write_speed(tmp_path, speed.merged(tmp_path, sony))
    again = speed.merged(tmp_path, [row_of(4, 128, 32, 2600)])
    assert [row["images_per_second"] for row in again if row["workers"] == 4] == [2600] and len(again) == 3


def test_the_page_shows_the_ideal_and_names_the_bars(tmp_path):
    """Four workers with 1,000 images/s or 800 would be eight with 2,000."""
    rows = [row_of(4, 64, 16, 800), row_of(4, 128, 32, 1000), row_of(8, 128, 16, 1500)]
    page = speed.write_speed(tmp_path, speed.merged(None, rows)).read_text()
    assert "ideal: 2,000 (workers 8)" in page and "ideal: 0 (workers 0)" in page
    assert "workers x global batch size 8 x 128: exchange 8.0%" in page and ">forecast<" not in page


def test_other_trainings_are_not_compared():
    rows = [row_of(1, 64, 64, 100), row_of(2, 64, 32, 150, precision="mixed_float16"),
            row_of(2, 128, 64, 190, allreduce="torus"), row_of(4, 128, 32, 300), row_of(2, 64, 32, 180)]
    compared = {(row["precision"], row["allreduce"], row["workers"]): (row["speedup"], row["efficiency"])
                for row in speed.merged(None, rows)}
    assert compared == {("float32", "none", 1): (None, None), ("mixed_float16", "ring", 2): (None, None),
                        ("float32", "torus", 2): (None, 0.95), ("float32", "ring", 4): (None, pytest.approx(300 / 360)),
                        ("float32", "ring", 2): (1.8, None)}
    assert sum(line.startswith("resnet50") for line in speed.lines(speed.merged(None, rows))) == 2


@pytest.mark.parametrize(("flags", "code", "expected"), [
    (["--global_batch_size=63"], 1, "63 is not divisible by 2 workers"),
    (["--topology=nowhere"], 1, "there is no such file"),
    (["--global_batch_size=1"], 1, "nearest sizes that are: 2")])
def test_a_wrong_flag_on_two_workers_is_a_line_on_each(flags, code, expected):
    done = bench("mpirun", 2, *flags)
    lines = [line for line in done.stderr.splitlines() if "experiments.benchmark: " in line]
    assert done.returncode == code and not done.stdout
    assert lines and all(expected in line for line in lines) and "Traceback" not in done.stderr


def test_a_worker_with_one_core_computes_after_it_has_read():
    """With one thread, TensorFlow could run the whole forward and backward pass before it reads the clock."""
    pinned = ("import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
              "from experiments import benchmark; sys.exit(benchmark.main(sys.argv))")
    done = run("python", 1, "-c", pinned, "--model=convnet", "--global_batch_size=128", "--seconds=0.2", "--json")
    assert done.returncode == 0, done.stderr
    [row] = printed_json(done)["rows"]
    assert row["compute"] > 0.5 > row["data"]
