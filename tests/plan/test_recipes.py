"""Every recipe plans, names its row and says what it chose; the page that lists them is up to date."""
import dataclasses
import importlib.util
import json
import math
import re
import statistics
from pathlib import Path

import pytest

from common.errors import UserError
from common.flags import names
from data.augmentation import AUGMENTATIONS
from docs import recipe_list
from experiments import planned
from plan import flags
from plan.plan import Plan, plan_for
from plan.settings import Launch

PAPERS = sorted(path for folder in recipe_list.PAPERS for path in (recipe_list.RECIPES / folder).glob("*.flags"))
IMAGENET = 1281167
# Rows that the issue names, batch by batch: recipe -> (peak rate, steps of each phase on ImageNet).
BY_HAND = {
    "table1-resnet50-8192": (6.4, [90 * IMAGENET // 8192]),
    "section3.1-goyal-resnet50-8192": (3.2, [90 * IMAGENET // 8192]),
    "section2.4-li-resnet152-5120": (1, [110 * IMAGENET // 5120]),
    "table1-smith-resnet50-8192-16384": (3.2, [30 * IMAGENET // 8192, 60 * IMAGENET // 16384]),
    "table7-resnet50-32768-known": (32, [90 * IMAGENET // 32768]),
    "table7-resnet50-16384-rate25": (25, [90 * IMAGENET // 16384]),
    "table7-resnet50-32768-rate29": (29, [90 * IMAGENET // 32768]),
    "a1-resnet50-2048": (0.005, [600 * IMAGENET // 2048]),
    "a2-resnet50-2048": (0.005, [300 * IMAGENET // 2048]),
    "a3-resnet50-2048": (0.008, [100 * IMAGENET // 2048]),
    "resnet50-2048": (2.048, [90 * IMAGENET // 2048]),
    "cifar10-2000": (0.24, [10 * 25]),
    "resnet50-32768": (0.04, [90 * IMAGENET // 32768]),
    "figure1-goyal-resnet50-32768": (12.8, [90 * IMAGENET // 32768]),
    "table3-experiment1": (34, [30 * IMAGENET // 34816, 60 * IMAGENET // 69632]),
    "table3-experiment3": (29, [30 * IMAGENET // 55296, 60 * IMAGENET // 65536]),
    "table3-experiment4": (34, [30 * IMAGENET // 34816, 15 * IMAGENET // 69632, 30 * IMAGENET // 87040,
                                15 * IMAGENET // 121856]),
}


def plan(path, workers) -> Plan:
    settings = flags.parse(["train.py", f"--flagfile={path}"])
    return plan_for(settings, workers, 4, settings.run.train_samples)


def test_there_is_one_for_each_row():
    count = {folder: sum(path.parent.name == folder for path in PAPERS) for folder in recipe_list.PAPERS}
    # LARS: tables 1 (2), 2 (13), 3 (11), 5 (3), 6 (3), 7 (4, and 4 with other rates), sections 2.4 and 3.1 (2
    # each). SysML: table 4 (4), AlexNet, figure 1 (2). Sony: table 3 (5), table 1 (2).
    assert count == {"lars_1708.03888": 44, "sysml18": 7, "sony_1811.05233": 7, "lamb_1904.00962": 1,
                     "rsb_2110.00476": 3, "resnet_1512.03385": 1, "dle": 1, "mlperf": 10, "muon": 3, "airbench": 1}


WITHOUT_BATCH_NORM = {"alexnet", "convnet"}
LEAST_EPOCHS = {"mlperf": 37, "muon": 37, "airbench": 10}  # 90 for the others


def workers_of(path) -> list[int]:
    """The numbers in the first part of a recipe's field Workers."""
    first = re.split(r"[;.]", recipe_list.read(path)["Workers"])[0]
    return [int(number.replace(",", "")) for number in re.findall(r"\d{1,3}(?:,\d{3})+|\d+", first)]


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_it_plans_and_normalizes_the_same_on_each_number_of_workers(path):
    workers = workers_of(path)
    plans = [plan(path, number) for number in workers]
    assert workers[:2] == [1, 8] and [made.workers for made in plans] == workers
    for made in plans:
        assert made.phases[-1].end_epoch == made.epochs >= LEAST_EPOCHS.get(path.parent.name, 90)
    recipe = flags.parse(["train.py", f"--flagfile={path}"]).recipe
    if recipe.model not in WITHOUT_BATCH_NORM:
        spans = {tuple(phase.batch_norm_span for phase in made.phases) for made in plans}
        assert recipe.batch_norm_span and len(spans) == 1


@pytest.mark.parametrize(("name", "nearest"), [
    ("table4-resnet50-16000", "15872 and 16128"), ("resnet50-b1632", "1536 and 1792"),
    ("resnet50-b3264", "3072 and 3328")])
def test_256_workers_do_not_divide_it(name, nearest):
    path, = (path for path in PAPERS if path.stem == name)
    with pytest.raises(UserError, match=nearest):
        plan(path, 256)


@pytest.mark.parametrize(("name", "workers"), [
    ("table3-reference", 1024), ("table3-experiment1", 2176), ("table3-experiment2", 3456),
    ("table3-experiment3", 2048), ("table3-experiment4", 17408), ("table4-resnet50-16000", 1600),
    ("table4-resnet50-32768", 2048), ("alexnet-32768", 2048)])
def test_it_names_its_papers_scale(name, workers):
    path, = (path for path in PAPERS if path.stem == name)
    assert workers in workers_of(path)


# Images per GPU or node, as the papers have them: LARS's sections 4.2 and 4.4; hardware in SysML's table 4, for AlexNet
# in its section 4; images per GPU in the runs of the laboratory's code.
SPANS = {"table[17]-resnet50-*256": 256 // 8, "table[17]-resnet50-*": 256 // 8, "table7-resnet50-*-known": 1024 // 8,
         "table[35]-alexnet-bn-512": 512 // 8, "table[35]-alexnet-bn-4096*": 4096 // 8,
         "table[35]-alexnet-bn-8192*": 4096 // 8, "table4-resnet50-256": 256 // 16,
         "table4-resnet50-16384": 16384 // 1024, "table4-resnet50-16000": 16000 // 1600,
         "table4-resnet50-32768": 32768 // 2048, "alexnet-32768": 32768 // 2048}


def test_batch_norm_covers_what_one_gpu_or_node_of_the_paper_had():
    for folder in ("lars_1708.03888", "sysml18"):
        for path in (recipe_list.RECIPES / folder).glob("table*.flags"):
            spans = [span for pattern, span in SPANS.items() if path.match(f"{pattern}.flags")]
            if spans:
                assert [phase.batch_norm_span for phase in plan(path, 8).phases] == spans[-1:], path.stem


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_the_default_recipes_share_no_statistics(workers):
    for name, span in (("digits", 16), ("images", 32)):
        made = plan_for(flags.parse(["train.py", f"--flagfile={name}"]), workers, 8, 10_000)
        assert [(phase.batch_norm_span, phase.neighbours) for phase in made.phases] == [(span, 1)]


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    path, = (path for path in PAPERS if path.stem == name)
    made = plan(path, 8)
    assert (made.learning_rate.peak, [phase.steps for phase in made.phases]) == BY_HAND[name]


# Rate, warm-up's start and epochs, and top-1 of every row of tables 2 and 3 of arXiv:1708.03888, as printed there.
TABLES = {
    "table2-alexnet": [(512, 0.02, None, 58.8), (4096, 0.01, None, 0.1)] + [
        (4096, rate, (0.001, 2.5), top1) for rate, top1 in zip(
            (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07), (51.0, 52.7, 52.0, 53.0, 53.1, 51.6, 0.1), strict=True)] + [
        (8192, rate, (0.001, 6.0), top1) for rate, top1 in zip(
            (0.02, 0.03, 0.04, 0.05), (29.8, 44.8, 43.1, 0.1), strict=True)],
    "table3-alexnet-bn": [(512, 0.02, None, 60.2)] + [
        (4096, rate, None, top1) for rate, top1 in zip(
            (0.02, 0.16, 0.18, 0.21, 0.25, 0.30), (54.0, 58.1, 58.9, 58.5, 58.3, 57.1), strict=True)] + [
        (8192, rate, None, top1) for rate, top1 in zip(
            (0.23, 0.30, 0.32, 0.41), (57.6, 58.0, 57.7, 56.5), strict=True)],
}


@pytest.mark.parametrize("table", TABLES)
def test_every_row_of_the_tables_is_a_recipe(table):
    found = []
    for path in PAPERS:
        if path.stem.startswith(table):
            recipe = flags.parse(["train.py", f"--flagfile={path}"]).recipe
            warm = (recipe.warmup_learning_rate, recipe.warmup_epochs) if recipe.warmup == "gradual" else None
            top1 = float(recipe_list.read(path)["Reported"].removeprefix("top-1 ").split()[0])
            found.append((*recipe.batch_size.values, *recipe.learning_rate.values, warm, top1))
    assert sorted(found, key=str) == sorted(TABLES[table], key=str)


def test_the_rate_of_the_laboratorys_code_holds_to_the_end_of_warm_up():
    """Its decay counts from there: at 32,768, 32 at epoch 14; decaying from epoch 0 it would be 22.8."""
    path, = (path for path in PAPERS if path.stem == "table7-resnet50-32768-known")
    made = plan(path, 8)
    assert made.learning_rate(14) == 32 and made.learning_rate(52) == pytest.approx(32 / 4)


def points() -> dict[int, dict]:
    """MLPerf's reference convergence points, by batch size, as published with its newest rules for ResNet-50."""
    folder = Path(importlib.util.find_spec("mlperf_logging").origin).parent / "rcp_checker"
    newest = sorted(folder.glob("training_*/rcps_resnet.json"))[-1]
    assert newest.parent.name == "training_4.0.0"
    return {point["BS"]: point for point in json.loads(newest.read_text()).values()}


AFTER_WARM_UP = {1632, 8192, 65536, 67840}  # batch sizes of the points whose decay steps do not include the warm-up


@pytest.mark.parametrize("batch", [1632, 3264, 4096, 8192, 13056, 32768, 49152, 58880, 65536, 67840])
def test_a_recipe_of_mlperf_is_its_point(batch):
    point, path = points()[batch], recipe_list.RECIPES / "mlperf" / f"resnet50-b{batch}.flags"
    settings, given = flags.parse(["train.py", f"--flagfile={path}"]), point["Hyperparams"]
    recipe, made, converged = settings.recipe, plan(path, 8), point["Epochs to converge"]
    steps, warmup = given["opt_learning_rate_decay_steps"], given["opt_learning_rate_warmup_epochs"]
    assert {"optimizer": recipe.optimizer, "opt_base_learning_rate": made.learning_rate.peak,
            "opt_learning_rate_warmup_epochs": recipe.warmup_epochs, "opt_momentum": recipe.momentum,
            "opt_weight_decay": recipe.weight_decay, "model_bn_span": made.phases[0].batch_norm_span,
            "opt_learning_rate_decay_steps": steps} | {
        name: value for name, value in (("opt_end_learning_rate", recipe.end_learning_rate), (
            "opt_learning_rate_decay_poly_power", recipe.poly_power), ("epsilon", recipe.lars_epsilon))
        if name in given} == given
    assert (made.phases[0].global_batch_size, recipe.end_learning_rate, recipe.poly_power, recipe.lars_epsilon,
            recipe.label_smoothing, made.evaluate_every) == (batch, 1e-4, 2, 0, 0.1, 4)
    assert settings.run.stop_at_target and settings.run.target_top1 == 0.759
    reported = recipe_list.read(path)["Reported"]
    assert f"{min(converged)} to {max(converged)} epochs" in reported and f"({len(converged)} runs)" in reported
    in_all = steps + (batch in AFTER_WARM_UP) * warmup * IMAGENET / batch
    assert made.steps == pytest.approx(in_all, rel=3e-3) and made.epochs >= max(converged)


def test_the_decay_steps_of_mlperfs_points_are_read_so_that_they_agree():
    """At the mean epoch of convergence the rate is then about the same share of the peak at all points.

    Read the other way, the schedule ends before, or its rate is still more than 1 % of the peak.
    """
    for batch, point in points().items():
        given, converged = point["Hyperparams"], point["Epochs to converge"]
        warmup, mean = given["opt_learning_rate_warmup_epochs"], statistics.mean(converged)
        made = plan(recipe_list.RECIPES / "mlperf" / f"resnet50-b{batch}.flags", 8)
        assert 0.0015 < made.learning_rate(mean) / made.learning_rate.peak < 0.0075, batch
        other = given["opt_learning_rate_decay_steps"] * batch / IMAGENET + (batch not in AFTER_WARM_UP) * warmup
        assert other < max(converged) - 1 or ((other - mean) / (other - warmup)) ** 2 > 0.01, batch


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_its_comment_says_where_it_comes_from(path):
    fields = recipe_list.read(path)
    assert all(fields[name] for name in ("title", "Row", "Reported", "Left open", "Workers"))
    sourced = [name for part in fields["Sources"].split("; ") for name in part.partition(": ")[0].split(", ")]
    given = [line[2:].partition("=")[0] for line in path.read_text().splitlines() if line.startswith("--")]
    assert sorted(sourced) == sorted({*given} - {"data_dir", "train_samples"})  # each setting once


@pytest.mark.parametrize("path", sorted(recipe_list.RECIPES.rglob("*.flags")), ids=lambda path: path.stem)
def test_it_plans_alone_and_never_mentions_workers_or_devices(path):
    assert not {*names(Launch), "output_dir"} & recipe_list.read(path).keys()
    assert plan_for(flags.parse(["train.py", f"--flagfile={path}"]), 1, 1, 20_000).steps


def test_the_page_lists_them():
    assert (recipe_list.RECIPES / "README.md").read_text() == recipe_list.page()
    assert all(path.name in recipe_list.page() for path in PAPERS)


def test_a_residual_network_starts_as_its_source_says():
    """Sony takes the initial values of the LARS paper, whose file has gammas of 1; Goyal et al. start the last at 0."""
    def of(pattern):
        return {(recipe.model, recipe.last_gamma, recipe.exclude) for path in PAPERS if path.match(pattern)
                for recipe in [flags.parse(["train.py", f"--flagfile={path}"]).recipe]}

    assert of("table3-experiment[14].flags") == {("resnet50", 1.0, ("gamma", "beta", "bias"))}  # configuration A
    assert of("table3-experiment[23].flags") == {("resnet50", 1.0, ())}
    assert of("section3.1-goyal-*.flags") == {("resnet50", 0.0, ("gamma", "beta"))}
    assert {model for model, *_ in of("table7-resnet50-*-rate*.flags")} == {"resnet50_nvcaffe"}


@pytest.mark.parametrize("path", sorted(recipe_list.RECIPES.glob("*_*/table*.runs"))
                         + sorted(recipe_list.RECIPES.glob("sysml18/table*.runs")), ids=lambda path: path.stem)
def test_a_table_is_one_sweep(path):
    """The lines of tableN.runs are the recipes tableN-..., which experiments.sweep takes. Sony's stand there twice."""
    recipes = [one.name for one in sorted(path.parent.glob(f"{path.stem}-*.flags"), key=lambda one: natural(one.name))]
    lines = planned.lines_of(path)
    assert [Path(line["flagfile"]).name for line in lines if len(line) == 1] == recipes
    others = [(Path(line["flagfile"]).name, line["trust_coefficient"]) for line in lines if len(line) > 1]
    assert others == ([(name, "0.01") for name in recipes] if "sony" in path.parent.name else [])


def test_sonys_rows_have_the_coefficient_of_its_library():
    """NNL's default, as its solvers.yaml has it; section 3.2 prints 0.01, with which the rows diverge."""
    rows = [path for path in PAPERS if path.match("sony*/table3-*.flags")]
    assert len(rows) == 5
    for path in rows:
        fields = recipe_list.read(path)
        assert fields["trust_coefficient"] == "0.001"
        assert "solvers.yaml" in fields["Sources"] and "section 3.2 prints 0.01" in fields["Left open"]


def test_sysmls_rows_follow_intel_caffe():
    """Its LARS adapts every parameter, and poly counts from iteration 0. AlexNet-BN's values are its solver's."""
    recipes = {path.stem: flags.parse(["train.py", f"--flagfile={path}"]).recipe
               for path in PAPERS if path.parent.name == "sysml18"}
    assert {(one.exclude, one.decay_from) for one in recipes.values() if one.optimizer == "lars"} == {((), "start")}
    alexnet = recipes["alexnet-32768"]
    assert round(alexnet.warmup_epochs * IMAGENET / 32768) == 400  # iterations
    assert (alexnet.learning_rate.values, alexnet.warmup_learning_rate, alexnet.poly_power, alexnet.momentum,
            alexnet.weight_decay, alexnet.trust_coefficient) == ([32], 1, 2, 0.9, 0.0005, 0.001)


def test_nvidias_rate_is_that_of_its_script():
    """Per step, 0.256 a GPU with 256 images: linear from 0 for 8 epochs, else the cosine of all 90, from epoch 0."""
    made = plan(recipe_list.RECIPES / "dle" / "resnet50-2048.flags", 8)
    for epoch in (0, 4, 7.9, 8, 30, 89):
        expected = 2.048 * (epoch / 8 if epoch < 8 else (1 + math.cos(math.pi * epoch / 90)) / 2)
        assert made.learning_rate(epoch) == pytest.approx(expected)


def test_resnet20s_rate_falls_at_32000_and_48000_of_64000_updates():
    made = plan(recipe_list.RECIPES / "resnet_1512.03385" / "table6-resnet20-128.flags", 1)
    rates = [made.learning_rate(made.epoch_of(step)) for step in (0, 31_999, 32_000, 47_999, 48_000, 63_999)]
    assert made.steps == 64_000 and rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    assert [interval.epoch for interval in made.intervals()] == [*range(1, 164), 163.84]


def test_lambs_rate_is_that_of_its_authors_code():
    """782 steps up, then a straight line to 0 at step 3,519."""
    made = plan(recipe_list.RECIPES / "lamb_1904.00962" / "resnet50-32768.flags", 8)
    for step in (0, 391, 1000, 3000):
        expected = 0.04 * (step / 782 if step <= 782 else (3519 - step) / (3519 - 782))
        assert made.learning_rate(made.epoch_of(step)) == pytest.approx(expected, rel=2e-3)


# "ResNet strikes back": epochs, rate, weight decay, label smoothing, mixup, mean magnitude of RandAugment, stochastic
# depth, pixels in training, copies of an image in an epoch; the rate at three epochs, from 1e-4 up to epoch 5, then the
# cosine of all from epoch 0.
STRIKES_BACK = {
    "a1": ((600, 0.005, 0.01, 0.1, 0.2, 7, 0.05, 224, 3), {2.5: 0.00255, 300: 0.0025005, 500: 0.00033587}),
    "a2": ((300, 0.005, 0.02, 0.0, 0.1, 7, 0.05, 224, 3), {2.5: 0.00255, 150: 0.0025005, 250: 0.00033587}),
    "a3": ((100, 0.008, 0.02, 0.0, 0.1, 6, 0.0, 160, 1), {2.5: 0.00405, 50: 0.0040005, 75: 0.00117242}),
}


@pytest.mark.parametrize("row", STRIKES_BACK)
def test_resnet_strikes_back_by_hand(row):
    path = recipe_list.RECIPES / "rsb_2110.00476" / f"{row}-resnet50-2048.flags"
    recipe, made, (settings, rates) = flags.parse(["", f"--flagfile={path}"]).recipe, plan(path, 4), STRIKES_BACK[row]
    augment = recipe.rand_augment
    assert settings == (recipe.epochs, *recipe.learning_rate.values, recipe.weight_decay, recipe.label_smoothing,
                        recipe.mixup, augment.magnitude, recipe.drop_path, *recipe.image_size.values, recipe.repeats)
    assert (recipe.optimizer, recipe.loss, recipe.clip_norm, recipe.cutmix, recipe.validation_image_size) == (
        "lamb", "binary_cross_entropy", 1, 1, 224)
    assert (augment.count, augment.deviation, recipe.precision, recipe.exclude) == (
        2, 0.5, "mixed_float16", ("gamma", "beta", "bias"))
    assert AUGMENTATIONS[recipe.augmentation] == dataclasses.replace(AUGMENTATIONS["crop_flip"], enlarge=1 / 0.95)
    for epoch, rate in rates.items():
        assert made.learning_rate(epoch) == pytest.approx(rate, rel=1e-4)
    assert made.learning_rate(recipe.epochs) == pytest.approx(1e-6)
    assert [phase.batch_norm_span for phase in made.phases] == [2048 // 4]


def natural(name: str) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
