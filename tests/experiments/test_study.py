"""The study and the papers' claims: files of runs that differ in what they are about; the study's figure and table."""
import json
from dataclasses import asdict

import pytest
from conftest import ROOT, skip

from docs import study
from experiments import planned
from plan.plan import plan_for

FILES = ROOT / "recipes" / "study"
CLAIMS = {  # file -> the flags in which its runs differ
    "warmup": {"flagfile", "learning_rate", "warmup"},
    "batch_size_control": {"batch_size"},
    "label_smoothing": {"label_smoothing"},
    "batch_norm_span": {"batch_norm_span", "micro_batch_size"},
    "trust_ratios": {"batch_size", "micro_batch_size", "learning_rate"},
    "table4": set(),
}


def lines_of(name):
    return planned.lines_of(FILES / f"{name}.runs")


def test_each_claim_has_a_file():
    others = {"cifar10", "losses", "optimizers", "quick", "resnet20", "search"}
    assert {path.stem for path in FILES.glob("*.runs")} == {*CLAIMS, *others}


@pytest.mark.parametrize("name", CLAIMS)
def test_the_runs_of_a_claim_differ_in_nothing_else(name):
    lines = lines_of(name)
    plans = [plan_for(planned.settings_of([], line)[0], 1, 1, 60_000) for line in lines]
    differing = {flag for line in lines for flag in line if len({one.get(flag) for one in lines}) > 1}
    assert differing == CLAIMS[name]
    assert len({plan.epochs for plan in plans}) == 1


def test_each_line_of_the_quick_study_is_one_of_the_search_with_a_rate():
    quick, searched = lines_of("quick"), lines_of("search")
    assert len(quick) == 6 and len(searched) == 8
    without_rates = [{name: value for name, value in line.items() if name != "learning_rate"} for line in searched]
    for line in quick:
        assert {name: value for name, value in line.items() if name != "learning_rate"} in without_rates
    for line in (*quick, *searched):
        settings, _ = planned.settings_of([], line)
        plan = plan_for(settings, 1, 1, 60_000)
        scale = plan.phases[0].global_batch_size / 64 if line["flagfile"].endswith("sgd.flags") else 1
        rate = float(line["learning_rate"])
        assert 0.5 * scale * rate < plan.learning_rate.peak <= scale * rate * (1 + 1e-9)


def test_losses_differ_in_nothing_else_and_the_other_rules_are_those_of_the_search():
    """But for the network, its batch norm and the length."""
    *lambs, sgd, lars = lines_of("losses")
    assert {(one.get("loss"), one.get("rand_augment")) for one in lambs} == {
        (loss, operations) for loss in (None, "binary_cross_entropy") for operations in (None, "m6-n2-mstd0.5-inc1")}
    own = {"flagfile", "micro_batch_size", "learning_rate", "loss", "rand_augment"}
    assert all(line.keys() <= own for line in lambs)
    for line, rule in ((sgd, "sgd"), (lars, "lars")):
        ours, theirs = (asdict(planned.settings_of([], one)[0].recipe) for one in (
            line, {"flagfile": str(FILES / f"{rule}.flags")}))
        differing = {name for name, value in ours.items() if value != theirs[name]}
        assert differing - {"learning_rate"} == {"model", "epochs", "batch_size", "batch_norm_span", "warmup_epochs"}


def test_optimizers_differ_in_their_own_flags_and_each_network_has_all_batches():
    """The search has SGD and LARS up to 4,096 on convnet."""
    own = {"optimizer", "learning_rate", "lr_scaling", "base_batch_size", "weight_decay"}
    kinds, found = {}, set()
    for line in (*lines_of("optimizers"), *lines_of("search")):
        recipe = planned.settings_of([], line)[0].recipe
        common = {name: str(value) for name, value in asdict(recipe).items() if name not in own}
        batch = int(line["batch_size"])
        assert kinds.setdefault((recipe.model, batch), common) == common
        found.add((recipe.model, batch, recipe.optimizer))
    assert found == {(model, batch, name) for model in ("convnet", "resnet10_narrow")
                     for batch in (64, 256, 1024, 4096, 8192) for name in ("sgd", "lars", "lamb", "muon")}


