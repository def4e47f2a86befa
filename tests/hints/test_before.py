"""Hints before a training: each is said and silent where it should be, and its flags are its cure."""
import os
import pty
import re
import subprocess
from collections import Counter

import pytest
from conftest import ROOT, environment, launcher
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import train
from common.errors import UserError
from common.run_folder import FLAGS
from hints.before import on_images, on_plan
from plan import flags
from plan.plan import plan_for
from plan.recipes import RECIPES, read
from plan.summary import summary

GOYAL = "--flagfile=lars_1708.03888/section3.1-goyal-resnet50-8192"  # 90 epochs, 5 of warm-up, a tenth at 30, 60, 80
SONY = "--flagfile=sony_1811.05233/table3-experiment4"
ROW = "--flagfile=lars_1708.03888/table7-resnet50"
FEW, MANY = ("--data_dir=DATA --dry_run --train_samples=" + number for number in ("500", "60000"))
RING = "--batch_norm_span=auto --batch_size=32768 --allreduce="


def said(words, workers=1, per_node=1, **images):
    """Returns the hints on a command line. images: arguments of on_images."""
    settings = flags.parse(["train.py", *words.split()])
    plan = plan_for(settings, workers, per_node, settings.run.train_samples or 1437)
    return [*on_plan(settings, plan, per_node), *on_images(settings, **{"counts": {}} | images)]


def kinds(hints) -> set[str]:
    return {re.sub(r"[\d.,]+", "#", hint.text) for hint in hints}


def check_cure(words, hint, **others):
    """With a hint's flags, it is gone, and no other one has come."""
    before, after = kinds(said(words, **others)), kinds(said(" ".join([words, *hint.flags]), **others))
    assert after < before and not kinds([hint]) & after


def on(number, per_node=4):
    return {"workers": number, "per_node": per_node}


