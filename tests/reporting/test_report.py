"""The report of runs in every state and of every size, against the numbers in their files."""
import functools
import html
import json
import math
import re
import subprocess
import sys

import pytest
from conftest import ROOT
from scipy.stats import binomtest

from common import VERSION
from common.errors import UserError
from common.files import as_json, write_json
from plan.values import same
from reporting import heat_map, report, sections
from reporting.compare import comparison
from reporting.report import write_report
from reporting.run_data import RunData
from tests.rigs.run_files import row, whole

DIVERGED = {"diverged": True, "diverged_at": {"step": 6, "epoch": 1.5}, "classes": 10, "advice": []}


def page_of(folder) -> str:
    """The page as a reader sees it, without style, script and tags."""
    page = write_report(folder).read_text()
    return html.unescape(re.sub(r"<(style|script).*?</\1>|<[^>]*>", "", page, flags=re.DOTALL))


@pytest.mark.parametrize(("one", "other", "are"), [
    ("1e-4", "0.0001", True), ("2", "0:2", True), ("0:29,30:50", "0:29.0,3e1:50", True),
    ("30,60", ["30.0", "6e1"], True), ("gamma,beta", ["gamma", "beta"], True), ("", [], True), (0.5, "0.5", True),
    ("lars", "lars", True),
    ("2", "0:2,30:1", False), ("2", "20", False), ("0:29,30:50", "0:29,31:50", False), ("30,60", "30", False),
    ("gamma,beta", "gamma", False), ("lars", "lamb", False), ("2", "", False), ("true", "false", False)])
def test_values_that_mean_the_same(one, other, are):
    assert same(one, other) == same(other, one) == are


def test_a_number_that_is_not_finite_is_null():
    text = as_json({"loss": math.nan, "rows": [1.5, math.inf, {"x": -math.inf}], "name": "NaN"})
    assert json.loads(text, parse_constant=lambda word: 1 / 0) == {"loss": None, "rows": [1.5, None, {"x": None}],
                                                                   "name": "NaN"}


def test_what_is_not_a_number_or_html_is_shown(tmp_path):
    diverged = row(1, train_loss=None, val_loss=None)
    folder = whole(tmp_path / "run", rows=[diverged], learning_rate="1e9 <&>")
    (folder / "trust_ratios.jsonl").write_text(
        as_json({"epoch": 0, "samples": 0, "layers": {"a/kernel": [math.nan, 0.5, 1.0]}}))
    page = write_report(folder).read_text()
    assert "not a number" in page and "&lt;&amp;&gt;" in page and "Layer by layer" in page


def test_the_result_stands_on_top_with_the_papers_figure(tmp_path):
    page = page_of(whole(tmp_path / "run"))
    assert ("resnet50 was trained for 3 epochs with batch size 256 on 4 workers, in 30 s. Top-1 is the share of the 50 "
            "validation images of imagenet whose most probable class is the right one.") in page
    assert "The paper's figure (table 3, experiment 1): top-1 75.03 %." in page
    assert "differs from the recipe: --epochs=3 instead of 90." in page  # 1e-4 and 0.0001 are the same weight decay
    assert page.index("75.03") < page.rindex("Curves") and "In progress" not in page


def test_a_page_has_no_python_in_it(tmp_path):
    page = page_of(whole(tmp_path / "run"))
    assert not re.search(r"[{}]|\bNone\b|'[a-z_]+':", page)
    for words in ("node1 (2 workers), node2 (2 workers)", "1ebecd6, with uncommitted changes", "2.15.1"):
        assert words in page, words


