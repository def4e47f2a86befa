"""A request to stop: at a training's start, in the middle of an evaluation, to the launcher itself."""
import json
import signal

import pytest
from conftest import DIGITS, ROOT, TINY, rows, run, start

from tests.rigs import trainings
from tests.rigs.trainings import newest_step, wait_for
from training.stopping import StopRequest

FLAGS = (DIGITS, *TINY, "--epochs=1000", "--checkpoint_every=1")


def test_before_training_is_under_way_there_is_nothing_to_save(tmp_path):
    launcher = trainings.start(tmp_path / "run", 2, FLAGS)
    wait_for(lambda: len(trainings.trainers(launcher)) == 2, launcher)
    worker = trainings.trainers(launcher)[1]
    wait_for(lambda: any("libtensorflow" in library.path for library in worker.memory_maps()), launcher)
    worker.send_signal(signal.SIGTERM)  # while TensorFlow is imported
    assert launcher.wait(300) == 75
    assert "stopped on request; there was nothing to save" in (tmp_path / "run.log").read_text()


@pytest.mark.trainings
def test_mpirun_passes_it_on(tmp_path):
    """SIGUSR1, that is; on SIGTERM it kills the workers within a second. Rank 0 alone says it, and gives hints."""
    launcher = start(tmp_path / "run", 2, (*FLAGS, "--repeats=3", "--augmentation=none"))
    wait_for(lambda: newest_step(tmp_path / "run") >= 12, launcher)
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.wait(300) == 75
    log = (tmp_path / "run.log").read_text()
    assert f"stopped on request after step {newest_step(tmp_path / 'run')} of" in log
    assert log.count("stopped on request") == log.count("takes the same pixels 3 times") == 1


def test_in_the_middle_of_an_evaluation(tmp_path):
    """10,000 validation images, which take longer than the nine steps."""
    program = f"""
import sys, os, signal
import train
from training import evaluate
make, steps = evaluate.make_evaluation_step, []
def interrupted(*arguments):
    step = make(*arguments)
    def counted(*batch):
        steps.append(batch)
        if len(steps) == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*batch)
    return counted
evaluate.make_evaluation_step = interrupted
sys.exit(train.main(["train.py", "--data_dir=synthetic:250000", "--batch_size=512", "--model=convnet",
                     "--image_size=8", "--epochs=0.02", "--warmup=none", "--output_dir={tmp_path}/run"]))
"""
    done = run("python", 1, "-c", program)
    assert done.returncode == 75 and "after step 9 of 9" in done.stderr, done.stderr[-2000:]
    assert rows(tmp_path / "run") == []
    done = run("python", 1, ROOT / "train.py", f"--flagfile={tmp_path}/run/flags.txt", f"--output_dir={tmp_path}/run")
    assert done.returncode == 0 and "resumed after step 9 of 9" in done.stderr
    [row] = rows(tmp_path / "run")
    assert row["samples"] == 9 * 512 and row["train_loss"] > 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["val_samples"] == 10_000


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_signals_are_noted_once_training_is_under_way(number):
    numbers = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
    stop, before = StopRequest(), {number: signal.getsignal(number) for number in numbers}
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stop.install()
        stop.start_training()
        signal.raise_signal(number)
        assert stop.received
        with pytest.raises(KeyboardInterrupt):  # the first Ctrl-C if the other signal came before, or the second
            signal.raise_signal(signal.SIGINT)
            assert number == signal.SIGUSR1
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
