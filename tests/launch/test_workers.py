"""--workers_schedule: the number of workers changes where a phase of the recipe starts."""
import json
import os
import subprocess

import pytest
from conftest import DIGITS, ROOT, run, scripts_environment, train

from common.errors import UsageError, UserError
from launch.job import workers_now
from plan.flags import parse
from plan.plan import plan_for
from tests.rigs.trainings import differences

SONY = ROOT / "recipes" / "sony_1811.05233"
PHASES = (DIGITS, "--model=convnet", "--image_size=16", "--batch_size=0:96,1:192,2:96", "--epochs=3", "--warmup=none",
          "--learning_rate=1", "--micro_batch_size=16", "--deterministic")


@pytest.mark.parametrize(("row", "schedule", "workers", "images"), [
    ("reference", "0:1024", [1024], [32]), ("experiment1", "0:2176", [2176, 2176], [16, 32]),
    ("experiment2", "0:3456,30:1728", [3456, 1728], [16, 32]),
    ("experiment3", "0:3456,30:2048", [3456, 2048], [16, 32])])
def test_the_plans_of_the_paper_on_its_numbers_of_workers(row, schedule, workers, images):
    """Table 3: 16 images a worker, then 32 on as many workers as their total says."""
    settings = parse(["train.py", f"--flagfile={SONY}/table3-{row}.flags", f"--workers_schedule={schedule}"])
    plan = plan_for(settings, workers[0], 4, 1_281_167)
    found = plan.as_json()["phases"]
    assert [phase["workers"] for phase in found] == workers
    assert [phase["global_batch_size"] // phase["workers"] for phase in found] == images


def test_what_the_paper_prints_of_experiment_4_cannot_be():
    """68K samples at 16 a worker are 4,352 workers, of at most 4,096, on which it would be 17."""
    for most, images in ((4352, 16), (4096, 17)):
        settings = parse(["train.py", f"--flagfile={SONY}/table3-experiment4.flags",
                          f"--workers_schedule=0:2176,30:{most},45:2720,75:3808"])
        plan = plan_for(settings, 2176, 4, 1_281_167)
        assert [phase.global_batch_size // phase.workers for phase in plan.phases] == [16, images, 32, 32]


def test_workers_change_where_a_phase_starts():
    words = ["train.py", "--batch_size=0:64,30:128", "--epochs=90"]
    with pytest.raises(UserError, match="can change where a phase of the recipe starts: 0, 30"):
        plan_for(parse([*words, "--workers_schedule=0:2,40:4"]), 2, 2, 1437)
    with pytest.raises(UsageError, match="--elastic finds out"):
        os.environ["HOROVOD_ELASTIC"] = "1"
        try:
            parse([*words, "--workers_schedule=0:2", "--elastic"])
        finally:
            del os.environ["HOROVOD_ELASTIC"]
    assert workers_now(parse(words), 5) == 5
    for more, message in (([], "needs an --output_dir"), (["--output_dir=x"], "needs 4 workers, but 3 are available")):
        with pytest.raises(UserError, match=message):
            workers_now(parse([*words, "--workers_schedule=0:2,30:4", *more]), 3)


@pytest.mark.launchers
def test_two_workers_then_one_then_two_train_what_one_does(tmp_path):
    """To the bit, with a launcher that continues by itself."""
    train(*PHASES, f"--output_dir={tmp_path / 'alone'}")
    (tmp_path / "recipe.flags").write_text("\n".join(PHASES) + "\n")
    folder = tmp_path / "changing"
    done = subprocess.run(
        [ROOT / "launch" / "horovodrun.sh", "-np", "2", "--no-preflight", tmp_path / "recipe.flags",
         "--workers_schedule=0:2,1:1,2:2", f"--output_dir={folder}"], env=scripts_environment(), cwd=ROOT, text=True,
        capture_output=True, stdin=subprocess.DEVNULL, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    for line in ("after step 14 of 35 needs 1 worker", "on 1 worker instead of 2",
                 "after step 21 of 35 needs 2 workers", "on 2 workers instead of 1"):
        assert line in done.stderr
    assert differences(tmp_path / "alone", folder) == []
    assert "next_workers" not in json.loads((folder / "run.json").read_text())


def test_a_training_that_starts_on_another_number_says_so(tmp_path):
    done = run("python", 1, ROOT / "train.py", *PHASES, "--workers_schedule=0:2,1:1", f"--output_dir={tmp_path}")
    assert done.returncode == 1 and "training starts on 2 workers, not on 1" in done.stderr