def test_cifar10_has_the_runs_of_fashion_with_the_largest_batches():
    """But for the size of the images and the rate at which a search starts."""
    def known(line):
        return {name: value for name, value in line.items() if name not in ("learning_rate", "image_size")}

    lines, others = lines_of("cifar10"), [known(line) for name in ("optimizers", "search") for line in lines_of(name)]
    assert all(known(line) in others and line["image_size"] == "32" for line in lines)
    assert len({tuple(known(line).items()) for line in lines}) == len(lines) == 4 * 2


def row(rule, batch, rate, seed, top1, final=True, **flags):
    return {"flags": {"flagfile": f"study/{rule}", "batch_size": batch} | flags | {"learning_rate": rate}, "seed": seed,
            "val_top1": top1, "final": final}


ROWS = [*(row("sgd", 64, rate, 0, top1, False, data_dir="holdout") for rate, top1 in ((0.05, 0.99), (0.1, 0.91))),
        *(row("sgd", 64, 0.05, seed, top1) for seed, top1 in enumerate((0.90, 0.91, 0.92))),
        *(row("sgd", 4096, 0.0125, seed, top1) for seed, top1 in enumerate((0.1, 0.8, 0.6))),
        *(row("lars", 4096, 20, seed, top1) for seed, top1 in enumerate((0.85, 0.87, 0.86)))]


def test_the_table_has_mean_and_range_of_the_seeds_without_the_search():
    [task] = study.tasks(ROWS)
    text = study.table(study.results(task), study.noise_range(
        [{"noise_scale": None}, {"noise_scale": 282.4}, {"noise_scale": 4046.0}]))
    assert text.splitlines() == [
        "| batch size | 64 | 4,096 |",
        "| --- | --- | --- |",
        "| SGD, linear scaling and warm-up | 91.0 % (90.0 to 92.0) | 50.0 % (10.0 to 80.0) |",
        "| its best learning rate | 0.05 | 0.0125 |",
        "| LARS and warm-up |  | 86.0 % (85.0 to 87.0) |",
        "| its best learning rate |  | 20 |",
        "",
        "Gradient noise scale: 282 to 4,046 samples"]


def test_the_figure_names_its_lines_and_the_noise_scale(tmp_path, monkeypatch, capsys):
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        skip("needs Matplotlib, which `uv run --group benchmark` installs")
    others = [row("muon", 4096, 0.1, 0, 0.88), row("muon", 4096, 0.02, 0, 0.8, optimizer="lamb"),
              row("muon", 64, 0.1, 0, 0.999, model="resnet10_narrow"),
              row("muon", 64, 0.1, 0, 0.707, data_dir="cifar10")]
    for name, rows in (("one", ROWS), ("two", others)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sweep.json").write_text(json.dumps(rows))
    (tmp_path / "noise_scale.jsonl").write_text('{"noise_scale": 300}\n{"noise_scale": 900}\n')
    study.main(tmp_path / "one", tmp_path / "two", tmp_path)
    shown = capsys.readouterr().out
    convnet, other, cifar = shown.split("| batch size | 64 |\n")
    assert "86.0 %" in convnet and "88.0 %" in convnet and "80.0 %" in convnet
    assert "99.9 %" in other and "70.7 %" in cifar and "99.9 %" not in convnet + cifar and "70.7 %" not in other
    monkeypatch.setattr(study, "FIGURE", tmp_path / "study.svg")
    monkeypatch.setattr(study, "DOCUMENT", tmp_path / "page.md")
    study.DOCUMENT.write_text(f"# A page\n\n| a | b |\n| --- | --- |\n\n{convnet}\n\nMore\n")
    study.main()
    drawn = (tmp_path / "study.svg").read_text()
    for text in (*study.RULES.values(), "gradient noise scale, 300 to 900", "4,096"):
        assert text in drawn
    found, noise = study.read(study.DOCUMENT.read_text())
    assert noise == (300, 900) and found["LARS and warm-up"] == {4096: (20, 86.0, 85.0, 87.0)}
    assert found["SGD, linear scaling and warm-up"][4096] == (0.0125, 50.0, 10.0, 80.0)