def test_each_setting_says_where_it_comes_from(tmp_path):
    """Those of the command line first, those at their defaults last."""
    page = write_report(whole(tmp_path / "run")).read_text()
    assert "<td><code><span>--epochs</span></code></td>" in page  # is not broken after its hyphens
    tables = [re.findall(r"<tr><td>(.*?)</td><td class=text>(.*?)</td><td class=text>(.*?)</td></tr>",
                         re.sub("</?(code|span)>", "", one))
              for one in re.findall(r'<tr><th scope="col">setting</th>.*?</table>', page)]
    assert tables[0] == [
        ("workers", "4", "launch"), ("updates", "12", "plan"), ("peak learning rate", "2", "plan"),
        ("all-reduce", "torus of 2x2 workers, by Horovod process sets", "--torus_grid=2x2"),
        ("--epochs", "3", "command line"), ("--model", "resnet50", "recipe"), ("--weight_decay", "0.0001", "recipe")]
    assert "14 flags at their defaults" in page and len(tables[1]) == 14
    assert ("--momentum", "0.9", "default") in tables[1]


def test_momentum_is_that_of_an_optimizer_that_has_one(tmp_path):
    assert "The momentum is" not in page_of(whole(tmp_path / "run", optimizer="adam"))


def test_where_the_time_went(tmp_path):
    """3,000 images at 125 a second are 24 of 30 s."""
    page = page_of(whole(tmp_path / "run"))
    assert "70.0% went to computing, 20.0% to waiting for data and 10.0% to exchanging gradients" in page
    assert "The updates took 24 s of the 30 s after the network was built." in page


def test_who_was_slow_last_is_named(tmp_path):
    folder = whole(tmp_path / "run")
    assert 'class="status problem"' not in write_report(folder).read_text()
    times = [json.loads(line) for line in (folder / "times.jsonl").read_text().splitlines()]
    named = ["rank 0 on node1 computes 20% slower"], ["rank 2 on <2> computes 37% slower"], []
    times = [one | {"slow": slow} for one, slow in zip(times, named, strict=True)]
    (folder / "times.jsonl").write_text("".join(as_json(one) + "\n" for one in times))
    page = write_report(folder).read_text()
    assert "At epoch 2, rank 2 on &lt;2&gt; computes 37% slower." in page and "rank 0 on node1" not in page


def test_the_errors(tmp_path):
    page = page_of(whole(tmp_path / "run"))
    assert "After epoch 3, 5 of 55 validation images are classified wrongly." in page
    assert re.search(r"class 0\s*class 1\s*5\s*50.0%", page) and "class 0 predicted as class 1: 5 of 10" in page
    assert "class 0 → class 1 93%val.tfrecord, record 3" in page


def test_the_classes_weakest_first(tmp_path):
    """By hand: class 0 has 5 of 10, and its 5 errors make class 1 5 of 10 in precision. SciPy's Wilson intervals."""
    page = html.unescape(re.sub("<[^>]*>", " ", write_report(whole(tmp_path / "run")).read_text()))
    table = page[page.index("Classes, weakest first"):page.index("Worst errors")]
    half, five = (binomtest(5, images).proportion_ci(0.95, "wilson") for images in (10, 5))
    low = f"50% ({half.low:.0%} to {half.high:.0%})"
    full = f"100% ({five.low:.0%} to {five.high:.0%})"
    rows = re.findall(r"(class \d)\s*([\d.]+% \(.*?\))\s*(class 1 \(5\))?\s*(\d+)\s*([\d.]+% \(.*?\))", table)
    assert rows[:2] == [("class 0", low, "class 1 (5)", "10", full), ("class 1", full, "", "5", low)]
    assert len(rows) == 10 and [bool(one[2]) for one in rows] == [True, *[False] * 9]
    assert (f"(balanced top-1) is {9.5 / 10:.0%}, and the mean of F1, the harmonic mean of the two (macro F1), is "
            f"{(2 / 3 * 2 + 8) / 10:.0%}.") in table


def test_of_1000_classes_the_20_weakest(tmp_path):
    page = page_of(whole(tmp_path / "run", classes=1000))
    table = page[page.index("Classes, weakest first"):page.index("Worst errors")]
    assert "980 more are in classes.csv." in table and table.count("100% (57% to 100%)") == 38  # recall, precision


