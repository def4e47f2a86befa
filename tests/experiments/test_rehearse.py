"""Rehearsals: the rule against the recipes' own schedules and numbers by hand, verdicts, a real one."""
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import DIGITS, ROOT, environment, rows, warm_python

from experiments import rehearse, sweep, trainings
from experiments.planned import settings_of
from plan.flags import parse
from plan.plan import make_plan
from plan.recipes import RECIPES, recipe_path

SMALL = "synthetic:60000"  # as many as Fashion-MNIST has
SONY = "sony_1811.05233/table3-experiment"
STAYING = ("optimizer", "lr_schedule", "poly_power", "end_learning_rate", "warmup", "warmup_learning_rate", "nesterov",
           "momentum_correction", "weight_decay", "trust_coefficient", "lars_epsilon", "lars_clip", "exclude",
           "loss", "label_smoothing", "mixup", "cutmix", "drop_path", "batch_norm_momentum",
           "batch_norm_statistics", "seed")


def rehearsed(name, *words, longest_warmup=rehearse.WARMUP):
    """A recipe's plan, its rehearsal, and the recipe and the plan of the rehearsal."""
    values = {"flagfile": str(recipe_path(name))} | dict(word.removeprefix("--").split("=") for word in words)
    before, _ = settings_of([], values)
    samples = before.run.train_samples or 1_281_167
    made = rehearse.rehearsal(before.recipe, samples, SMALL, 60_000, longest_warmup)
    after, _ = settings_of([], values, *(f"--{name}={value}" for name, value in made.flags.items()))
    assert all(before.given[name] == after.given[name] for name in STAYING)
    return (make_plan(before.recipe, None, 1, samples), made, after.recipe, make_plan(after.recipe, None, 1, 60_000))


def images(phases, epochs, samples):
    """Updates done by each of these epochs, from the phases of a plan, float (epochs,)."""
    ends, done = [0.0], [0.0]
    for phase in phases:
        ends.append(phase.end_epoch)
        done.append(done[-1] + (phase.end_epoch - phase.start_epoch) * samples / phase.global_batch_size)
    return np.interp(epochs, ends, done)


TRANSFERABLE = [path for path in sorted(RECIPES.rglob("*.flags"))
                if rehearse.small_network(settings_of([], {"flagfile": str(path)})[0].recipe.model)]


@pytest.mark.parametrize("path", TRANSFERABLE, ids=lambda path: path.stem)
def test_each_update_of_a_rehearsal_has_the_rate_of_the_recipe_at_its_place(path):
    """Its place: the same fraction of the updates of warm-up, or of those after it.

    Two updates about a jump do not count, because epochs are cut to whole updates there.
    """
    old, made, _, new = rehearsed(path)
    assert 745 <= new.steps <= 750 and new.phases[0].global_batch_size >= 128
    grid = np.linspace(0, old.epochs, 200_001)
    done = images(old.phases, grid, old.train_samples)
    rate = old.learning_rate
    warm = np.interp(rate.warmup_epochs, grid, done) if rate.warmup != "none" else 0.0
    assert made.warmup == pytest.approx((warm, min(warm, 300)), abs=1e-2)
    assert made.updates == pytest.approx((done[-1], 750), rel=1e-6)
    steps = np.arange(new.steps) + 0.5
    at = np.interp(images(new.phases, [(new.position(int(s)) + new.position(int(s) + 1)) / 2 / 60_000 for s in steps],
                          60_000), [0, made.warmup[1], 750], [0, warm, done[-1]])
    expected = np.array([rate(epoch) for epoch in np.interp(at, done, grid)])
    seen = np.array([new.learning_rate((new.position(int(s)) + new.position(int(s) + 1)) / 2 / 60_000) for s in steps])
    turns = {*rate.boundaries, *rate.base.boundaries, rate.warmup_epochs}
    near = np.min([abs(np.interp(epoch, grid, done) - at) for epoch in turns], axis=0) < 2 * np.gradient(at)
    ratios = [phase.global_batch_size / old.phases[0].global_batch_size for phase in old.phases]
    is_exact = all(ratio * 256 % 32 == 0 for ratio in ratios)  # 303.4 becomes 288
    assert seen[~near] == pytest.approx(expected[~near], rel=0.01, abs=(0.005 if is_exact else 0.05) * rate.peak)
    assert near.mean() < 0.05


