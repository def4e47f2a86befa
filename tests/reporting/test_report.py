"""The report of a run that diverged, and strict JSON."""
import json
import math

from reporting.report import write_report
from reporting.run_folder import as_json, write_json


def test_a_number_that_is_not_finite_is_null():
    text = as_json({"loss": math.nan, "rows": [1.5, math.inf, {"x": -math.inf}], "name": "NaN"})
    assert json.loads(text, parse_constant=lambda word: 1 / 0) == {"loss": None, "rows": [1.5, None, {"x": None}],
                                                                   "name": "NaN"}


def test_a_run_that_diverged_is_reported(tmp_path):
    row = {"epoch": 1, "learning_rate": 1.0, "train_loss": None, "val_loss": None, "train_top1": 0.1, "val_top1": 0.0,
           "val_top5": 0.0, "images_per_second": 100.0}
    summary = {"val_top1": 0.0, "val_top5": 0.0, "val_samples": 360, "epochs": 1, "global_batch_size": 64,
               "world_size": 1, "images_per_second": 100.0, "seconds": 3.0, "val_loss": None}
    plan = {"epochs": 1, "phases": [{"steps": 1}], "schedule": [{"epoch": 0, "learning_rate": 1e9}]}
    write_json(tmp_path / "plan.json", plan)
    write_json(tmp_path / "summary.json", summary)
    (tmp_path / "metrics.jsonl").write_text(as_json(row) + "\n")
    (tmp_path / "flags.txt").write_text("--learning_rate=1e9 <&>\n")
    (tmp_path / "trust_ratios.jsonl").write_text(as_json({"epoch": 0, "layers": {"a/kernel": [math.nan, 0.5, 1.0]}}))
    page = write_report(tmp_path).read_text()
    assert "not a number" in page and "&lt;&amp;&gt;" in page and "Layer by layer" in page
