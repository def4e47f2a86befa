"""The observers for Weights & Biases and MLflow with the real packages, which write to the disk and not to a server."""
import importlib
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import ROOT, require_tool

PROGRAM = """
import json, pathlib, types
from examples import mlflow_log, wandb_log
folder = pathlib.Path("runs/one")
folder.mkdir(parents=True)
row = {"epoch": 1, "samples": 1437, "val_top1": 0.5, "val_loss": 1.5, "weights": "2d11a7383c976410"}
for kind, step in ((wandb_log.Log, 0), (mlflow_log.Log, 0), (mlflow_log.Log, 12)):
    log, flags = kind(), {"model": "convnet", "image_size": None, "dali_threads": step}
    log.start(types.SimpleNamespace(folder=folder, flags=flags, progress=types.SimpleNamespace(step=step)))
    log.evaluation(types.SimpleNamespace(row=row | {"epoch": 1 + bool(step)}))
    if hasattr(log, "end") and (step or kind is wandb_log.Log):  # MLflow's first one is stopped
        log.end({})
    log.close()
import mlflow
[run] = mlflow.search_runs(output_format="list")
print(json.dumps([run.info.run_name, run.info.status, run.data.metrics, run.data.params]))
"""


@pytest.mark.trainings
def test_the_real_packages_take_what_the_observers_give(tmp_path):
    """In an environment of their own, which uv makes: their requirements are no part of ours."""
    words = [require_tool("uv"), "run", "--no-project", "--python=3.11", "--with=wandb==0.31.0",
             "--with=mlflow-skinny==3.17.2", "python", "-c", PROGRAM]
    done = subprocess.run(
        words, cwd=tmp_path, text=True, capture_output=True, timeout=300, stdin=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT), "WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true",
                          "MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlruns"})
    assert done.returncode == 0, done.stderr[-3000:]
    name, status, metrics, flags = json.loads(done.stdout.splitlines()[-1])
    assert (name, status, flags["model"], flags["dali_threads"]) == ("one", "FINISHED", "convnet", "0")
    assert metrics == {"epoch": 2, "samples": 1437, "val_top1": 0.5, "val_loss": 1.5}
    [written] = (tmp_path / "wandb").glob("offline-run-*/run-one.wandb")
    assert b"val_top1" in written.read_bytes()


def test_a_resumed_training_continues_its_run_of_mlflow(tmp_path, monkeypatch):
    """A training that starts over, and one that has lost the file, begin a new one."""
    mlflow = mock.Mock()
    mlflow.start_run.side_effect = lambda run_id, run_name: SimpleNamespace(info=SimpleNamespace(
        run_id=run_id or f"new {mlflow.start_run.call_count}"))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.delitem(sys.modules, "examples.mlflow_log", raising=False)
    example, started = importlib.import_module("examples.mlflow_log"), []
    for step, run_id in ((0, None), (11, "new 1"), (22, "new 1"), (0, None), (11, "new 4")):
        example.Log().start(SimpleNamespace(folder=tmp_path, flags={"seed": step}, progress=SimpleNamespace(step=step)))
        started.append((mlflow.start_run.call_args.kwargs["run_id"], run_id))
    assert all(ours == expected for ours, expected in started), started
    assert [call.args for call in mlflow.log_params.call_args_list] == [({"seed": 0},)] * 2  # never others
    (tmp_path / "mlflow_run.txt").unlink()
    example.Log().start(SimpleNamespace(folder=tmp_path, flags={}, progress=SimpleNamespace(step=11)))
    assert mlflow.start_run.call_args.kwargs["run_id"] is None
    monkeypatch.delitem(sys.modules, "examples.mlflow_log")