CASES = {  # part of a hint -> its flags, command lines that draw it, and others that do not
    "warm-up covers 100%": (
        "--warmup_epochs=0.3333", ["--epochs=2", "--epochs=2 --batch_size=64"],
        ["", "--epochs=6", "--epochs=2 --warmup_epochs=0.5", "--epochs=1 --warmup=none"]),
    "warm-up covers 56% of the training and no update follows epoch 80 of --lr_boundaries": (
        "--warmup_epochs=0.5 --lr_boundaries=3,6,8", [f"{GOYAL} --epochs=9"], [GOYAL, f"{GOYAL} --epochs=81"]),
    "no update follows epoch": (
        "--warmup_epochs=2.5 --lr_boundaries=15,30,40", [f"{GOYAL} --epochs=45"],
        ["--epochs=45 --learning_rate=0:1,60:2", "--epochs=2"]),  # the first is all the user's own
    "--batch_size=32: the learning rate is still": (
        "--lr_scaling=linear --base_batch_size=128", ["--batch_size=32"],
        [f"--batch_size=32 {words}" for words in (
            "--learning_rate=4", "--lr_scaling=sqrt --base_batch_size=128", "--optimizer=sgd", "--model=convnet",
            "--trust_coefficient=0.002", "--momentum_schedule=noise_scale", "--flagfile=small_images")]),
    "the learning rate is still that for the recipe's 2": (
        "--lr_scaling=sqrt --base_batch_size=256", ["--flagfile=study/muon --batch_size=1024"],
        ["--flagfile=study/sgd --batch_size=64 --lr_scaling=none"]),
    "--batch_size=4: the learning rate": (  # the recipe's warm-up starts at 0.5, above the scaled rate
        "--lr_scaling=linear --base_batch_size=128 --warmup_learning_rate=0.025",
        ["--batch_size=4 --batch_norm_span=4"], [""]),
    "--optimizer=sgd: the learning rate is still that for the recipe's lars": (
        "--learning_rate=0.1 --warmup_learning_rate=0.01", ["--optimizer=sgd"],
        ["--optimizer=sgd --learning_rate=1", "--flagfile=study/sgd", f"{FEW} --optimizer=adamw"]),
    "--freeze: the layers": ("--nofreeze", ["--freeze"], [
        f"--freeze {words}" for words in ("--model=mine:network", "--init_checkpoint=RUN --model=resnet20",
                                          "--model=keras:MobileNetV3Small --pretrained", "--nofreeze")]),
    "takes the same pixels 3 times": ("--augmentation=crop", ["--repeats=3 --augmentation=none"], [
        "--repeats=3", "--augmentation=none", "--repeats=3 --augmentation=none --mixup=1",
        "--repeats=3 --augmentation=none --rand_augment=m6-n2-mstd0.5-inc1"]),
    "an exchange of 1,024 workers takes 2,046 messages, one after another, and 124 with": (  # arXiv:1811.05233, 2.2
        "--allreduce=torus", [(f"{RING}ring", on(1024))], [(f"{RING}torus", on(1024)), (f"{RING}ring", on(128))]),
    "2 workers can only form a ring": (
        "--allreduce=ring", [("--allreduce=torus", on(2, 2))], [("--allreduce=torus", on(4)), ("", on(2, 2))]),
    "table7-resnet50-32768: ": (
        "", [f"{ROW}-32768", f"{ROW}-32768 --epochs=45"], [f"{ROW}-32768 --learning_rate=29", f"{ROW}-32768-rate29"]),
    "20 training images of 'cat' and 4 of 'dog'": ("--class_weights=balanced", [
        (FEW, {"counts": {"cat": 20, "dog": 4, "fox": 0}})], [
        (f"{FEW} --class_weights=0.5", {"counts": {"cat": 20, "dog": 4}}), (FEW, {"counts": {"cat": 20, "dog": 5}}),
        ("--flagfile=images --data_dir=DATA", {"counts": {"cat": 20, "dog": 4}})]),
    "--image_size=224 enlarges them 7 times": ("--model=resnet20 --image_size=32", [
        (MANY, {"side": 32, "is_on_cpu": True})], [(MANY, {"side": 80}), (MANY, {"is_on_cpu": True}), *(
            (f"{MANY} {words}", {"side": 32}) for words in (
                "--image_size=224", "--init_checkpoint=RUN --model=resnet50"))]),
    "have about 21 pixels, and --image_size=227 enlarges": ("--image_size=67", [
        (f"{FEW} --model=alexnet", {"side": 21})], [(f"{FEW} --model=alexnet --image_size=80", {"side": 21})]),
    "without a GPU": ("--model=resnet10_narrow --image_size=64", [(MANY, {"is_on_cpu": True})], [
        (MANY, {}), (f"{MANY} --model=resnet18", {"is_on_cpu": True}), (FEW, {"is_on_cpu": True}),
        ("--flagfile=images --data_dir=DATA", {"is_on_cpu": True})])}


def cases(which):
    return [(part, *(one if isinstance(one, tuple) else (one, {}))) for part, case in CASES.items()
            for one in case[which]]


@pytest.mark.parametrize(("part", "words", "others"), cases(1))
def test_a_hint_is_said_and_its_flags_are_its_cure(part, words, others):
    [hint] = [hint for hint in said(words, **others) if part in hint.text]
    assert hint.flags == tuple(CASES[part][0].split()) and str(hint).endswith(CASES[part][0])
    if hint.flags:
        check_cure(words, hint, **others)


@pytest.mark.parametrize(("part", "words", "others"), cases(2))
def test_where_it_would_be_wrong_it_is_silent(part, words, others):
    assert not any(part in hint.text for hint in said(words, **others))


WORDS = ("--epochs=1", "--epochs=9", "--epochs=45", "--batch_size=4", "--batch_size=64", "--batch_size=1024",
         "--batch_norm_span=auto", "--optimizer=sgd", "--optimizer=muon", "--optimizer=adamw", "--freeze",
         "--repeats=3", "--augmentation=none", "--warmup_epochs=0.5", "--allreduce=torus", "--mixup=1",
         "--allreduce=hierarchical", "--lr_scaling=linear", "--model=resnet50", "--model=alexnet", "--image_size=96",
         "--class_weights=balanced", "--pretrained --model=keras:MobileNetV3Small", "--learning_rate=0:0.1,30:0.01")