def test_configuration_b_by_hand():
    """54K: 1,281,167 / 55,296 = 23.17 updates an epoch; momentum 1 - 0.1 * 55,296 / 32,768 of arXiv:1811.05233."""
    _, made, recipe, plan = rehearsed(f"{SONY}2")
    assert made.warmup == pytest.approx((115.85, 115.85), abs=0.01)
    assert made.updates[0] == pytest.approx(2085.2, abs=0.1)
    assert (recipe.model, recipe.last_gamma, recipe.precision) == ("resnet20", 1, "float32")
    assert (recipe.momentum, recipe.momentum_schedule) == (pytest.approx(0.83125), "constant")
    assert [(phase.global_batch_size, phase.batch_norm_span) for phase in plan.phases] == [(256, 16), (256, 32)]
    warm = 115.85 * 256 / 60_000
    assert plan.learning_rate(warm * 0.9999) == pytest.approx(29, rel=1e-3)
    assert plan.learning_rate(warm * 1.0001) == pytest.approx(29 * (85 / 90) ** 2, rel=1e-3)
    grown = (115.85 + 25 / 85 * (750 - 115.85)) * 256 / 60_000
    assert recipe.batch_norm_span.boundaries[1] == pytest.approx(grown, rel=1e-4)
    assert plan.learning_rate(grown * 1.0001) == pytest.approx(50 * (60 / 90) ** 2, rel=1e-3)


@pytest.mark.parametrize(("name", "words", "batches"), [
    (f"{SONY}4", [], [256, 512, 640, 896]), (f"{SONY}3", [], [256, 288]),  # 256 * 65,536 / 55,296 = 303.4
    ("sysml18/table4-resnet50-16000", ["--batch_norm_span=10"], [260]),
    ("lars_1708.03888/table7-resnet50-8192", ["--batch_norm_span=512"], [512]),
])
def test_the_batch_keeps_its_ratios_in_multiples_of_the_span(name, words, batches):
    plan = rehearsed(name, *words)[-1]
    assert [phase.global_batch_size for phase in plan.phases] == batches


def test_all_updates_of_a_warmup_come_on_top():
    _, made, _, plan = rehearsed(f"{SONY}1", longest_warmup=float("inf"))
    assert made.warmup[1] == made.warmup[0] == pytest.approx(1177.5, abs=0.1)
    assert plan.steps == pytest.approx(1177.5 + 450, abs=2)


def test_linear_scaling_keeps_the_rate_of_the_large_batch():
    """0.1 for each 256 of a batch of 8,192 is 3.2, and 256 samples of it would be 0.1."""
    _, _, recipe, plan = rehearsed("images", "--batch_size=8192")
    assert recipe.lr_scaling == "none" and plan.learning_rate.peak == pytest.approx(3.2, rel=0.01)


def test_the_gammas_that_start_at_zero_by_default_still_do():
    assert rehearsed("mlperf/resnet50-b8192")[2].last_gamma == 0
    assert rehearsed("lars_1708.03888/table7-resnet50-8192")[2].last_gamma is None


def emulated(monkeypatch, result):
    """Emulates trainings: result(recipe) is the top-1, or minus the step at which training diverges."""
    trained = []

    def train_once(folder, words):
        trained.append(folder.name)
        top1 = result(parse(["train.py", *words]).recipe)
        ending = {"val_top1": top1, "best_top1": top1} if top1 >= 0 else {
            "diverged": True, "diverged_at": {"step": -top1, "epoch": 1.0}, "classes": 10}
        ending |= {"seconds": 2.0 if "reference" in folder.name else 1.0, "advice": []}
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps(ending))
        return trainings.Result.read(folder)

    monkeypatch.setattr(sweep, "train_once", train_once)
    return trained


def rehearsal_of(words, folder, capsys):
    command = ["experiments.rehearse", *words, f"--data_dir={SMALL}", f"--output_dir={folder}"]
    assert rehearse.main(command) == 0
    output, errors = capsys.readouterr()
    return [json.loads(line) for line in output.splitlines()], errors


