"""A training that was stopped and goes on is one that never was: real processes, killed and started again."""
import json
import os
import shutil
import signal
import socket
from pathlib import Path
from unittest import mock

import pytest
from conftest import DIGITS, ROOT, rows, run, start, train, trainers, warm_python

from benchmarks.faults import KINDS, TRAINING, campaign
from tests.rigs.bn_train import PROGRAM
from tests.rigs.trainings import differences, newest_step, wait_for

CASES = {  # workers, flags, the step to wait for: in the middle of an interval between evaluations
    "accumulation, batch and images that grow, exact statistics, averaged weights, mixup and CutMix": (
        1, ["--model=bn_convnet", "--image_size=0:12,1:16", "--ema_decay=0.9", "--mixup=0.4", "--cutmix=1",
            "--batch_size=0:64,1:128", "--micro_batch_size=32", "--epochs=2",
            "--batch_norm_statistics=exact",
            "--checkpoint_every=0.3", "--augmentation=crop"], 13),
    "two workers, float16, files read one after another, mixup": (
        2, [DIGITS, "--model=convnet", "--precision=mixed_float16", "--data_dir={recordio}", "--order=file",
            "--mixup=0.4", "--batch_size=96", "--epochs=1", "--image_size=16", "--log_trust_ratios", "--optimizer=lars",
            "--checkpoint_every=0.2"], 8),
}


def stopped(folder, workers, flags, step, how=signal.SIGUSR1, worker=-1):
    """Starts a training, sends a worker the signal once a checkpoint of the step or a later one is there, waits.

    Returns the exit code. Training waits until then.
    """
    sent = Path(f"{folder}.sent")
    with mock.patch.dict(os.environ, HOLD=f"{step}:{sent}"):
        launcher = start(folder, workers, flags, PROGRAM)
    wait_for(lambda: newest_step(folder) >= step, launcher)
    trainers(launcher)[worker].send_signal(how)
    sent.touch()
    return launcher.wait(300)


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=[pytest.mark.trainings] * (number > 0)) for number, case in enumerate(CASES)])
def test_stopped_and_resumed_is_the_same_to_the_bit(case, in_format, tmp_path):
    workers, flags, step = CASES[case]
    flags = [flag.format(recordio=in_format("recordio")) for flag in ["--deterministic", *flags]]
    assert start(tmp_path / "undisturbed", workers, flags, PROGRAM).wait(300) == 0
    folder = tmp_path / "stopped"
    assert stopped(folder, workers, flags, step) == 75
    reached = newest_step(folder)
    assert start(folder, workers, flags, PROGRAM).wait(300) == 0
    assert step <= reached < newest_step(folder)
    assert differences(tmp_path / "undisturbed", folder) == []
    log = (tmp_path / "stopped.log").read_text()
    assert f"stopped on request after step {reached} of" in log and f"resumed after step {reached} of" in log
    if "--log_trust_ratios" in flags:
        ours, theirs = ((tmp_path / name / "trust_ratios.jsonl").read_text() for name in ("undisturbed", "stopped"))
        assert ours == theirs


