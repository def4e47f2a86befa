"""Averaged weights, mixup, CutMix and images that grow, in whole trainings: on one worker and on two, and evaluated."""
import csv
import json
import shutil

import numpy as np
import pytest
from conftest import DIGITS, ROOT, printed_json, rows, run, train, weights

from experiments.trainings import Result
from reporting.run_data import RunData
from tests.rigs.bn_train import PROGRAM
from training.checkpoints import write
from training.restoring import intact

pytestmark = pytest.mark.trainings

MIXED = (DIGITS, "--epochs=3", "--batch_size=96", "--optimizer=sgd", "--learning_rate=0.1", "--warmup=none",
         "--ema_decay=0.9", "--mixup=0.4", "--cutmix=1", "--micro_batch_size=16")
GROWING = (*MIXED, "--model=bn_convnet", "--image_size=0:16,1:20,2:24", "--batch_norm_statistics=exact",
           "--checkpoint_every=0.4")


@pytest.fixture(scope="module")
def alone(train_once):
    return train_once(*GROWING, program=PROGRAM)


def test_the_phases_share_the_weights(alone):
    plan = json.loads((alone / "plan.json").read_text())
    assert [phase["image_size"] for phase in plan["phases"]] == [16, 20, 24]
    losses = [row["train_loss"] for row in rows(alone)]
    assert losses[2] < losses[0]


def test_the_average_is_evaluated_with_its_own_statistics(alone, tmp_path):
    """Its batch norm's statistics were measured under it, and are in the checkpoint: an evaluation finds them again."""
    summary, last = json.loads((alone / "summary.json").read_text()), rows(alone)[-1]
    variables = weights(alone)
    moving = [name for name in variables if name.startswith("ema/") and "moving_mean" in name]
    assert len(moving) == 3
    assert all((variables[name] != variables[name.replace("ema/", "model/")]).any() for name in moving)
    again = printed_json(train("--mode=evaluate", f"--checkpoint={alone}/checkpoints", "--evaluation_views=6",
                               program=PROGRAM))
    assert again["views_val_top1"] > 0.1 and again["ema_views_val_loss"] not in (
        again["views_val_loss"], again["ema_val_loss"]) and "views_val_top1" not in summary
    for name in ("val_loss", "val_top1", "ema_val_loss", "ema_val_top1", "ema_val_top5"):
        assert again[name] == pytest.approx(summary[name], rel=1e-5) == pytest.approx(last[name], rel=1e-5)
    assert summary["ema_val_samples"] == 360 and summary["ema_val_loss"] != summary["val_loss"]


@pytest.fixture(scope="module")
def stale(alone, tmp_path_factory):
    """That run with one more checkpoint, which was saved between two evaluations: it lacks statistics of its weights.

    Otherwise it is the last one, so that an evaluation has to find what the last one's found.
    """
    folder = tmp_path_factory.mktemp("stale")
    shutil.copytree(alone, folder, symlinks=True, dirs_exist_ok=True)
    _, tensors, described = next(intact(folder))
    tensors = {name: value * 0 + 3 if "moving" in name else value for name, value in tensors.items()}
    described["progress"]["statistics_step"] = None
    write(folder / "checkpoints" / "step-00009999", tensors, described)
    return folder


@pytest.mark.parametrize("workers", [1, 2])
def test_statistics_of_other_weights_are_measured_again(stale, alone, workers):
    done = train("--mode=evaluate", f"--checkpoint={stale}/checkpoints", kind="mpirun", workers=workers,
                 program=PROGRAM)
    assert done.stderr.count("batch norm's statistics are measured again") == 1
    again, last = printed_json(done), rows(alone)[-1]
    for name in ("val_loss", "ema_val_loss"):  # batch norm's groups are the micro-batches of 16 on any workers
        assert again[name] == pytest.approx(last[name], rel=1e-4)


def test_statistics_of_other_weights_are_not_exported(stale, alone, tmp_path):
    """The newest checkpoint with its own is; without one, the error says why."""
    done = train("--mode=export", f"--checkpoint={stale}/checkpoints", f"--output_dir={tmp_path}", program=PROGRAM)
    assert "batch norm's statistics in" in done.stderr and "step-00009999 are not those of its weights" in done.stderr
    assert printed_json(done)["epoch"] == 3
    for mode in ("export", "predict"):
        words = [f"--output_dir={tmp_path}"] if mode == "export" else [f"--image={ROOT}/docs/report.png"]
        done = run("python", 1, PROGRAM, f"--mode={mode}", *words,
                   f"--checkpoint={stale}/checkpoints/step-00009999")
        assert done.returncode == 1 and "saved before one" in done.stderr and "Traceback" not in done.stderr


