"""The observers for Weights & Biases and MLflow with the real packages, which write to the disk and not to a server."""
import json
import os
import subprocess

import pytest
from conftest import ROOT, require_tool

PROGRAM = """
import json, pathlib, types
from examples import mlflow_log, wandb_log
row = {"epoch": 1, "samples": 1437, "val_top1": 0.5, "val_loss": 1.5, "weights": "2d11a7383c976410"}
for kind in (wandb_log.Log, mlflow_log.Log):
    log = kind()
    log.start(types.SimpleNamespace(folder=pathlib.Path("runs/one"), flags={"model": "convnet", "image_size": None}))
    log.evaluation(types.SimpleNamespace(row=row))
    if hasattr(log, "end"):
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
    assert (name, status, flags["model"]) == ("one", "FINISHED", "convnet")
    assert metrics == {"epoch": 1, "samples": 1437, "val_top1": 0.5, "val_loss": 1.5}
    [written] = (tmp_path / "wandb").glob("offline-run-*/run-one.wandb")
    assert b"val_top1" in written.read_bytes()