def test_guessing_is_named_by_the_most_frequent_class(tmp_path):
    """Class 0 has 10 of 55 images, and 10 of 5,005."""
    page = page_of(whole(tmp_path / "run"))
    assert "guessing18%always naming class 0" in page
    assert "guessing0%always naming class 0" in page_of(whole(tmp_path / "even", classes=1000))


@pytest.mark.parametrize(("classes", "shown"), [(6, False), (19, False), (20, True)])
def test_top_5_is_shown_from_20_classes(classes, shown, tmp_path):
    run = whole(tmp_path / "run", classes=classes)
    compared, _ = comparison([RunData.read(run), RunData.read(run)])
    assert [("top-5" in page) for page in (page_of(run), compared)] == [shown, shown]


def test_what_is_constant_is_a_sentence(tmp_path):
    page = page_of(whole(tmp_path / "run"))
    assert "The momentum is 0.9 throughout. The global batch size is 256 throughout." in page
    assert "momentum, by epoch" not in (tmp_path / "run" / "report.html").read_text().lower()
    assert page.count("as run: 1 (epoch 0)") == 1  # the learning rate, whose plan differs


def test_the_planned_learning_rate_jumps_where_it_does(tmp_path):
    """A warm-up to 5 ends between two whole epochs. The line goes from the last update to the end of the chart."""
    run = RunData.read(whole(tmp_path / "run", epochs=4, rows=[], done=False))
    run.plan["learning_rate_breakpoints"] = [[0, 0.5], [1.4999, 5.0], [1.5, 0.5], [4, 0.0]]
    rates = {row["epoch"]: row["learning_rate"] for row in run.plan["schedule"]}

    def planned(column, steps, end):
        run.steps[:] = steps
        line = sections.planned_line(run, column, column, end)
        assert line.kind == "dashed"
        return [*zip(line.x, line.y, strict=True)]

    ahead = [(1.4999, 5.0), (1.5, 0.5), (2, rates[2])]
    assert planned("learning_rate", [], 2) == [(0, 0.5), (0, rates[0]), (1, rates[1]), *ahead]
    last = {"epoch": 1.25, "learning_rate": 3.0, "momentum": 0.9}
    assert planned("learning_rate", [last], 2) == [(1.25, 3.0), *ahead]
    assert [epoch for epoch, _ in planned("momentum", [last], 4)] == [1.25, 2, 3, 4]
    assert planned("momentum", [last | {"epoch": 3.75}], 3.75) == []