def test_a_checkpoint_says_of_which_step_its_statistics_are(alone):
    """Those of an evaluation: after steps 15, 29 and 42. Phases of 14 steps end before their epoch is full."""
    steps = {described["progress"]["step"]: described["progress"]["statistics_step"]
             for _, _, described in intact(alone)}
    assert 42 in steps and {*steps} - {15, 29, 42}
    for step, measured in steps.items():
        assert measured == max((one for one in (15, 29, 42) if one <= step), default=None)


def test_the_best_is_the_best_average(alone):
    """Everywhere: summary, report, the link to the checkpoint, and a sweep's row."""
    summary, found = json.loads((alone / "summary.json").read_text()), rows(alone)
    best = max(found, key=lambda row: row["ema_val_top1"])
    assert (summary["best_top1"], summary["best_epoch"]) == (best["ema_val_top1"], best["epoch"])
    assert summary["best_top1"] != max(row["val_top1"] for row in found)
    confusion = json.loads((alone / "outcomes.json").read_text())["confusion"]
    right = sum(count for label, predicted, count in confusion if label == predicted)
    assert right == round(summary["best_top1"] * summary["val_samples"]) != summary["val_top1_count"]
    with (alone / "classes.csv").open(newline="") as file:
        by_class = list(csv.DictReader(file))
    assert sum(int(row["correct"]) for row in by_class) == right
    assert summary["best_balanced_top1"] == pytest.approx(np.mean([float(row["recall"]) for row in by_class]))
    data, result = RunData.read(alone), Result.read(alone)
    assert data.best == {"top1": best["ema_val_top1"], "epoch": best["epoch"]}
    (alone / "summary.json").rename(alone / "away")
    assert RunData.read(alone).best == data.best
    (alone / "away").rename(alone / "summary.json")
    assert (result.val_top1, result.ema_val_top1) == (found[-1]["val_top1"], found[-1]["ema_val_top1"])
    assert (result.best_top1, result.best_epoch) == (best["ema_val_top1"], best["epoch"])


def test_the_average_reaches_the_target(tmp_path):
    """It lags behind the weights, which pass the target before."""
    done = train("--model=convnet", "--warmup=none", "--epochs=12", "--optimizer=sgd", "--learning_rate=0.05",
                 "--ema_decay=0.98", "--target_top1=0.6", "--stop_at_target", f"--output_dir={tmp_path}")
    summary, found = printed_json(done), rows(tmp_path)
    assert found[-1]["ema_val_top1"] >= 0.6 and all(row["ema_val_top1"] < 0.6 for row in found[:-1])
    assert found[-2]["val_top1"] >= 0.6
    assert (summary["epochs_to_target"], summary["best_epoch"]) == (found[-1]["epoch"],) * 2
    assert (summary["seconds_to_target"], summary["best_top1"]) == (found[-1]["seconds"], found[-1]["ema_val_top1"])


@pytest.mark.parametrize(("flags", "code", "message"), [
    (["--model=alexnet", "--image_size=0:128,2:224"], 2, "dense layers of alexnet need one image size"),
    (["--model=keras:MobileNetV2", "--image_size=17"], 2, "MobileNetV2 needs images of at least 32 pixels, not 17"),
    (["--model=alexnet", "--image_size=66"], 2, "at least 67 pixels, not 66; raise --image_size"),
    (["--mixup=0.2", "--micro_batch_size=1"], 1, "1 is odd"),
    (["--ema_decay=1.5"], 2, "--ema_decay"),
    (["--loss=binary_cross_entropy", "--label_smoothing=0.5"], 2, "takes targets above 0.2 as 1"),
    (["--image_size=0:16,3:0"], 2, "--image_size"),
    (["--freeze", "--batch_norm_statistics=exact"], 2, "--freeze keeps batch norm's statistics"),
])
def test_refused(flags, code, message):
    done = run("python", 1, ROOT / "train.py", DIGITS, "--dry_run", *flags)
    assert done.returncode == code and message in done.stderr and "Traceback" not in done.stderr


def test_validation_at_another_size(tmp_path):
    flags = (DIGITS, "--model=resnet20", "--image_size=16", "--validation_size=24", "--epochs=1")
    folder = tmp_path / "run"
    train(*flags, f"--output_dir={folder}")
    evaluated = printed_json(train("--mode=evaluate", f"--checkpoint={folder}/checkpoints"))
    assert evaluated["val_loss"] == rows(folder)[0]["val_loss"]
    train(*flags[:3], "--epochs=1", f"--output_dir={tmp_path / 'same'}")
    same, = rows(tmp_path / "same")
    assert same["train_loss"] == pytest.approx(rows(folder)[0]["train_loss"], rel=1e-6)
    assert same["val_loss"] != pytest.approx(evaluated["val_loss"], rel=1e-3)
