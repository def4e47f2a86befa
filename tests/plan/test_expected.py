"""--expect: curves from metrics.jsonl and from tables, between whose points lie straight lines."""
import json

import pytest

from common.errors import UsageError
from plan import flags
from plan.expected import Expected


def test_a_table_is_read_in_any_order_with_lines_between_its_points(tmp_path):
    (tmp_path / "table").write_text("# Goyal et al., by eye\n\n90 0.76  # the end\n10 0.4\n30 0.5\n")
    curve = Expected.read(str(tmp_path / "table"))
    assert curve.points == ((10, 0.4), (30, 0.5), (90, 0.76))
    assert [curve.top1_at(epoch) for epoch in (10, 15, 90)] == pytest.approx([0.4, 0.425, 0.76])
    assert curve.top1_at(9.9) is curve.top1_at(90.1) is None


def test_a_run_counts_by_its_averaged_weights_if_it_has_some(tmp_path):
    lines = [{"epoch": 1, "val_top1": 0.2}, {"epoch": 2, "val_top1": 0.3, "ema_val_top1": 0.4}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert Expected.read(str(tmp_path / "metrics.jsonl")).points == ((1, 0.2), (2, 0.4))


@pytest.mark.parametrize(("text", "message"), [
    ("90 75.9", "line 1 is neither.*75.9 is not a fraction of 1; did you mean 0.759"), ("90", "line 1 is neither"),
    ("1 0.5\nx y", "line 2 is neither"), ("nan 0.5", "line 1 is neither"),
    ('{"epoch": 1, "val_top1": 0.5}\n{"epoch": 2, "val_top1": NaN}\n',
     "line 2 is neither.*its epoch is 2 and its top-1 nan, not a fraction from 0 to 1"),
    ('{"epoch": 1, "val_top1": null}\n', "line 1 is neither"), ('{"epoch": 1, "val_to\n', "line 1 is neither"),
    ('{"epoch": 1, "val_to', "no line 'epoch top1'"),
    ('{"epoch": 1}', "line 1 is neither"), ("# nothing", "no line 'epoch top1'"),
    (None, "No such file")])
def test_what_is_no_curve(text, message, tmp_path):
    if text:
        (tmp_path / "table").write_text(text)
    with pytest.raises(UsageError, match=f"--expect={tmp_path}/table: .*{message}"):
        flags.parse(["train.py", f"--expect={tmp_path}/table"])


def test_points_below_need_a_curve():
    with pytest.raises(UsageError, match="--stop_below_expected needs --expect=FILE"):
        flags.parse(["train.py", "--stop_below_expected=3"])