@pytest.mark.trainings
def test_patience_ends_all_workers_and_a_resume_counts_on(tmp_path):
    """At this rate all evaluations are equal, so that the first is the best. Two were made when training stopped."""
    flags = ("--model=convnet", "--epochs=12", "--optimizer=sgd", "--learning_rate=1e-9", "--lr_schedule=poly",
             "--warmup=none", "--patience=3", "--checkpoint_every=0.3")
    assert stopped(tmp_path / "run", 2, flags, step=25) == 75
    assert len(rows(tmp_path / "run")) == 2
    assert start(tmp_path / "run", 2, flags, PROGRAM).wait(300) == 0
    assert [row["epoch"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["epochs"], summary["best_epoch"]) == (4, 1)
    said = "no evaluation since epoch 1 was better (--patience=3), so training ends at epoch 4 of 12; the learning rate"
    assert (tmp_path / "run.log").read_text().count(said) == 1


@pytest.mark.trainings
def test_a_short_campaign_of_kills(tmp_path):
    """The first five kinds of faults once, on two workers, with LAMB."""
    flags = ("--model=convnet", "--optimizer=lamb", "--learning_rate=0.01", "--warmup=none", "--ema_decay=0.95",
             *TRAINING[1:])
    faults, differing = campaign(tmp_path, faults=5, workers=2, seed=1, flags=flags, python=warm_python(),
                                 kinds=KINDS[:5])
    assert [fault.kind.name for fault in faults if not fault.survived] == []
    assert len({fault.kind for fault in faults}) == 5 and differing == []


FLAGS = ("--model=convnet", "--epochs=4", "--optimizer=sgd", "--learning_rate=0.02", "--warmup=none",
         "--checkpoint_every=0.3")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """On two workers."""
    folder = tmp_path_factory.mktemp("undisturbed")
    train(*FLAGS, f"--output_dir={folder}", kind="mpirun", workers=2)
    return folder


@pytest.mark.trainings
def test_a_training_that_is_done_is_evaluated_again(undisturbed):
    before = json.loads((undisturbed / "summary.json").read_text())
    train(*FLAGS, f"--output_dir={undisturbed}")
    after = json.loads((undisturbed / "summary.json").read_text())
    for name in ("val_top1", "val_loss", "epochs", "val_samples"):
        assert after[name] == pytest.approx(before[name], rel=1e-5)
    assert [row["epoch"] for row in rows(undisturbed)] == [1, 2, 3, 4]


@pytest.mark.trainings
def test_torn_logs_are_named_and_the_run_goes_on(undisturbed, tmp_path):
    folder = shutil.copytree(undisturbed, tmp_path / "run", symlinks=True)
    before = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text("")
    (folder / "metrics.jsonl").unlink()
    (folder / "steps.jsonl").write_bytes(bytes((folder / "steps.jsonl").stat().st_size))
    (folder / "times.jsonl").write_bytes((folder / "times.jsonl").read_bytes()[:-9])
    done = train(*FLAGS, f"--output_dir={folder}")
    after = json.loads((folder / "summary.json").read_text())
    assert (after["best_top1"], after["best_epoch"]) == (before["best_top1"], before["best_epoch"])
    warnings = [line for line in done.stderr.splitlines() if "warning: " in line]
    for line, words in zip(warnings, ("summary.json is damaged", "times.jsonl: line 4 is damaged",
                                      "steps.jsonl: line 1 is damaged", "lacks 4 of the 4 evaluations"), strict=True):
        assert words in line
    assert len(rows(folder, "times.jsonl")) == 3


@pytest.mark.trainings
def test_never_starts_anew(undisturbed, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "run", symlinks=True)
    done = train(*FLAGS, "--epochs=1", "--resume=never", f"--output_dir={tmp_path}/run")
    assert "resumed" not in done.stderr and len(rows(tmp_path / "run")) == 1
    assert newest_step(tmp_path / "run") == 11


@pytest.mark.trainings
@pytest.mark.parametrize(("flags", "message"), [
    (["--momentum=0.8"], "momentum was 0.9 and is now 0.8"),
    (["--epochs=5"], "epochs was 4 and is now 5; a training that starts from its weights is: uv run train.py "),
    (["--model=resnet20"], "model was convnet and is now resnet20"),
    ([DIGITS, "--data_dir=synthetic:96"], "train_samples was 1437 and is now 96"),
])
def test_a_checkpoint_of_another_training_is_refused(undisturbed, flags, message):
    done = run("python", 1, ROOT / "train.py", *FLAGS, *flags, f"--output_dir={undisturbed}")
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    assert len(rows(undisturbed)) == 4  # left as it was


@pytest.mark.trainings
def test_a_second_training_in_the_same_folder_is_refused(tmp_path):
    flags = (*FLAGS, "--epochs=1000")
    launcher = start(tmp_path / "run", 1, flags)
    wait_for(lambda: newest_step(tmp_path / "run") > 0, launcher)
    done = run("python", 1, ROOT / "train.py", *flags, f"--output_dir={tmp_path}/run")
    [holder] = trainers(launcher)
    named = f"another training run (process {holder.pid} on {socket.gethostname()}) writes to"
    assert done.returncode == 1 and named in done.stderr
    holder.send_signal(signal.SIGTERM)
    assert launcher.wait(300) == 75