HOLDER = """
import sys
from common.files import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_killed_run_says_so(tmp_path):
    folder = whole(tmp_path / "run", epochs=10, rows=[row(1), row(2)], done=False)
    with subprocess.Popen([sys.executable, "-c", HOLDER, folder / ".lock"], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == "held\n"
        assert "In progress: epoch 2 of 10" in page_of(folder)
        holder.kill()
    page = page_of(folder)
    assert "Killed after epoch 2 of 10: no process holds the lock on the folder." in page
    assert (f"Continue uv run horovodrun --gloo -np 4 python train.py --flagfile={folder}/flags.txt "
            f"--output_dir={folder}") in page
    assert "refresh" not in (folder / "report.html").read_text()
    assert "killed" in comparison([RunData.read(folder), RunData.read(whole(tmp_path / "other"))])[0]


def test_a_run_in_progress_reloads_itself(tmp_path):
    folder = whole(tmp_path / "run", epochs=10, rows=[row(1), row(2)], done=False)
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text() + '{"epoch": 3, "sam')  # being written
    write_json(folder / "run.json", json.loads((folder / "run.json").read_text()) | {"seconds_left": 381})
    page = page_of(folder)
    assert "In progress: epoch 2 of 10, 6:21 left" in page
    assert '<meta http-equiv="refresh" content="10">' in (folder / "report.html").read_text()
    write_json(folder / "run.json", json.loads((folder / "run.json").read_text()) | {"stopped": "the loss is nan"})
    assert "Stopped after epoch 2 of 10: the loss is nan" in page_of(folder)
    assert "refresh" not in (folder / "report.html").read_text()


def test_a_run_before_its_first_evaluation(tmp_path):
    folder = whole(tmp_path / "run", rows=[], done=False)
    (folder / "outcomes.json").unlink()
    page = page_of(folder)
    assert "resnet50 has not been evaluated yet." in page and "In progress: epoch 0 of 3" in page
    assert page.count("first evaluation after epoch 1") == 6 and "110%" not in page and "no finite value" not in page


def test_the_updates_since_the_last_evaluation(tmp_path):
    """The time of the update that the evaluation followed counts for those after it."""
    for rows, shown in (([], "So far: training loss 2, training top-1 40.0%, 128 images/s."),
                        ([row(1)], "Since epoch 1: training loss 1.5, training top-1 50.0%, 64 images/s.")):
        folder = whole(tmp_path / str(len(rows)), rows=rows, done=False)
        steps = [{"step": number, "epoch": epoch, "seconds": seconds, "learning_rate": 2.0, "momentum": 0.9,
                  "batch_size": 256, "loss": loss, "top1": top1} for number, epoch, seconds, loss, top1 in (
            (0, 0.0, 1.0, 3.0, 0.2), (4, 1.02, 5.0, 2.0, 0.4), (6, 1.56, 13.0, 1.0, 0.6))]
        (folder / "steps.jsonl").write_text("".join(as_json(one) + "\n" for one in steps))
        assert f"In progress: epoch 1.56 of 3. {shown}" in page_of(folder)


def test_a_run_of_another_form_is_refused_with_both_versions(tmp_path):
    for name, key in (("run.json", "origins"), ("plan.json", "learning_rate_breakpoints")):
        folder = whole(tmp_path / name)
        write_json(folder / name, {
            other: value for other, value in json.loads((folder / name).read_text()).items() if other != key})
        with pytest.raises(UserError) as raised:
            RunData.read(folder)
        assert str(raised.value) == (f"{folder} is a run of Bigbatch 0.1.0, which {VERSION} does not read: {name} "
                                     f"lacks {key}; use the version that wrote it")


def test_the_average_of_the_weights_has_curves_of_its_own(tmp_path):
    rows = [row(epoch, ema_val_loss=1.0, ema_val_top1=top1, ema_val_top5=0.8, views_val_top1=0.70)
            for epoch, top1 in ((1, 0.6), (2, 0.605), (3, 0.6125))]
    page = page_of(whole(tmp_path / "run", rows=rows))
    assert page.count("average of the weights: 1 (epoch 2)") == 1 and "top-1 of the average, last epoch61%" in page
    assert "average of the weights, top-1: 61.25% (epoch 3)" in page
    assert "mean of views, top-1: 70% (epoch 3)" in page and "top-1 of the views, last epoch70%" in page


def test_imagenet_in_full(tmp_path):
    """1,000 classes, 161 layers, 90 epochs: a page of less than 2 MB, without a matrix that nobody could read."""
    page = page_of(whole(tmp_path / "run", epochs=90, classes=1000, layers=160))
    assert "Confusion matrix" not in page and "class 0 predicted as" not in page
    assert re.search(r"class 0\s*class 1\s*5\s*50.0%", page) and "1 variable without a trust ratio is left out" in page
    assert (tmp_path / "run" / "report.html").stat().st_size < 2e6


def test_several_runs_side_by_side(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [whole(tmp_path / "one" / "run"),
            whole(tmp_path / "two" / "run", learning_rate="4.0", momentum="0.90"),
            whole(tmp_path / "third", rows=[row(1)], done=False)]
    assert report.main(["report", *map(str, runs)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/report.html\n"
    page = html.unescape(re.sub(r"<[^>]*>", " ", (tmp_path / "report.html").read_text()))
    assert re.search(r"run\s+learning rate\s+.*\s+one/run\s+2\s+50%.*\s+third\s+2\s.*\s+two/run\s+4\s", page)
    assert "A tie: the top-1 of one/run and two/run is 50%" in page
    assert "in progress at epoch 1 of 3" in page
    assert page.count("two/run: 50.2% (epoch 3)") == 1  # a point of a curve over epochs


def test_runs_on_different_data_are_shown_and_not_ranked(tmp_path, capsys, monkeypatch):
    """Two classes beside ten. The folder of the data does not matter."""
    monkeypatch.chdir(tmp_path)
    ten, moved, two = (whole(tmp_path / name, data_dir=f"/data/{name}", classes=classes)
                       for name, classes in (("ten", 10), ("moved", 10), ("two", 2)))
    assert report.main(["report", str(ten), str(two)]) == 0
    line = "The runs are not ranked, because their validation sets differ in the number of classes."
    assert capsys.readouterr().err == f"{line}\n" and line in (tmp_path / "report.html").read_text()
    assert report.main(["report", str(ten), str(moved)]) == 0
    assert "A tie: the top-1 of" in capsys.readouterr().err


def test_unfinished_runs_are_named_and_not_ranked(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended, diverged = whole(tmp_path / "a"), whole(tmp_path / "d", learning_rate="1e9", rows=[row(1)], done=False)
    higher = whole(tmp_path / "b", learning_rate="4", rows=[row(1, val_top1=0.98886)], done=False)
    started = whole(tmp_path / "c", learning_rate="8", rows=[], done=False)
    write_json(diverged / "summary.json", DIVERGED)

    def said(*runs) -> str:
        assert report.main(["report", *map(str, runs)]) == 0
        return capsys.readouterr().err.strip()

    assert said(ended, higher) == ("The top-1 is 50%, from 37% to 64% (95% interval) in 1 run. "
                                   "1 unfinished run, b at 99% so far, is not counted.")
    assert said(diverged, higher, started) == ("Every run that has ended diverged. 2 unfinished runs, b at 99% so "
                                               "far and c, are not counted.")
    assert said(higher, started).startswith("No run has ended yet. 2 unfinished runs, ")


def test_single_runs_are_named_by_their_folder_and_compared_in_points(tmp_path):
    """45 of 50 images and 25 of 50. The difference of two single runs has Newcombe's interval, here from SciPy's."""
    runs = [whole(tmp_path / name, learning_rate=rate, rows=[row(1, val_top1=top1)], epochs=epochs, done=done)
            for name, rate, epochs, top1, done in (
                ("a", "1.0", 1, 0.5, True), ("b", "2.0", 2, 0.9, True), ("c", "2.0", 3, 0.95, False))]
    page, said = comparison([RunData.read(run) for run in runs])
    better, worse = (binomtest(right, 50).proportion_ci(method="wilson") for right in (45, 25))
    low = 40 - 100 * math.hypot(0.9 - better.low, worse.high - 0.5)
    high = 40 + 100 * math.hypot(better.high - 0.9, 0.5 - worse.low)
    assert said.startswith("The highest top-1, that of b, is 90%, ") and said.endswith(
        "1 unfinished run, c at 95% so far, is not counted.")
    assert f" It leads a by 40 points (95% interval {low:.0f} to {high:.0f})." in said
    assert re.findall(r'<tr( class=best)?><td><a href="\S+/report.html">(\w+)</a></td>', page) == [
        ("", "c"), (" class=best", "b"), ("", "a")]
    assert f"<td>40 ({low:.0f} to {high:.0f})</td>" in page
    assert f"<small>-40 (-{high:.0f} to -{low:.0f})</small>" in page


def test_near_100_percent_the_error_is_drawn(tmp_path):
    """0.96 has an error of 4 %; without errors, there is no logarithm."""
    for top1, title in ((0.8, "Validation top-1"), (0.96, "Validation error (1 - top-1)"), (1.0, "Validation top-1")):
        runs = [whole(tmp_path / f"{top1}{name}", rows=[row(1, val_top1=one)])
                for name, one in (("a", 0.5), ("b", top1))]
        page, _ = comparison([RunData.read(run) for run in runs])
        assert re.search(r"<figcaption>(Validation .*?)</figcaption>", page)[1] == title
        assert bool(re.search(r"b: 4 ?% \(epoch 1\)", page)) == (top1 == 0.96)


def test_compared_rates_are_those_of_the_updates(tmp_path):
    """Warm-up rises to the last update, 11 of 12. metrics.jsonl has the plan's rate after it, 1."""
    runs = [whole(tmp_path / name, momentum=momentum) for name, momentum in (("a", "0.9"), ("b", "0.8"))]
    for run in runs:
        steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
        (run / "steps.jsonl").write_text("".join(as_json(one | {"learning_rate": one["step"]}) + "\n" for one in steps))
    page, answer = comparison([RunData.read(run) for run in runs])
    assert html.escape(answer) in page
    chart = re.search(r"<figcaption>Learning rate</figcaption>(.*?)</figure>", page, re.DOTALL)[1]
    assert re.findall(r"a: (\d+) \(epoch", chart) == [str(step) for step in range(12)]


