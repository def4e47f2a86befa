"""A sweep: real small runs, killed, continued, diverged, failed; its table against the files of its runs."""
import dataclasses
import html
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from conftest import DIGITS, ROOT, environment, rows, warm_python

from common.errors import Stopped
from common.locks import LOCK, locked, this_process
from common.run_folder import RunFolder
from experiments import planned, sweep, trainings
from reporting.run_data import RunData
from reporting.run_log import RunLog
from reporting.sweep import write_sweep
from training.state import Progress

COMMON = ("--model=convnet", "--epochs=1", "--warmup=none")
# A sweep whose runs are forks (warm.py), which start within a second.
PROGRAM = "import sys; sys.executable = {!r}; from experiments import sweep; sys.exit(sweep.main(sys.argv))"


def swept(folder, *words) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(warm_python()), *COMMON, f"--output_dir={folder}", *words], text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment())


def ended(folder, *words) -> tuple[int, str, str]:
    process = swept(folder, *words)
    output, errors = process.communicate(timeout=300)
    return process.returncode, output, errors


THIRD = "learning_rate=0.02,batch_size=0:96,0.4:16,seed=0"
LINES = """
# The second diverges.
--learning_rate=0.02
--momentum=0.8 --learning_rate=1e12  # a comment
"""
GRID = ("--sweep=batch_size=96;0:96,0.4:16", "--seeds=2", "--optimizer=sgd", "--checkpoint_every=0.3")
FIRST_TWO = ("--sweep=learning_rate=0.02", "--sweep=batch_size=96", *GRID[1:])  # of the runs of the grid


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Two lines of flags, one of which diverges, crossed with two batch sizes and two seeds.

    The sweep and its run are killed in the middle.
    """
    folder, file = tmp_path_factory.mktemp("sweep"), tmp_path_factory.mktemp("runs") / "lines.runs"
    file.write_text(LINES)
    words = (f"--runs={file}", *GRID)
    process, third = swept(folder, *words), folder / THIRD
    while process.poll() is None and not (third / "checkpoints" / "checkpoint").is_file():
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    killed = {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("*/summary.json")}
    early = json.loads((folder / "sweep.json").read_text())
    return folder, killed, early, errors, ended(folder, *words)


@pytest.mark.trainings
def test_a_killed_sweep_continues(grid):
    folder, killed, early, errors, (code, output, more) = grid
    assert code == 0, more
    assert len(killed) >= 2 and f"run 3 of 8: {THIRD}" in errors
    assert {row["folder"] for row in early} == {*killed}
    assert all((folder / name / "summary.json").stat().st_mtime_ns == when for name, when in killed.items())
    assert "run 1 of 8" not in more and f"run {len(killed) + 1} of 8" in more
    assert "resumed after step" in (folder / f"{THIRD}.log").read_text()
    assert json.loads(output) == json.loads((folder / "sweep.json").read_text())


@pytest.mark.trainings
def test_the_rows_are_those_of_the_runs(grid):
    folder, *_ = grid
    found = json.loads((folder / "sweep.json").read_text())
    assert [(row["flags"], row["seed"]) for row in found] == [
        (line | {"batch_size": batch}, seed)
        for line in ({"learning_rate": 0.02}, {"learning_rate": 1e12, "momentum": 0.8})
        for batch in (96, "0:96,0.4:16") for seed in (0, 1)]
    for row in found:
        run, measured = folder / row["folder"], rows(folder / row["folder"])
        flags = (run / "flags.txt").read_text().split()
        assert f"--seed={row['seed']}" in flags and f"--batch_size={row['flags']['batch_size']}" in flags
        assert f"--momentum={row['flags'].get('momentum', 0.9)}" in flags
        assert row["diverged"] == (row["flags"]["learning_rate"] == 1e12)
        summary = json.loads((run / "summary.json").read_text())
        assert row["seconds"] >= summary["seconds"] > 0
        if not row["diverged"]:
            assert row["val_top1"] == measured[-1]["val_top1"] and row["diverged_at"] is None
            assert row["best_top1"] == max(one["val_top1"] for one in measured) > 0


@pytest.mark.trainings
def test_a_run_that_diverged_is_a_row(grid):
    folder, *_ = grid
    for row in json.loads((folder / "sweep.json").read_text())[4:]:
        where = row["diverged_at"]
        [line] = [line for line in (folder / f"{row['folder']}.log").read_text().splitlines() if "diverged at" in line]
        step, epoch = re.search(r"diverged at step (\d+) \(epoch ([\d.]+),", line).groups()
        assert where["step"] == int(step) and f"{where['epoch']:.3f}" == epoch
        assert row["diverged"] and row["val_top1"] == 0.1  # of ten classes
        run = RunData.read(folder / row["folder"])
        assert run.summary is None and run.state == "diverged" and run.divergence["diverged_at"] == where


@pytest.mark.trainings
def test_a_training_that_goes_on_after_it_diverged_has_no_summary(grid, tmp_path):
    copy = shutil.copytree(grid[0] / "learning_rate=1e12,momentum=0.8,batch_size=96,seed=1", tmp_path / "run")
    assert (copy / "summary.json").is_file()
    RunLog(RunFolder(copy)).start(SimpleNamespace(folder=copy, plan={"steps": 9}, flags_text="", progress=Progress()))
    assert not (copy / "summary.json").exists()


@pytest.mark.trainings
def test_more_seeds_add_runs_and_other_flags_are_an_error(grid):
    folder, *_ = grid
    code, output, errors = ended(folder, *FIRST_TWO, "--weight_decay=0.5")
    assert code == 1 and "holds a run with --weight_decay=0.0001 instead of 0.5" in errors
    assert len(errors.splitlines()) == 1 and not output
    code, output, errors = ended(folder, *FIRST_TWO, "--seeds=3")
    assert code == 0 and "run 3 of 3" in errors and "run 2 of 3" not in errors
    assert [row["seed"] for row in json.loads(output)] == [0, 1, 2]


@pytest.mark.trainings
def test_a_request_to_stop_reaches_the_run_and_the_same_command_continues(tmp_path):
    words = ("--sweep=weight_decay=0,1e-4", "--epochs=100")
    process = swept(tmp_path, *words)
    metrics = tmp_path / "weight_decay=0,seed=0" / "metrics.jsonl"
    while process.poll() is None and not (metrics.is_file() and metrics.stat().st_size):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 75 and not output
    assert errors.splitlines()[-1] == ("experiments.sweep: weight_decay=0,seed=0 was stopped on request; the same "
                                       "command continues")
    assert list((metrics.parent / "checkpoints").glob("step-*"))


@pytest.mark.trainings
def test_a_second_sweep_waits_for_the_first(grid):
    folder, *_ = grid
    with locked(folder / LOCK):
        process = swept(folder, *FIRST_TWO)
        assert process.stderr.readline() == f"waiting for another sweep ({this_process()}) in {folder} to end\n"
        assert process.poll() is None
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0 and len(json.loads(output)) == 2 and "run 1" not in errors


STUBBORN = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: None)
folder = pathlib.Path(sys.argv[-1].removeprefix("--output_dir="))
folder.mkdir()
while not (folder / "asked").exists():
    time.sleep(0.01)
"""


