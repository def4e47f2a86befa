"""--expect and --stop_below_expected: a training that falls behind a curve says so, and ends on all workers."""
import json
import re

import pytest
from conftest import ROOT, TINY, rows, run

from experiments.trainings import Result
from reporting.report import report
from reporting.run_data import RunData


@pytest.mark.trainings
def test_a_training_ends_below_the_curve_and_goes_on_with_another(tmp_path):
    """At epoch 1 the curve is too low to matter, at epoch 2 out of reach. Where training ends anyway, it ends well."""
    folder, curve = tmp_path / "run", tmp_path / "curve"
    curve.write_text("1 0.01\n2 0.999\n3 0.99\n")
    words = (ROOT / "train.py", *TINY, "--epochs=3", "--on_divergence=rollback", f"--output_dir={folder}",
             f"--expect={curve}", "--stop_below_expected=0.1")
    done = run("mpirun", 2, *words)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    found = [row["val_top1"] for row in rows(folder)]
    assert len(found) == 2 and found[0] > 0.01 and found[1] < 0.998
    said = f"top-1 {found[1]:.2%} is {99.9 - 100 * found[1]:.2f} points below the 99.90% of --expect={curve}"
    assert f"after epoch 2, {said}" in done.stderr and "rolled back" not in done.stderr
    for top1, expected in zip(found, (0.01, 0.999), strict=True):
        assert f"{top1:.2%} ({100 * top1 - 100 * expected:+.2f})" in done.stderr
    result, ended = Result.read(folder), RunData.read(folder)
    assert result.below_expected and result.val_top1 == 0.1 and result.diverged_at["epoch"] == 2  # of ten classes
    assert ended.state == "below --expect" and said in re.sub("<[^>]*>", "", report(ended))
    assert "expected: 99.9% (epoch 2)" in report(ended)

    curve.write_text("3 0.999\n")
    done = run("python", 1, *words)
    assert done.returncode == 0, done.stderr
    assert "(-" in done.stderr and not json.loads((folder / "summary.json").read_text()).get("diverged")