def test_runs_are_compared_with_a_target_and_with_the_papers(tmp_path):
    """top-1 is 0.5, 0.501, 0.502 after epochs of 10 s; or 0.5, 0.9, 0.6. The train top-1 is 0.4."""
    several = functools.partial(whole, classes=20)  # of which top-5 is shown
    runs = [several(tmp_path / "a"), several(tmp_path / "b", rows=[
        row(1), row(2, val_top1=0.9), row(3, val_top1=0.6)]), several(tmp_path / "c", rows=[row(1)], done=False)]
    write_json(runs[2] / "summary.json", DIVERGED)
    (runs[1] / "trust_ratios.jsonl").unlink()
    page, _ = comparison([RunData.read(folder) for folder in runs], 0.501)
    text = html.unescape(re.sub(r"<[^>]*>", " ", page))
    results = text[text.index("All runs"):text.index("Settings are")]
    paper = r"\s+30 s\s.*\stop-1 75.03 % \(table 3, experiment 1\)\s+--epochs\s+=3\s+instead of 90"
    interval = r" to \S+ \(95% interval\)\s+"
    assert re.search(rf"a\s+50%\s+37%{interval}50%\s+3\s+2\s+20 s{paper}", results)
    assert re.search(rf"b\s+60%\s+46%{interval}90%\s+2\s+2\s+20 s{paper}", results)
    assert re.search(r"c\s+10.00%\s+.*not reached\s+not reached.*\s+diverged at epoch 1.5 ", results)
    assert re.search(r"Results\s+.*\sall:\s+1\s+,\s+2\s+,\s+3\s+3\s+40%\s+.*diverged at epoch 1.5 of 3\s", text)
    assert "c: -10% (epoch 1)" in text and "b: -50% (epoch 2)" in text  # the generalization gap
    assert page.count(">Trust ratio of each variable<") == 2 and "conv2d_3/kernel, epoch 1" in text  # of a and of c