def test_a_request_that_comes_too_late_for_a_run_stops_the_sweep(tmp_path, monkeypatch):
    """A training that has just ended when it is asked to stop exits with 0."""
    (tmp_path / "train.py").write_text(STUBBORN)
    monkeypatch.setattr(trainings, "TRAIN", tmp_path / "train.py")

    def ask():
        while not (tmp_path / "run").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        (tmp_path / "run" / "asked").touch()

    asking = threading.Thread(target=ask)
    asking.start()
    with pytest.raises(Stopped, match="the same command continues"):
        trainings.train_once(tmp_path / "run", [])
    asking.join()


def test_a_run_that_a_signal_kills_is_said_to_be(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text("import os, signal, sys\nprint('epoch 1/1', file=sys.stderr, flush=True)\n"
                                       "os.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.setattr(trainings, "TRAIN", tmp_path / "train.py")
    assert sweep.main(["experiments.sweep", *COMMON, "--seeds=2", f"--output_dir={tmp_path}/out"]) == 1
    line = f"seed=0 failed: SIGKILL killed it; its output is in {tmp_path}/out/seed=0.log"
    assert capsys.readouterr().err.splitlines()[-1] == f"experiments.sweep: {line}"
    assert f"<b>Stopped</b>: {line}" in (tmp_path / "out" / "sweep.html").read_text()


def test_another_failure_ends_the_sweep_in_one_line_that_names_the_run(tmp_path):
    (tmp_path / "seed=0").write_text("in the place of the run's folder")
    code, output, errors = ended(tmp_path, "--seeds=2")
    assert code == 1 and not output
    first, line = errors.splitlines()
    assert first == "run 1 of 2: seed=0"
    assert re.fullmatch(rf"experiments.sweep: seed=0 failed: .*; its output is in {tmp_path}/seed=0.log", line)
    assert not (tmp_path / "seed=1").exists()


@pytest.mark.parametrize(("words", "code", "message"), [
    (["--sweep=learning_rat=1,2"], 2, "did you mean learning_rate?"), (["--sweep=learning_rate"], 2, "empty value"),
    (["--sweep=learning_rate=1,x"], 2, "learning_rate"), (["--sweep=seed=1,2"], 2, "--seeds=NUMBER"),
    ([], 2, "--sweep"),
    (["--seeds=0"], 2, "seeds"), (["--seeds=2", "--epochz=1"], 2, "epochz"), (["--seeds=2", "digits"], 2, "not a flag"),
    (["--sweep=epochs=1", "--sweep=epochs=2"], 2, "twice"), (["--seeds=2", "--mode=export"], 2, "only trains"),
    (["--sweep=batch_size=96,97", "--micro_batch_size=48"], 1, "batch_size=97,seed=0: "),
    (["--sweep=data_dir=/none"], 1, "/none"),
])
def test_a_wrong_flag_is_one_line_before_any_run(words, code, message, tmp_path, capsys):
    assert sweep.main(["experiments.sweep", *COMMON, *words, f"--output_dir={tmp_path}/sweep"]) == code
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) == 1 and message in shown.err and not shown.out
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(("lines", "words", "code", "message"), [
    ("--optimizer=lars\n--learning_rte=5", [], 2,
     "lines.runs, line 2: Unknown command line flag 'learning_rte'; did you mean --learning_rate?"),
    ("--optimizer=lasr", [], 2, "line 1: "), ("lars", [], 2, "line 1: 'lars' is not a flag"),
    ("--learning_rate=x", [], 2, "line 1: "), ("--exclude='gamma", [], 2, "line 1: No closing quotation"),
    ("--seed=1", [], 2, "--seeds=NUMBER"), ("--output_dir=/tmp/a", [], 2, "--output_dir cannot differ between runs"),
    ("--momentum=0.9 --momentum=0.8", [], 2, "--momentum is given twice"),
    ("--flagfile=digits --flagfile=images", [], 2, "--flagfile is given twice"),
    ("--flagfile=/none", [], 2, "/none"), ("# nothing\n\n", [], 2, "has no line with flags"),
    ("--momentum=0.9", ["--sweep=momentum=0.8"], 2, "lines.runs has --momentum, too"),
    ("--batch_size=97 --micro_batch_size=48", [], 1, "batch_size=97,micro_batch_size=48,seed=0: "),
    (None, [], 1, "lines.runs: No such file or directory"),
    ("--momentum=0.9", ["--search_rate", "--dry_run"], 2, "remove --dry_run"),
    ("--momentum=0.9", ["--search_rate", "--sweep=learning_rate=1,2"], 2, "remove --sweep=learning_rate"),
    ("--learning_rate=0:1,0.5:2", ["--search_rate"], 2, "give one --learning_rate above 0"),
    ("--momentum=0.9", ["--search_data_dir=digits"], 2, "--search_data_dir requires --search_rate"),
])
def test_a_wrong_line_is_one_line_before_any_run(lines, words, code, message, tmp_path, capsys):
    file = tmp_path / "lines.runs"
    if lines is not None:
        file.write_text(lines)
    command = ["experiments.sweep", *COMMON, f"--runs={file}", *words, f"--output_dir={tmp_path}/sweep"]
    assert sweep.main(command) == code
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) == 1 and message in shown.err and not shown.out
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(("text", "values"), [
    ("learning_rate=5,10,20", ("5", "10", "20")), ("learning_rate=5", ("5",)), ("batch_size=64, 64,128", ("64", "128")),
    ("batch_size=0:64,1:128", ("0:64,1:128",)), ("batch_size=64;0:64,1:128", ("64", "0:64,1:128")),
    ("lr_boundaries=30,60", ("30,60",)), ("exclude=gamma,beta;bias", ("gamma,beta", "bias")),
    ("data_dir=digits,/a b", ("digits", "/a b")),
])
def test_what_separates_values(text, values):
    assert planned.swept([text]) == ((text.partition("=")[0], values),)


