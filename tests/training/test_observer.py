"""--observer: classes of the user's own, among them those of examples/."""
import json
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT, TINY, rows, run, train

from common.errors import UserError
from tests.rigs.trainings import newest_step
from training.observer import UserObserver, load_observers

# The parts of the real packages that the examples use, with the real signatures (wandb 0.31, mlflow 3.17).
WANDB = '''
import json
def _record(*call):
    with open("calls.jsonl", "a") as file:
        file.write(json.dumps(call, default=repr) + "\\n")
class Run:
    def define_metric(self, name, step_metric=None, step_sync=None, hidden=None, summary=None, overwrite=None):
        _record("define_metric", name, step_metric)
    def log(self, data, step=None, commit=None):
        _record("log", data)
    def finish(self, exit_code=None):
        _record("finish")
def init(entity=None, project=None, dir=None, id=None, name=None, notes=None, tags=None, config=None, *,
         allow_val_change=None, resume=None):
    _record("init", id, resume, config)
    return Run()
'''
MLFLOW = '''
import json, types
def _record(*call):
    with open("calls.jsonl", "a") as file:
        file.write(json.dumps(call, default=repr) + "\\n")
def start_run(run_id=None, experiment_id=None, run_name=None, nested=False, parent_run_id=None, tags=None,
              description=None, log_system_metrics=None):
    _record("start_run", run_name)
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or "8f"))
def log_params(params, synchronous=None, run_id=None):
    _record("log_params", params)
def log_metrics(metrics, step=None, synchronous=None, run_id=None, timestamp=None, model_id=None, dataset=None):
    assert all(isinstance(value, (int, float)) for value in metrics.values())
    _record("log_metrics", metrics, step)
def end_run(status="FINISHED"):
    _record("end_run", status)
'''
COUNTS = '''
import json, sys
class Everything:
    def __init__(self):
        self.calls = []
    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *arguments: self._seen(name, arguments)
    def _seen(self, name, arguments):
        self.calls.append((name, [type(one).__name__ for one in arguments]))
        if name == "close":
            json.dump(self.calls, open("seen.json", "w"))
class Fragile:
    def step(self, update):
        raise RuntimeError(f"no network\\nat step {update.number}")
class Leaves:
    def evaluation(self, evaluation):
        sys.exit("no server")
    def close(self):
        sys.exit(4)
class Unready:
    def start(self, run):
        raise RuntimeError("not logged in")
class Wrong:
    def on_step(self, update):
        pass
class Shapes:
    def evaluation(self, evaluation):
        json.dump([len(column) for column in evaluation.outcomes], open("shape.json", "w"))
'''


def test_the_documented_examples_and_others_see_a_training(tmp_path):
    """On two workers: each is called on rank 0 alone, and one that fails does not end training."""
    for name, text in {"wandb": WANDB, "mlflow": MLFLOW, "mine": COUNTS}.items():
        (tmp_path / f"{name}.py").write_text(text)
    done = train(*TINY, "--epochs=2", f"--output_dir={tmp_path}/run", "--observer=examples.wandb_log:Log",
                 "--observer=examples.mlflow_log:Log", "--observer=mine:Everything", "--observer=mine:Fragile",
                 "--observer=mine:Shapes", "--observer=mine:Leaves", kind="mpirun", workers=2, cwd=tmp_path)
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    recorded = rows(tmp_path / "run")
    assert [call[1] for call in calls if call[0] == "log"] == recorded and len(recorded) == 2
    numbers = [{name: value for name, value in row.items() if name != "weights"} for row in recorded]
    assert [call[1:] for call in calls if call[0] == "log_metrics"] == [[row, row["samples"]] for row in numbers]
    assert [call[0] for call in calls if not call[0].startswith("log")] == [
        "init", "define_metric", "start_run", "end_run", "end_run", "finish"]  # closed in reverse order
    [config] = [call[3] for call in calls if call[0] == "init"]
    assert config["model"] == "convnet" and config["epochs"] == 2
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert [name for name, _ in seen[:2]] == ["start", "step"] and seen[0][1] == ["RunInfo"]
    assert [name for name, _ in seen if name != "step"] == ["start", "evaluation", "evaluation", "end", "close"]
    assert sum(name == "step" for name, _ in seen) == json.loads((tmp_path / "run/plan.json").read_text())["steps"]
    assert json.loads((tmp_path / "shape.json").read_text()) == [360] * 5
    fragile, *others = [line for line in done.stderr.splitlines() if "--observer" in line]
    assert [other.partition(" failed, training continues: ")[::2] for other in others] == [
        (f"train.py: warning: --observer=mine:Leaves: {call}()", f"SystemExit: {why} ({tmp_path}/mine.py, line {line})")
        for call, why, line in (("evaluation", "no server", 19), ("close", "4", 21))]
    assert newest_step(tmp_path / "run") == json.loads((tmp_path / "run/plan.json").read_text())["steps"]
    assert fragile.startswith("train.py: warning: --observer=mine:Fragile: step() failed, training continues: "
                              "RuntimeError: no network at step 0 (") and fragile.endswith("mine.py, line 16)")


@pytest.mark.parametrize(("name", "message"), [
    ("missing_module:Log", "ModuleNotFoundError: No module named 'missing_module'"),
    ("mine:Missing", "AttributeError: module 'mine' has no attribute 'Missing'"),
    ("mine:Wrong", "Wrong() has none of the methods start, step"),
    ("broken:Log", "SyntaxError: "),
    ("mine:json", "TypeError: 'module' object is not callable")])
def test_a_wrong_observer_is_one_line(name, message, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(COUNTS)
    (tmp_path / "broken.py").write_text("class Log\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    monkeypatch.delitem(__import__("sys").modules, "mine", raising=False)
    with pytest.raises(UserError) as raised:
        load_observers([name])
    assert str(raised.value).startswith(f"--observer={name}: {message}") and "\n" not in str(raised.value)


@pytest.mark.parametrize(("name", "code", "message"), [
    ("mine", 2, "'mine' is not MODULE:NAME"), ("mine:Missing", 1, "has no attribute 'Missing'"),
    ("mine:Unready", 1, "RuntimeError: not logged in")])
def test_a_wrong_observer_ends_every_worker_before_training(name, code, message, tmp_path):
    (tmp_path / "mine.py").write_text(COUNTS)
    done = run("mpirun", 2, ROOT / "train.py", *TINY, f"--observer={name}", f"--output_dir={tmp_path}/run",
               cwd=tmp_path)
    assert done.returncode == code and "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if "train.py: " in line]
    assert lines and all(message in line for line in lines), done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not rows(tmp_path / "run")


def test_an_observer_needs_no_method_but_those_it_uses(capsys):
    seen = []
    observer = UserObserver("mine:Log", SimpleNamespace(end=seen.append, close=lambda: 1 / 0))
    for call in (observer.start, observer.step, observer.evaluation, observer.rewind, observer.end):
        call("argument")
    observer.close()
    assert seen == ["argument"] and "close() failed, training continues: ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["made", "start"])
def test_an_observer_that_ends_the_process_before_training_is_a_line(where, monkeypatch):
    """On all ranks: UserError is raised on them."""
    def leave(*_):
        raise SystemExit("no license")

    made = leave if where == "made" else lambda: SimpleNamespace(start=leave)
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(Log=made))
    with pytest.raises(UserError, match=r"^--observer=mine:Log: SystemExit: no license \("):
        load_observers(["mine:Log"])[0].start(None)