@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.sampled_from(["", GOYAL, SONY, "--flagfile=study/sgd", "--flagfile=study/muon", FEW, MANY]),
       st.lists(st.sampled_from(WORDS), max_size=5, unique=True), st.sampled_from([(1, 1), (2, 2), (8, 4), (512, 8)]),
       st.sampled_from([{}, {"cat": 20, "dog": 4}]), st.sampled_from([0, 20, 32, 60]), st.booleans())
def test_no_cure_leaves_its_hint_or_brings_another(recipe, words, workers, counts, side, is_on_cpu):
    words = " ".join([recipe, *words])
    others = dict(zip(("workers", "per_node"), workers, strict=True), counts=counts, side=side, is_on_cpu=is_on_cpu)
    try:
        found = said(words, **others)
    except UserError:
        assume(False)
    assert max(Counter(kinds(found)).values(), default=1) == 1
    for hint in found:
        if hint.flags:
            check_cure(words, hint, **others)


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.flags")), ids=lambda path: path.stem)
def test_a_recipe_as_it_is_draws_no_hint_but_its_own_caveat(path, capfd):
    assert train.main(["train.py", f"--flagfile={path}", "--dry_run", "--train_samples=1281167"]) == 0
    caveat = read(path).get("Caveat")
    lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("forecast: about ")]
    assert lines == ([f"caveat: {path.stem}: {caveat}"] if caveat else [])
    if caveat:
        other = caveat.rpartition("; ")[2].partition(" has ")
        instead = flags.parse(["train.py", f"--flagfile={path.parent}/{other[0]}.flags"]).recipe.learning_rate
        assert other[2] == f"{instead} instead" and caveat in (RECIPES / "README.md").read_text()


def test_what_cannot_be_changed_draws_none(tmp_path):
    """A resumed run."""
    (tmp_path / FLAGS).write_text("--data_dir=DATA\n--train_samples=500\n--dry_run\n--model=resnet18\n")
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert said(f"{FEW} --output_dir={tmp_path}", counts={"cat": 20, "dog": 4}, side=20) == []


@pytest.mark.parametrize(("points", "words", "says"), [
    ("1 0.2\n3 0.4\n", "", None), ("0.5 0.2\n90 0.4\n", "", None), ("3 0.4\n", "", None),
    ("90 0.759\n", "", "from epoch 90 to 90, so only 0 of 3"),
    ("1 0.2\n2.5 0.4\n", "", "from epoch 1 to 2.5, so only 2 of 3"),
    ("1 0.2\n2 0.4\n", "--evaluate_every=3", "from epoch 1 to 2, so only 0 of 1"),
    ('{"epoch": 1, "val_top1": 0.2}\n{"epoch": 3, "val_top1": 0.4}\n{"epoch": 4, "val_to', "", None)])
def test_what_is_not_compared_with_the_expected_curve(points, words, says, tmp_path):
    (tmp_path / "curve").write_text(points)
    found = [hint.text for hint in said(f"--epochs=3 --warmup=none --expect={tmp_path}/curve {words}")]
    assert found == (
        [f"--expect={tmp_path}/curve goes {says} evaluations are compared with it"] if says else [])


def test_a_dry_run_in_a_terminal_has_the_summary_the_forecast_and_the_hints():
    """Both outputs are a terminal. There is no JSON."""
    ours, theirs = pty.openpty()
    subprocess.run([*launcher("python", 1), ROOT / "train.py", "--dry_run", "--epochs=2"], cwd=ROOT, check=True,
                   env=environment(), stdin=theirs, stdout=theirs, stderr=theirs, timeout=300)
    os.close(theirs)
    shown = os.read(ours, 65536).decode().splitlines()
    os.close(ours)
    settings = flags.parse(["train.py", "--epochs=2"])
    plan = plan_for(settings, 1, 1, 1437)
    forecast, *hints = shown[1 + len(summary(settings, plan)):]
    assert shown[0].startswith("recipe: ") and shown[1:-1 - len(hints)] == summary(settings, plan)
    assert forecast.startswith("forecast: about ") and hints == [*map(str, said("--epochs=2"))] != []