def test_a_folder_of_runs_is_compared_with_a_colour_for_each_setting(tmp_path, monkeypatch, capsys):
    """A line for each setting, in the order of their numbers. Seeds share a colour; one legend."""
    monkeypatch.chdir(tmp_path)
    for batch in (128, 8):
        for seed in (0, 1):
            whole(tmp_path / "sweep" / f"batch={batch},seed={seed}", batch_size=str(batch), seed=str(seed))
    diverged = whole(tmp_path / "sweep" / "batch=16,seed=0", batch_size="16", learning_rate="1e30", rows=[row(1)],
                     done=False)
    write_json(diverged / "summary.json", DIVERGED)
    (tmp_path / "sweep" / "a.log").write_text("not a run")
    assert report.main(["report", str(tmp_path / "sweep")]) == 0
    page = (tmp_path / "report.html").read_text()
    text = html.unescape(re.sub(r"<[^>]*>", " ", page))
    names = re.findall(r"(batch=\d+,seed=\d)\s+\d+", text[text.index("All runs"):text.index("Settings are")])
    assert names == ["batch=8,seed=0", "batch=8,seed=1", "batch=16,seed=0", "batch=128,seed=0", "batch=128,seed=1"]
    results = text[text.index("learning rate 2:"):text.index("All runs")]
    assert re.search(r"1\s+,\s+2\s+2\s+50%\s", results) and re.search(
        r"batch=16,seed=0\s+1\s+10.00%.*\sbatch size 16, learning rate 1e\+30\s", results)
    assert page.count('class="legend"') == 2 and "1e+30" in text and "000,000" not in text
    _, legend = re.findall(r'<ul class="legend">.*?</ul>', page)  # after that of the differences
    assert re.findall(r'class="line c(\d) ".*?</svg>(.*?)<', legend) == [
        ("0", "batch size 8, learning rate 2 (2 runs)"), ("1", "batch=16,seed=0"),
        ("2", "batch size 128, learning rate 2 (2 runs)")]
    first = re.search(r"Validation top-1</figcaption>(.*?)</figure>", page, re.DOTALL)[1]
    assert re.findall(r'class="line c(\d)', first) == ["0", "0", "1", "2", "2"]
    assert "The global batch size is 256 in all runs." in text
    assert capsys.readouterr().out == f"{tmp_path}/report.html\n"


