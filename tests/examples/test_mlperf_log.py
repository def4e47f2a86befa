"""MLPerf's log passes MLPerf's own compliance checker if the target is met, and only then."""
import json
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, TRAIN, environment, rows, warm_python
from mlperf_logging.compliance_checker import mlp_compliance

from examples import mlperf_log
from examples.mlperf_log import PREFIX, MLPerfLog
from plan import flags
from plan.plan import plan_for
from training.observer import Evaluation, RunInfo

LOG = "mlperf.log"
CLOSED = ("--model=convnet", "--epochs=12", "--batch_size=64", "--optimizer=lars", "--learning_rate=0.5",
          "--lr_schedule=poly", "--end_learning_rate=1e-4", "--decay_from=warmup_end", "--warmup=gradual",
          "--warmup_epochs=1", "--warmup_learning_rate=0", "--weight_decay=1e-4", "--evaluate_every=2")


def train(run: Path, *given: str) -> None:
    """A training with the log, started as a user starts it from a folder that has examples of its own."""
    (run.parent / "examples").mkdir(exist_ok=True)
    (run.parent / "examples" / "__init__.py").touch()
    alone = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    done = subprocess.run([warm_python(), TRAIN, *CLOSED, *given, "--observer=examples.mlperf_log:MLPerfLog",
                           f"--output_dir={run}"], cwd=run.parent, env=alone, text=True, capture_output=True,
                          timeout=300, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-3000:]


def checked(log: Path) -> subprocess.CompletedProcess:
    """The checker on a log, as docs/observers.md starts it, but with warnings as errors."""
    return subprocess.run(
        [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage=training", "--ruleset=4.0.0", "--werror",
         f"--log_output={log}.checked", str(log)], text=True, capture_output=True, cwd=log.parent)


def passes(log: Path) -> bool:
    """What the checker says of a log, in this process."""
    checker = mlp_compliance.make_checker("training", "4.0.0", quiet=False, werror=True)
    return mlp_compliance.main(str(log), "training_4.0.0/common.yaml", checker)[0]


def events(log: Path, *keys: str) -> list[dict]:
    found = [json.loads(line.removeprefix(PREFIX)) for line in log.read_text().splitlines()]
    return [event for event in found if event["key"] in keys or not keys]


def run_info(folder: Path, *given: str, steps: int = 0, evaluations: int = 0) -> RunInfo:
    """What an observer of these flags is given, on two workers."""
    settings = flags.parse(["train.py", *given])
    samples = settings.run.train_samples or 1437
    dataset = SimpleNamespace(train=SimpleNamespace(samples=samples), validation=SimpleNamespace(samples=360))
    plan = plan_for(settings, 2, 2, samples).as_json()
    progress = SimpleNamespace(step=steps, evaluations=evaluations)
    return RunInfo(folder, plan, settings.given, "", None, dataset, {"host": 2}, progress)


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / LOG


@pytest.fixture(autouse=True)
def started_now(monkeypatch):
    """As a training has. The checker allows half an hour from a process's start to its first update."""
    monkeypatch.setattr(mlperf_log.psutil.Process, "create_time", lambda process: time.time() - 1)


def logged(folder: Path, *top1s: float, given=CLOSED, before: int = 0) -> MLPerfLog:
    """An observer after evaluations with these accuracies. before: number of evaluations before the process."""
    observer = MLPerfLog()
    observer.start(run_info(folder, *given, steps=45 * before, evaluations=before))
    for number, top1 in enumerate(top1s, before + 1):
        observer.step(None)
        evaluate(observer, 2 * number, top1)
    return observer


def evaluate(observer: MLPerfLog, epoch: int, top1: float, **more: float) -> None:
    observer.evaluation(Evaluation({"epoch": epoch, "val_top1": top1, **more}, {}, {}, None))


@pytest.mark.trainings
def test_a_training_passes_once_it_has_reached_the_target(tmp_path):
    """It stops below the target first, as a run that fails it does, and resumes."""
    run = tmp_path / "run"
    train(run, "--evaluate_every=1", "--stop_at_target", "--target_top1=0.05")
    refused, [stop] = checked(run / LOG), events(run / LOG, "run_stop")
    assert refused.returncode == 1 and "v['value'] >= 0.7590" in refused.stderr
    assert stop["metadata"] == {"status": "aborted"}
    before = events(run / LOG)[:-1]
    train(run, "--evaluate_every=1", "--stop_at_target", "--target_top1=0.759")
    passed = checked(run / LOG)
    assert passed.returncode == 0 and "SUCCESS" in passed.stderr, passed.stderr
    assert events(run / LOG)[:len(before)] == before
    evaluated = [(event["metadata"]["epoch_num"], event["value"]) for event in events(run / LOG, "eval_accuracy")]
    assert evaluated == [(row["epoch"], row["val_top1"]) for row in rows(run)]
    assert evaluated[-1][1] >= 0.759 > evaluated[0][1]
    times = [event["time_ms"] for event in events(run / LOG)]
    assert times == sorted(times)
    [begin], [end] = events(run / LOG, "run_start"), events(run / LOG, "run_stop")
    summary = json.loads((run / "summary.json").read_text())
    assert end["time_ms"] - begin["time_ms"] > 1000 * summary["seconds_to_target"] - 2000  # and the pause


def test_no_file_has_the_name_of_one_that_tf2onnx_installs_as_examples():
    theirs = {path.name for path in metadata.files("tf2onnx") if path.parts[0] == "examples"}
    assert theirs and not theirs & {path.name for path in (ROOT / "examples").iterdir()}


RECIPES = sorted((ROOT / "recipes" / "mlperf").glob("*.flags"))
SGD = *CLOSED, "--optimizer=sgd", "--learning_rate=0.128"