def test_folders_have_plain_and_distinct_names():
    values = ("/a/b", "/a_b", "/a b", "x" * 300, "x" * 301)
    names = [planned.Planned({"data_dir": value}, 0, ()).name for value in values]
    assert len({*names}) == 5 and all("/" not in name and " " not in name and len(name) < 200 for name in names)


def test_dry_run_writes_a_file_of_flags_for_each_run(tmp_path, capsys):
    """From which train.py reads the same flags as from the command line, with the same default recipe."""
    from plan import flags

    words = ["--sweep=learning_rate=1,2", "--seeds=2", "--seed=5", *COMMON, f"--output_dir={tmp_path}", "--dry_run"]
    for number in (4, 17):
        (tmp_path / f"{number}.flags").write_text("of an earlier, larger sweep")
    assert sweep.main(["experiments.sweep", *words]) == 0
    assert capsys.readouterr().out == "[]\n" and not list(tmp_path.glob("*/"))
    files = sorted(tmp_path.glob("*.flags"))
    assert [file.name for file in files] == ["0.flags", "1.flags", "2.flags", "3.flags"]
    folders = set()
    for number, file in enumerate(files):
        read = flags.parse(["train.py", f"--flagfile={file}"])
        meant = flags.parse(["train.py", *COMMON, f"--learning_rate={1 + number // 2}", f"--seed={5 + number % 2}"])
        assert read.text == meant.text and read.recipe == meant.recipe
        folders.add(read.run.output_dir)
    assert len(folders) == 4