ROWS = ("mlperf/resnet50-b8192", f"{SONY}2", "lars_1708.03888/table2-alexnet-512")


def test_the_verdicts(tmp_path, monkeypatch, capsys):
    """The reference has 0.9. MLPerf's row, 17, trains up to twice its rate; Sony's, of the same family, diverges."""
    trained = emulated(monkeypatch, lambda one: 0.9 if one.optimizer == "sgd" else -117 if one.lars_epsilon else (
        0.73 if max(one.learning_rate.values) <= 34 else 0.71))
    words = [*ROWS, "sysml18/table4-resnet50-16384"]
    found, errors = rehearsal_of(words, tmp_path, capsys)
    assert [(row["recipe"], row["verdict"], row["trains"]) for row in found] == [
        (ROWS[0], "trains", True), (ROWS[1], "diverges at update 117", False), (ROWS[2], "not transferable", None),
        (words[3], "trains", True)]
    assert found[0]["val_top1"] == 0.73 and found[0]["reference_top1"] == 0.9 and found[0]["diverged_at"] is None
    assert found[1]["diverged_at"] == {"step": 117, "epoch": 1.0} and found[1]["val_top1"] == 0.1
    assert found[2]["val_top1"] is None and found[2]["reference_seconds"] is None
    assert [row["reference_seconds"] for row in found if row["trains"] is not None] == [2.0] * 3
    assert len(trained) == 6  # MLPerf's at 1, 2 and 4 times its rate, a reference, Sony's, SysML's
    for line in ("model: resnet50 -> resnet20", "batch_size: 8192 -> 256", "updates: 6,881 -> 750, 9.2 times fewer\n",
                 "updates of warm-up: 782 -> 300, 2.6 times fewer\n", "updates of warm-up: 116 -> 116\n"):
        assert f"  {line}" in errors
    assert errors.count("  trains this recipe, then a reference with SGD: 750 updates and ") == 3
    assert errors.count("  trained this recipe in 1 s and the reference in 2 s\n") == 3
    assert "weight_decay:" not in errors and "--label_smoothing" not in errors
    assert rehearsal_of(words, tmp_path, capsys)[0] == found and len(trained) == 6
    table = json.loads((tmp_path / "sweep.json").read_text())
    assert len(table) == 6 and {row["flags"].get("flagfile") for row in table} == {*words, None} - {ROWS[2]}


def test_lower_than_four_fifths_of_the_reference_is_no_training(tmp_path, monkeypatch, capsys):
    emulated(monkeypatch, lambda one: 0.9 if one.optimizer == "sgd" else 0.71)
    recipe = tmp_path / "mine.flags"
    recipe.write_bytes(recipe_path(ROWS[0]).read_bytes())
    [row], _ = rehearsal_of([str(recipe)], tmp_path / "out", capsys)
    assert (row["recipe"], row["verdict"], row["trains"]) == (str(recipe), "does not train", False)
    assert "flagfile" in json.loads((tmp_path / "out" / "sweep.json").read_text())[0]["flags"]


def test_a_reference_that_diverges_is_no_verdict(tmp_path, monkeypatch, capsys):
    """It counts with 0.1, which any recipe reaches."""
    trained = emulated(monkeypatch, lambda one: -9 if one.optimizer == "sgd" else 0.2)
    [row], _ = rehearsal_of(ROWS[:1], tmp_path, capsys)
    assert (row["verdict"], row["trains"]) == ("does not discriminate: the reference with SGD diverges", None)
    assert len(trained) == 2


def test_a_rate_that_does_not_matter_is_no_verdict(tmp_path, monkeypatch, capsys):
    trained = emulated(monkeypatch, lambda one: 0.9)
    found, _ = rehearsal_of(ROWS[:2], tmp_path, capsys)
    assert [(row["verdict"], row["trains"]) for row in found] == [
        ("does not discriminate: 16 times the rate trains, too", None)] * 2
    assert len(trained) == 7  # five of the first row, one of the second, the reference


@pytest.mark.parametrize(("slowly", "verdict"), [
    (0.8, "does not discriminate: diverges at update 71, but not with all updates of its warm-up"),
    (-200, "diverges at update 71")])