def test_heat_maps_of_a_page_have_one_scale():
    alone, among = (heat_map.trust_ratios([0], {"a": [1e-3]}, scale) for scale in ((), [1e-3, None, 1e-1]))
    assert "0.001 <i " in alone and "0.001 <i " in among and "</i> 0.1 (" in among and "</i> 0.001 (" in alone


@pytest.mark.parametrize("arguments, code, message", [
    (["{tmp}/run", "--target_top1=0.5"], 2, "give the folders of several"),
    (["{tmp}/run", "{tmp}/run", "--target_top1=75"], 2, "target_top1"),
    (["{tmp}/nothing"], 1, "is not the folder of a run"), ([], 2, "give the folder of a run"),
    (["{tmp}/run", "--outptu=x"], 2, "outptu"), (["{tmp}/run", "--output={tmp}/none/x.html"], 1, "create it first"),
    (["{tmp}/damaged"], 1, "plan.json is damaged"), (["{tmp}/without"], 1, "it contains no run.json")])
def test_a_wrong_command_line_is_one_line(arguments, code, message, tmp_path, capsys):
    whole(tmp_path / "run")
    whole(tmp_path / "damaged")
    (whole(tmp_path / "without") / "run.json").unlink()
    (tmp_path / "damaged" / "plan.json").write_text("{")
    assert report.main(["report", *(word.format(tmp=tmp_path) for word in arguments)]) == code
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) == 1 and message in shown.err and not shown.out
    assert not (tmp_path / "run" / "report.html").exists()


def test_a_folder_that_is_no_run_is_left_out_and_named(tmp_path, capsys, monkeypatch):
    """Nothing but such folders is an error. The folder of an evaluation is known by its predictions."""
    monkeypatch.chdir(tmp_path)
    runs, other, evaluation = [whole(tmp_path / name) for name in "ab"], tmp_path / "other", tmp_path / "evaluation"
    for folder in (other, evaluation):
        folder.mkdir()
    (evaluation / "predictions.csv").touch()
    assert report.main(["report", *map(str, [other, *runs, evaluation])]) == 0
    shown = capsys.readouterr()
    first, second, *_ = shown.err.splitlines()
    assert first == f"reporting.report: left out: {other} is not the folder of a run: it contains no plan.json"
    assert f"left out: {evaluation} is the folder of an evaluation, whose page is its report.html" in second
    assert shown.out == f"{tmp_path}/report.html\n" and str(other) not in (tmp_path / "report.html").read_text()
    assert report.main(["report", str(other), str(evaluation)]) == 1


def test_one_run_is_drawn_again(tmp_path, capsys):
    folder = whole(tmp_path / "run")
    assert report.main(["report", "--output", str(tmp_path / "copy.html"), str(folder)]) == 0
    assert report.main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/copy.html\n{folder}/report.html\n"
    assert (tmp_path / "copy.html").is_file() and (folder / "report.html").is_file()