def test_a_sweep_says_nothing_of_flags_that_some_runs_do_not_need(tmp_path, capsys):
    words = ["--sweep=optimizer=sgd,lars", "--trust_coefficient=0.002", "--learning_rate=1",
             f"--output_dir={tmp_path}", "--dry_run"]
    assert sweep.main(["experiments.sweep", *COMMON, *words]) == 0
    assert len(capsys.readouterr().err.splitlines()) == 3  # the runs, the judgement, and the report
    assert "--trust_coefficient=0.002" in (tmp_path / "0.flags").read_text()


def test_a_remark_on_the_schedules_is_said_once_for_all_runs(tmp_path, capsys):
    def said(*words) -> list[str]:
        assert sweep.main(["experiments.sweep", *words, "--seeds=2", f"--output_dir={tmp_path}", "--dry_run"]) == 0
        return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]

    kept = "warm-up covers 100% of the training; keep the recipe's shares with --warmup_epochs="
    assert said("--sweep=learning_rate=5,10", "--epochs=1") == [f"warning: --epochs=1: {kept}0.1667"]
    assert said("--sweep=learning_rate=5,10", "--sweep=epochs=1,2,6") == [
        f"warning: --epochs={epochs}: {kept}{own} (2 of 6 combinations)" for epochs, own in ((1, 0.1667), (2, 0.3333))]
    assert said("--sweep=learning_rate=5,10", "--sweep=batch_size=64,256", "--epochs=6") == []


def test_lines_name_recipes_and_are_crossed_with_values_and_seeds(tmp_path, capsys):
    """A line's flags replace those of its recipe and of the command line; a recipe's seed is its first."""
    from plan import flags

    recipe, file = tmp_path / "mine.flags", tmp_path / "lines.runs"
    recipe.write_text(f"{DIGITS}\n--learning_rate=7\n--momentum=0.8\n--seed=3\n")
    file.write_text(f"--flagfile='{ROOT}/recipes/digits.flags' --deterministic\n"
                    f"--flagfile='{recipe}' --momentum=0.7 --exclude=gamma,beta\n--optimizer=sgd\n--optimizer=sgd\n")
    words = ["--epochs=2", "--weight_decay=0.5", f"--runs={file}", "--sweep=batch_size=64,96", "--seeds=2", "--dry_run",
             f"--output_dir={tmp_path}/sweep"]
    assert sweep.main(["experiments.sweep", *words]) == 0
    found = [flags.parse(["train.py", f"--flagfile={tmp_path}/sweep/{number}.flags"]) for number in range(12)]
    meant = [("--deterministic", 0), (f"--flagfile={recipe} --learning_rate=7 --momentum=0.7 --exclude=gamma,beta", 3),
             ("--optimizer=sgd", 0)]
    assert [one.recipe for one in found] == [
        flags.parse(["train.py", DIGITS, *line.split(), "--epochs=2", "--weight_decay=0.5", f"--batch_size={batch}",
                     f"--seed={seed}"]).recipe
        for line, first in meant for batch in (64, 96) for seed in (first, first + 1)]
    assert [one.launch.is_deterministic for one in found] == [True] * 4 + [False] * 8
    names = [one.run.output_dir.rpartition("/")[2] for one in found]
    assert len({*names}) == 12 and names[0].startswith("flagfile=digits,deterministic=true,batch_size=64,seed=0")
    assert not (tmp_path / "sweep" / "12.flags").exists()


class Peaked:
    """Accuracies that are a function of the rate with one peak. It counts the trainings of each rate."""

    def __init__(self, peak):
        self.peak, self.trained = peak, {}

    def __call__(self, rates):
        self.trained |= {rate: self.trained.get(rate, 0) + 1 for rate in rates}
        return [1 / (1 + abs(math.log(rate / self.peak))) for rate in rates]