@pytest.mark.parametrize("given", [*((f"--flagfile={path}",) for path in RECIPES), SGD],
                         ids=[*(path.stem for path in RECIPES), "sgd"])
def test_the_settings_of_mlperfs_recipes_and_of_sgd_pass(log, given):
    logged(log.parent, 0.7, 0.76, given=given)
    assert passes(log)


@pytest.mark.parametrize("given", [
    "--lars_epsilon=1e-6", "--end_learning_rate=0", "--poly_power=1", "--lr_schedule=cosine", "--weight_decay=3e-4"])
def test_other_settings_do_not(log, given):
    logged(log.parent, 0.76, given=(*CLOSED, given))
    assert not passes(log)


@pytest.mark.parametrize(("top1s", "status"), [((0.7, 0.76, 0.8), "success"), ((0.7, 0.758), "aborted")])
def test_the_run_ends_at_the_target_or_with_the_training(log, top1s, status):
    logged(log.parent, *top1s).end({})
    assert len(events(log, "eval_stop")) == 2
    assert [event["metadata"]["status"] for event in events(log, "run_stop")] == [status]


def test_a_new_training_overwrites_the_log(log):
    logged(log.parent, 0.3, 0.5)
    logged(log.parent, 0.4)
    assert [event["value"] for event in events(log, "eval_accuracy")] == [0.4]
    assert len(events(log, "run_start")) == 1


def test_a_resumed_run_drops_the_events_after_its_checkpoint(log):
    logged(log.parent, 0.3, 0.5, 0.6)
    kept = log.read_text().splitlines()[:-5]
    with open(log, "a") as file:
        file.write(':::MLLOG {"names')  # cut off
    logged(log.parent, 0.76, before=2)
    assert log.read_text().splitlines()[:len(kept)] == kept and passes(log)
    assert [(event["metadata"]["first_epoch_num"], event["metadata"]["epoch_count"])
            for event in events(log, "block_start")] == [(1, 2), (3, 2), (5, 2)]
    complete = log.read_text()
    logged(log.parent, before=3).end({})  # a finished run that is started again
    assert log.read_text() == complete
    logged(log.parent, 0.7, before=1)
    assert [event["value"] for event in events(log, "eval_accuracy")] == [0.3, 0.7] and not events(log, "run_stop")


def test_a_log_that_ended_before_its_training_is_complete(log, capsys):
    """The training goes on after the target, and is resumed."""
    logged(log.parent, 0.3, 0.76, 0.8)
    complete = log.read_text()
    for before in (2, 3):
        logged(log.parent, 0.9, before=before).end({})
        assert log.read_text() == complete and not capsys.readouterr().err


def test_the_accuracy_is_that_of_the_average(log):
    observer = logged(log.parent)
    for epoch, average in ((2, 0.7), (4, 0.76)):
        evaluate(observer, epoch, 0.8, ema_val_top1=average)
    assert [event["value"] for event in events(log, "eval_accuracy")] == [0.7, 0.76]
    assert len(events(log, "run_stop")) == 1


def test_a_rollback_drops_events_too(log):
    observer = logged(log.parent, 0.3, 0.5)
    observer.rewind(SimpleNamespace(step=45, evaluations=1))
    evaluate(observer, 4, 0.4)
    assert [event["value"] for event in events(log, "eval_accuracy")] == [0.3, 0.4]


@pytest.mark.parametrize("text", [None, "another file\n"])
def test_a_run_that_resumes_without_its_log_writes_none(log, capsys, text):
    if text:
        log.write_text(text)
    logged(log.parent, 0.76, before=1).end({})
    assert (log.read_text() if log.exists() else None) == text
    assert "lacks the start of this run; nothing is added" in capsys.readouterr().err


def test_what_cannot_be_logged(tmp_path):
    with pytest.raises(ValueError, match="MLPerf's log has one batch size"):
        logged(tmp_path, given=(*CLOSED, "--batch_size=0:64,2:128"))
    with pytest.raises(ValueError, match="for the optimizers lars and sgd, not for lamb"):
        logged(tmp_path, given=(*CLOSED, "--optimizer=lamb"))


def test_what_a_full_disk_refuses_is_written_when_there_is_room(tmp_path):
    """A folder that is not there stands for the disk."""
    observer = logged(tmp_path / "run")
    with pytest.raises(OSError):  # of which training tells
        evaluate(observer, 2, 0.3)
    (tmp_path / "run").mkdir()
    evaluate(observer, 4, 0.76)
    assert passes(tmp_path / "run" / LOG)
    assert [event["value"] for event in events(tmp_path / "run" / LOG, "eval_accuracy")] == [0.3, 0.76]


def test_hyperparameters_and_times(log):
    """Those that the checker does not compare with anything, by hand."""
    logged(log.parent, 0.3, given=(*CLOSED, "--seed=7", "--momentum=0.94"))
    found = {event["key"]: event["value"] for event in events(log)}
    assert found | {
        "seed": 7, "train_samples": 1437, "eval_samples": 360, "global_batch_size": 64, "model_bn_span": 16,
        "gradient_accumulation_steps": 1, "opt_name": "lars", "lars_opt_base_learning_rate": 0.5,
        "lars_opt_momentum": 0.94, "lars_opt_learning_rate_warmup_epochs": 1,
        "lars_opt_learning_rate_decay_steps": 11 * 1437 // 64, "cache_clear": False,
        "submission_platform": "2 workers on 1 host"} == found
    times = {event["key"]: event["time_ms"] for event in events(log)}
    assert times["init_start"] < times["run_start"] <= times["eval_stop"]  # from the start of this process