def test_an_image_is_no_markup(tmp_path):
    """outcomes.json may come from anyone whose run is looked at."""
    folder = whole(tmp_path / "run")
    outcomes = json.loads((folder / "outcomes.json").read_text())
    outcomes["worst"][0]["image"] = 'data:,"><b>bold</b>'
    write_json(folder / "outcomes.json", outcomes)
    page = write_report(folder).read_text()
    assert "<b>bold" not in page and 'src="data:,&quot;&gt;&lt;b&gt;bold&lt;/b&gt;"' in page


@pytest.mark.parametrize(("name", "shown"), [
    ("cats/tom in hat.jpg in /d/validation-00000-of-00001.tfrecord, record 3", "cats/tom in hat.jpg"),
    ("/d/validation-00000-of-00001.tfrecord, record 3", "validation-00000-of-00001.tfrecord, record 3"),
    ("/d/val/cats/tom.jpg", "cats/tom.jpg"),
    ("cats/caf\udce9.jpg in /d/validation-00000-of-00001.tfrecord, record 3", r"cats/caf\udce9.jpg")])  # not UTF-8
def test_worst_errors_show_the_file_that_the_user_has(tmp_path, name, shown):
    folder = whole(tmp_path / "run")
    outcomes = json.loads((folder / "outcomes.json").read_text())
    outcomes["worst"][0]["name"] = name
    write_json(folder / "outcomes.json", outcomes)
    assert f'<span class="muted">{shown}</span>' in write_report(folder).read_text()


@pytest.mark.parametrize("unknown", [{}, {"probability": None}])
def test_worst_errors_of_older_runs_have_no_probability(unknown, tmp_path):
    folder = whole(tmp_path / "run")
    outcomes = json.loads((folder / "outcomes.json").read_text())
    del outcomes["worst"][0]["probability"]
    outcomes["worst"][0] |= unknown
    write_json(folder / "outcomes.json", outcomes)
    assert "class 0 → class 1val.tfrecord, record 3" in page_of(folder)


def test_trust_ratios_of_batch_norm_are_shown_on_request(tmp_path):
    folder = whole(tmp_path / "run")
    layers = {"conv/kernel": [2.0, 0.5, 0.25], "norm/gamma": [1.0, 0.5, 0.5], "norm/beta": [1.0, 0.5, 4.0]}
    (folder / "trust_ratios.jsonl").write_text(as_json({"epoch": 0, "samples": 0, "layers": layers}))
    before, _, folded = write_report(folder).read_text().partition("<summary>2 variables of batch norm</summary>")
    assert "conv/kernel, epoch 0: 0.25" in before and "norm/gamma, epoch 0" not in before
    assert "norm/gamma, epoch 0: 0.5" in folded and "norm/beta, epoch 0: 4" in folded
    assert folded.count(">0.25 <i ") == before.count(">0.25 <i ") == 1  # one scale for both


def test_without_trust_ratios_there_is_no_column_of_them(tmp_path):
    folder = whole(tmp_path / "run")
    (folder / "trust_ratios.jsonl").write_text(as_json({"epoch": 0, "samples": 0, "layers": {"a/kernel": [2.0, 0.5]}}))
    page = write_report(folder).read_text()
    assert "weight / gradient, first step" in page and "trust ratio" not in page.lower()


def test_an_unknown_noise_scale_is_called_so(tmp_path):
    folder = whole(tmp_path / "run")
    known = {"samples": 1000, "batch_size": 256, "updates": 4, "gradient_squared": 0.5, "gradient_squared_error": 1.0,
             "variance": 2.0, "layers": {"a/kernel": None}}
    (folder / "noise_scale.jsonl").write_text("".join(as_json(known | {"epoch": epoch, "noise_scale": scale}) + "\n"
                                                      for epoch, scale in ((1, 64.5), (2, None))))
    page = write_report(folder).read_text()
    assert "<td>64.5</td>" in page and "<td>unknown</td>" in page and "not a number" not in page