@pytest.mark.parametrize("centre", [0.025, 20.0])
@pytest.mark.parametrize(("steps", "fewest", "most"), [
    (0, -3, 3), (2, -3, 3), (-2, -3, 3), (3, -3, 4), (-5, -6, 3), (7, -3, 8), (12, -3, 12)])
def test_the_search_tries_seven_rates_and_more_until_the_best_is_inside(centre, steps, fewest, most):
    """By factors of two; each rate is one float for every way to it."""
    peaked = Peaked(centre * 2.0 ** steps)
    assert sweep.best_rate(centre, peaked) == peaked.peak
    assert sorted(peaked.trained) == [centre * 2.0 ** exponent for exponent in range(fewest, most + 1)]


def test_a_search_in_which_nothing_trains_ends():
    tried = set()
    assert sweep.best_rate(1.0, lambda rates: tried.update(rates) or [0.1] * len(rates)) > 0
    assert len(tried) < 2 * sweep.FARTHEST


@pytest.mark.parametrize(("highest", "best"), [(1, 4 * 2.0 ** -8), (2.0 ** -6, 4 * 2.0 ** -8), (32, 4 * 2.0 ** -8)])
def test_a_rate_that_diverged_is_worse_than_any_other(highest, best):
    """From 4 on, all rates above `highest` diverge. What trains has less than guessing, up to twice the best rate."""
    peaked = Peaked(best)
    found = sweep.best_rate(4.0, lambda rates: [
        None if rate > highest else top1 if rate < 2 * best else 0.01 * top1
        for rate, top1 in zip(rates, peaked(rates), strict=True)])
    assert found == best and min(peaked.trained) == best / 2


def test_a_search_in_which_everything_diverges_has_no_rate():
    tried = set()
    assert sweep.best_rate(1.0, lambda rates: tried.update(rates) or [None] * len(rates)) is None
    assert sorted(tried) == [2.0 ** exponent for exponent in range(-sweep.FARTHEST, 4)]


@pytest.mark.parametrize(("peak", "line"), [
    (2.0 ** 20, "learning rate 4.1e+03 is the highest that the search tries; a search from there goes on\n"),
    (2.0 ** -20, "learning rate 0.000244 is the lowest that the search tries; a search from there goes on\n"),
    (2.0 ** 11, "")])
def test_a_search_that_ends_at_its_edge_says_so(peak, line, capsys):
    sweep.best_rate(1.0, Peaked(peak))
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(("words", "given"), [
    (["--learning_rate=0.25"], 0.25), (["--learning_rate=1"], None), (["--learning_rate=0.25", "--warmup=none"], None),
    (["--learning_rate=0.25", "--warmup=constant"], None),
    (["--learning_rate=0.25", "--lr_scaling=linear", "--base_batch_size=32"], None),
    (["--learning_rate=1", "--lr_scaling=linear", "--base_batch_size=512"], 0.25)])
def test_a_warmup_of_a_search_starts_at_the_rate_at_most(words, given):
    """digits.flags starts from 0.5, with batches of 128."""
    from plan import flags

    recipe = flags.parse(["train.py", *words]).recipe
    assert planned.lower_warmup(recipe) == ([f"--warmup_learning_rate={given}"] if given else [])
    options, common, [values] = planned.read(["sweep", "--search_rate", *words])
    run = planned.planned(options, common, values, 0, recipe.learning_rate.values[0])
    assert flags.parse(["train.py", *run.words]).recipe.warmup_learning_rate == (given or 0.5)


@pytest.mark.trainings
def test_a_line_of_which_every_rate_diverges_is_not_trained_further_and_is_an_error(tmp_path, monkeypatch, capsys):
    """The other line is trained with all seeds, and its rate lies below those at which the search begins."""
    file, trained = tmp_path / "lines.runs", []
    file.write_text("--optimizer=sgd --learning_rate=1\n--optimizer=muon --learning_rate=4\n")

    def train_once(folder, words):
        trained.append(folder.name)
        given = dict(word.removeprefix("--").split("=") for word in words)
        rate = float(given["learning_rate"])
        ending = {"diverged": True, "diverged_at": {"step": 8, "epoch": 0.7}, "classes": 10}
        if given["optimizer"] == "muon" and rate <= 1:
            ending = {"val_top1": max(0.07, 0.9 - 0.1 * abs(math.log2(rate / 0.0625)))}
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps(ending | {"seconds": 1.0, "advice": []}))
        return trainings.Result.read(folder)

    monkeypatch.setattr(sweep, "train_once", train_once)
    words = ["experiments.sweep", *COMMON, f"--runs={file}", "--search_rate", "--seeds=2",
             f"--output_dir={tmp_path}/out"]
    problem = ("every run with optimizer sgd diverged, down to learning rate 0.000244; start the search from a lower "
               "--learning_rate")
    for _ in range(2):
        assert sweep.main(words) == 1
        shown = capsys.readouterr()
        assert not shown.out and shown.err.splitlines()[-1] == f"experiments.sweep: {problem}"
        assert "The mean top-1 is 90.00%, from 90.00% to 90.00% in 2 runs." in shown.err
    found = json.loads((tmp_path / "out" / "sweep.json").read_text())
    finals = [(row["flags"]["optimizer"], row["flags"]["learning_rate"], row["seed"]) for row in found if row["final"]]
    assert finals == [("muon", 0.0625, 0), ("muon", 0.0625, 1)]
    assert len(trained) == len({*trained}) == 16 + 11 + 1  # sgd: 2**-12 to 2**3; muon: 2**-5 to 2**5, and a seed
    assert problem in html.unescape((tmp_path / "out" / "sweep.html").read_text())