def test_a_divergence_in_a_shortened_warmup_is_seen_without_shortening(slowly, verdict, tmp_path, monkeypatch, capsys):
    trained = emulated(monkeypatch, lambda one: 0.9 if one.optimizer == "sgd" else (
        -71 if one.warmup_epochs < 2 else slowly))
    [row], _ = rehearsal_of([f"{SONY}1"], tmp_path, capsys)
    assert row["verdict"] == verdict and row["trains"] is (False if slowly < 0 else None)
    assert len(trained) == 3


def test_flags_replace_those_of_a_recipe_and_lines_name_several(tmp_path, monkeypatch, capsys):
    trained = emulated(monkeypatch, lambda one: 0.9 if one.optimizer == "sgd" else -5)
    file = tmp_path / "some.runs"
    file.write_text(f"--flagfile='{RECIPES}/{ROWS[0]}.flags'\n--flagfile='{RECIPES}/{ROWS[0]}.flags' --warmup=none\n")
    found, _ = rehearsal_of([str(file), "--trust_coefficient=0.01"], tmp_path / "out", capsys)
    assert [row["recipe"] for row in found] == [f"{ROWS[0]} --trust_coefficient=0.01",
                                                f"{ROWS[0]} --trust_coefficient=0.01 --warmup=none"]
    assert len({*trained}) == 4  # the first one also with all updates of its warm-up, and a reference


@pytest.mark.parametrize(("words", "code", "message"), [
    ([], 2, "RECIPE"), (["mlperf/resnet50-b8193"], 2, "did you mean mlperf/resnet50-b8192?"),
    ([ROWS[0], "--trust=1"], 2, "trust"), ([ROWS[0], "--data_dir=/none"], 1, "/none"),
    ([ROWS[0], "--epochs=5", "--batch_size=0:8192,9:16384"], 2, "remove the phase"),
])
def test_a_wrong_flag_is_one_line_before_any_run(words, code, message, tmp_path, capsys):
    command = ["experiments.rehearse", f"--data_dir={SMALL}", *words, f"--output_dir={tmp_path}/out"]
    assert rehearse.main(command) == code
    shown = capsys.readouterr()
    assert len(shown.err.splitlines()) == 1 and message in shown.err and not shown.out
    assert not (tmp_path / "out").exists()


PROGRAM = "import sys; sys.executable = {!r}; from experiments import rehearse; sys.exit(rehearse.main(sys.argv))"


@pytest.mark.trainings
def test_a_real_rehearsal_on_the_digits(tmp_path):
    """A dozen updates of the digits, which are few, so that nothing is compressed; a rate of 1e12 diverges."""
    recipe = tmp_path / "mine.flags"
    recipe.write_text(f"{DIGITS}\n--train_samples=1437\n--model=alexnet_bn\n--image_size=227\n--batch_size=256\n"
                      "--epochs=2\n--optimizer=sgd\n--learning_rate=1e12\n--batch_norm_span=64\n")
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(warm_python()), recipe, "--data_dir=digits",
                           f"--output_dir={tmp_path}/out"], text=True, capture_output=True, cwd=ROOT, env=environment(),
                          timeout=300)
    assert done.returncode == 0, done.stderr
    row, table = json.loads(done.stdout), json.loads((tmp_path / "out" / "sweep.json").read_text())
    [mine, reference] = [one for one in table if "flagfile" in one["flags"]] + [
        one for one in table if "reference" in one["flags"]]
    [step] = re.findall(r"diverged at step (\d+)", (tmp_path / "out" / f"{mine['folder']}.log").read_text())[:1]
    assert row["verdict"] == f"diverges at update {step}" and row["trains"] is False
    assert row["diverged_at"] == mine["diverged_at"] and row["seconds"] == mine["seconds"]
    measured = rows(tmp_path / "out" / reference["folder"])
    assert row["reference_top1"] == measured[-1]["val_top1"]
    flags = (tmp_path / "out" / reference["folder"] / "flags.txt").read_text().split()
    assert "--model=convnet_bn" in flags and "--optimizer=sgd" in flags and "--image_size=16" in flags
    assert json.loads((tmp_path / "out" / reference["folder"] / "plan.json").read_text())["steps"] == 11