@pytest.mark.parametrize(("holdout", "seeds"), [(False, 3), (True, 3), (True, 1)])
def test_a_search_trains_each_rate_once_and_the_best_with_all_seeds(holdout, seeds, tmp_path, monkeypatch, capsys):
    """Two lines with a peak each, killed in the middle. The trainings are emulated: each writes its summary.

    holdout: the search has a dataset of its own, with other peaks than that of the last trainings.
    """
    file, trained = tmp_path / "lines.runs", []
    file.write_text("--optimizer=sgd --learning_rate=1\n--optimizer=lars --learning_rate=4\n")

    def train_once(folder, words):
        trained.append(folder.name)
        if len(trained) == 5:
            raise KeyboardInterrupt
        given = dict(word.removeprefix("--").split("=") for word in words)
        peak = {"sgd": 2.0, "lars": 4 * 0.5 ** 3}[given["optimizer"]]
        if holdout and given.get("data_dir") != "synthetic:64":
            peak = 0.001
        top1 = 0.9 - 0.1 * abs(math.log(float(given["learning_rate"]) / peak)) - 0.01 * int(given["seed"])
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps({"val_top1": top1, "seconds": 1.0, "advice": []}))
        return trainings.Result.read(folder)

    monkeypatch.setattr(sweep, "train_once", train_once)
    words = ["experiments.sweep", *COMMON, f"--runs={file}", "--search_rate", f"--seeds={seeds}",
             f"--output_dir={tmp_path}/out", *["--search_data_dir=synthetic:64"] * holdout]
    assert sweep.main(words) == 130
    assert sweep.main(words) == 0
    assert len(trained) == 1 + len({*trained}) and trained[4] == trained[5]
    found = json.loads(capsys.readouterr().out)
    for optimizer, best, tried in (("sgd", 2, [2.0 ** exponent for exponent in range(-3, 4)]),
                                   ("lars", 0.5, [2.0 ** exponent for exponent in range(-2, 6)])):
        rows = [row["flags"] for row in found if row["flags"]["optimizer"] == optimizer]
        searched = Counter(one["learning_rate"] for one in rows if not holdout or "data_dir" in one)
        last = Counter(one["learning_rate"] for one in rows if "data_dir" not in one)
        assert {*searched.values()} == {1} if holdout else sum(searched.values()) == len(searched) + 2
        assert sorted(searched) == tried and last[best] == seeds
        assert not holdout or [*last] == [best]
        finals = [row for row in found if row["flags"]["optimizer"] == optimizer and row["final"]]
        assert [(row["flags"].get("data_dir"), row["flags"]["learning_rate"], row["seed"]) for row in finals] == [
            (None, best, seed) for seed in range(seeds)]
    named = json.loads((tmp_path / "out" / "best.json").read_text())["best"]
    assert named and all("data_dir" not in flags for flags in named)
    page = (tmp_path / "out" / "sweep.html").read_text()
    if not holdout:
        assert f"{len(found)} runs have ended. A tie: the mean top-1 of optimizer sgd, learning rate 2" in page
        assert "sgd, best learning rate" not in page  # lines over the optimizer would have one point each


@pytest.fixture
def emulated(monkeypatch):
    """Trainings that write their summary at once; their top-1 is 0.9, less the weight decay. Returns their names."""
    trained = []

    def train_once(folder, words):
        trained.append(folder.name)
        folder.mkdir()
        decay = dict(word.removeprefix("--").partition("=")[::2] for word in words).get("weight_decay", 0)
        (folder / "summary.json").write_text(json.dumps({"val_top1": 0.9 - float(decay), "seconds": 1.0, "advice": []}))
        return trainings.Result.read(folder)

    monkeypatch.setattr(sweep, "train_once", train_once)
    return trained


def test_a_best_line_without_a_flag_of_the_others(emulated, tmp_path, capsys):
    (tmp_path / "lines.runs").write_text("--optimizer=sgd\n--optimizer=sgd --weight_decay=0.001\n"
                                         "--optimizer=sgd --weight_decay=0.1\n")
    words = ["experiments.sweep", *COMMON, f"--runs={tmp_path}/lines.runs", f"--output_dir={tmp_path}/out"]
    assert sweep.main(words) == 0 and len(emulated) == 3
    assert json.loads((tmp_path / "out" / "best.json").read_text())["best"][0] == {"optimizer": "sgd"}


def test_a_judgement_that_fails_is_a_line_and_ends_no_training(emulated, tmp_path, monkeypatch, capsys):
    def judgement(judged, grid):
        raise KeyError("weight_decay")

    words = ["experiments.sweep", *COMMON, "--sweep=weight_decay=0.1,0.2", f"--output_dir={tmp_path}"]
    with monkeypatch.context() as failing:
        failing.setattr("reporting.sweep.judgement", judgement)
        assert sweep.main(words) == 0 and len(emulated) == 2
    shown = capsys.readouterr()
    line = "The results could not be judged (KeyError: 'weight_decay'); sweep.json has them."
    assert shown.err.splitlines().count(line) == 1 and line in html.unescape((tmp_path / "sweep.html").read_text())
    assert len(json.loads(shown.out)) == len(json.loads((tmp_path / "sweep.json").read_text())) == 2
    assert sweep.main(words) == 0 and len(emulated) == 2
    assert json.loads((tmp_path / "best.json").read_text())["best"]


def row(rate, batch, seed, top1, diverged=False):
    return {"flags": {"learning_rate": rate, "batch_size": batch}, "seed": seed, "diverged": diverged, "val_top1": top1,
            "best_top1": top1 + 0.01, "best_epoch": 1, "seconds": 60.0, "folder": f"{rate}-{batch}-{seed}",
            "diverged_at": {"step": 1234, "epoch": 0.5} if diverged else None,
            "val_samples": None if diverged else 1000}


def test_the_page_shows_mean_and_range(tmp_path):
    found = [row(1, 64, 0, 0.5), row(1, 64, 1, 0.6), row(1, "0:64,1:128", 0, 0.7), row(4, 64, 0, 0.1, diverged=True)]
    page = write_sweep(tmp_path, found, 8).read_text()
    text = html.unescape(re.sub(r"<[^>]*>", " ", page))
    assert json.loads((tmp_path / "sweep.json").read_text()) == found
    assert "4 of 8 runs have ended, about 4 min left. Too close to call: the mean top-1 is 70.0% with " in text
    assert re.search(r"1\s+64\s+2\s+55%\s+50% to 60%\s+\S+ \(\S+ to \S+\)\s+56%", text)
    assert re.search(r"4\s+64\s+1\s+10.00%\s+\S+ \(\S+ to \S+\)\s+at epoch 0.500", text)
    assert text.count("batch size 64: 55% (learning rate 1)") == 1 and page.count("<figure>") == 3
    assert "batch size 64, single seeds: 60% (learning rate 1)" in text


def test_a_plot_is_scaled_to_its_seeds_and_has_ten_colours(tmp_path):
    """Twelve lines: the two lowest are grey, below the others. Of three seeds, 0.9 and twice 0.5, the interval is wide.
    """
    found = [row(rate, batch, 0, 0.5 + 0.01 * batch + 0.001 * rate) for batch in range(1, 13) for rate in (1, 2)]
    found += [row(2, 12, seed, top1) for seed, top1 in ((1, 0.5), (2, 0.5))]
    page = write_sweep(tmp_path, [one | {"val_samples": 10**7} for one in found], None).read_text()
    chart, legend = re.search(r"<svg class=\"lines\".*?(<g .*?)</svg>(.*?)</figure>", page, re.DOTALL).groups()
    lines = re.findall(r'<g class="line c\d (\w*)', chart)
    assert lines[:2] == ["rest", "rest"] and lines.count("rest") == 2
    assert lines.count("interval") == lines.count("") == 10
    assert legend.count("<li>") == 10 and {f"batch size {batch}<" for batch in (1, 2)}.isdisjoint(
        re.findall("batch size [0-9]+<", legend))
    assert chart.count('class="arrow"') == 2 and "Of more than 10 lines in a plot, the best are in colour." in page
    shown = [float(tick) for tick in re.findall(r'class="end" [^>]*>([\d.]+)%<', page)]
    assert min(shown) > 45 and max(shown) < 75


def test_the_page_has_the_best_command_the_reports_and_shared_advice_once(tmp_path):
    """Of three runs that have not diverged, two share a sentence that the third lacks."""
    found = [row(rate, 64, seed, top1) | {"command": f"uv run train.py --learning_rate={rate}", "advice": advice}
             for rate, seed, top1, advice in ((1, 0, 0.5, ["Train longer.", "Mix."]), (1, 1, 0.52, ["Train longer."]),
                                              (4, 0, 0.9, ["Train longer.", "Mix."]))]
    page = write_sweep(tmp_path, [*found, row(8, 64, 0, 0.1, diverged=True)], 4).read_text()
    assert page.count("<p>Train longer.</p>") == 1 and "Mix." not in page and "4 of 4 runs have ended." in page
    assert '<div class="command"><b>The highest</b> <code>uv run train.py <span>--learning_rate</span>=4</code>' in page
    assert "</span>=1<" not in page
    assert json.loads((tmp_path / "best.json").read_text())["command"] == "uv run train.py --learning_rate=4"
    assert re.findall(r'<a href="(.*?)">', page) == [
        f"{name}/report.html" for name in ("4-64-0", "1-64-0", "1-64-1", "8-64-0")]
    assert re.findall(r"<tr class=best><td>(\d)<", page) == ["4"]
    assert "<title>95% interval: " in page


def test_a_row_says_how_long_the_run_took_also_when_the_sweep_continues(tmp_path, monkeypatch):
    """The folder knows of 1 s, the sweep measures 33 s from the start of the process."""
    def train_once(folder, words):
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps({"val_top1": 0.9, "seconds": 1.0, "advice": []}))
        return dataclasses.replace(trainings.Result.read(folder), seconds=33.0)

    monkeypatch.setattr(sweep, "train_once", train_once)
    words = ["experiments.sweep", *COMMON, "--sweep=weight_decay=0.1,0.2", f"--output_dir={tmp_path}"]
    for _ in range(2):
        assert sweep.main(words) == 0
        assert [one["seconds"] for one in json.loads((tmp_path / "sweep.json").read_text())] == [33.0, 33.0]


def test_numbers_are_in_their_order_and_single_seeds_are_named(tmp_path):
    """Texts stay in the order of the sweep, after the numbers; so do the rows of sweep.json."""
    found = [row(1, batch, 0, 0.5) for batch in (128, "0:64,1:128", "0:32,1:64", 16, 8)]
    text = html.unescape(re.sub(r"<[^>]*>", " ", write_sweep(tmp_path, found, 5).read_text()))
    assert json.loads((tmp_path / "sweep.json").read_text()) == found
    table = text[text.index("Results"):text.index("Settings are")]
    assert re.findall(r" 1 +(\S+) +50.0% +46.9% to 53.1%", table) == ["8", "16", "128", "0:64,1:128", "0:32,1:64"]
    assert "A tie: the top-1 of learning rate 1, batch size 8; learning rate 1, batch size 16" in text


def test_the_average_of_the_weights_ranks_the_runs(tmp_path):
    found = [row(1, 64, 0, 0.9) | {"ema_val_top1": 0.5}, row(2, 64, 0, 0.6) | {"ema_val_top1": None}]
    text = html.unescape(re.sub(r"<[^>]*>", " ", write_sweep(tmp_path, found, 2).read_text()))
    assert "that of learning rate 2, is 60.0%" in text and re.search(r"1\s+64\s+50.0%", text)
    assert "90.0" not in text.replace("91.0", "")


def test_a_sweep_of_seeds_alone_has_a_table(tmp_path):
    found = [row(1, 64, seed, 0.5) | {"flags": {}} for seed in (0, 1)]
    page = write_sweep(tmp_path, found, 2).read_text()
    assert "The mean top-1 is 50.0%, from 50.0% to 50.0% in 2 runs." in page and "<svg" not in page
    assert "0 of 2" in write_sweep(tmp_path, [], 2).read_text()


def test_a_papers_figure_is_next_to_the_measured_one(tmp_path):
    row = {"seed": 0, "diverged": False, "diverged_at": None, "val_top1": 0.7, "ema_val_top1": None, "best_top1": 0.71,
           "best_epoch": 3, "seconds": 60.0, "folder": "a"}
    both = [row | {"flags": {"flagfile": "a"}, "reported": "top-1 73.0 %"}, row | {"flags": {"flagfile": "b"}}]
    page = write_sweep(tmp_path, both, 2).read_text()
    assert page.count(">top-1 73.0 %<") == 2 and page.count("the paper reports") == 2
    assert "the paper reports" not in write_sweep(tmp_path, both[1:], 1).read_text()
