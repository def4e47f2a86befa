"""Remarks on plans: on schedules that the command line breaks, and on numbers of workers."""
import json
import math
import os
import pty
import subprocess

import pytest
from conftest import ROOT, environment, launcher, run
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from plan import flags
from plan.plan import plan_for
from plan.recipes import RECIPES
from plan.remarks import MOST_NEIGHBOURS, SMALL_MICRO_BATCH, on_schedules, remarks
from plan.summary import summary

GOYAL = "lars_1708.03888/section3.1-goyal-resnet50-8192"  # 90 epochs, 5 of warm-up, a tenth at 30, 60 and 80
SONY = "sony_1811.05233/table3-experiment4"


def on_schedule(*words) -> list[str]:
    return on_schedules(flags.parse(["train.py", *words]))


def on_plan(*words) -> list[str]:
    settings = flags.parse(["train.py", *words])
    return remarks(settings, plan_for(settings, 2, 2, settings.run.train_samples or 1437))


def on_workers(recipe, workers, *words, per_node=4) -> list[str]:
    settings = flags.parse(["train.py", f"--flagfile={recipe}", *words])
    plan = plan_for(settings, workers, per_node, settings.run.train_samples)
    return [line for line in remarks(settings, plan, per_node) if line.startswith(f"{workers:,} worker")]


@pytest.mark.parametrize(("recipe", "words", "other"), [
    ("table7-resnet50-32768", [], "table7-resnet50-32768-rate29"),
    ("table7-resnet50-16384", ["--epochs=45"], "table7-resnet50-16384-rate25"),
    ("table7-resnet50-32768", ["--learning_rate=29"], None), ("table7-resnet50-32768-rate29", [], None)])
def test_a_row_that_is_known_to_be_wrong_names_the_one_to_train(recipe, words, other):
    """The other one is a recipe with the rate that the caveat says."""
    told = [line for line in on_plan(f"--flagfile=lars_1708.03888/{recipe}", *words) if line.startswith(f"{recipe}: ")]
    assert len(told) == bool(other)
    if other:
        instead = flags.parse(["train.py", f"--flagfile=lars_1708.03888/{other}"]).recipe.learning_rate.values[0]
        assert "cannot be right" in told[0] and told[0].endswith(f"; {other} has {instead:g} instead")
        assert told[0].partition(": ")[2] in (RECIPES / "README.md").read_text()


@pytest.mark.parametrize(("words", "is_told"), [
    ([], True), (["--model=mine:network"], False), (["--init_checkpoint=RUN", "--model=resnet20"], False),
    (["--model=keras:MobileNetV3Small", "--pretrained"], False), (["--nofreeze"], False)])
def test_frozen_random_weights_are_told(words, is_told):
    assert any(line.startswith("--freeze: ") for line in on_plan("--freeze", *words)) == is_told


@pytest.mark.parametrize(("words", "broken", "kept"), [
    (["--epochs=2"], "warm-up covers 100% of the training", "--warmup_epochs=0.3333"),
    (["--epochs=4"], "warm-up covers 50% of the training", "--warmup_epochs=0.6667"),
    ([f"--flagfile={GOYAL}", "--epochs=45"], "no update follows epoch 80 of --lr_boundaries",
     "--warmup_epochs=2.5 --lr_boundaries=15,30,40"),
    ([f"--flagfile={GOYAL}", "--epochs=9"],
     "warm-up covers 56% of the training and no update follows epoch 80 of --lr_boundaries",
     "--warmup_epochs=0.5 --lr_boundaries=3,6,8"),
    (["--flagfile=sony_1811.05233/table3-experiment2", "--epochs=45", "--batch_norm_span=16",
      "--learning_rate=0:1,60:2"],
     "no update follows epoch 60 of --learning_rate", "--warmup_epochs=2.5")])
def test_a_schedule_that_epochs_break_is_one_line_and_its_flags_mend_it(words, broken, kept):
    [line] = on_schedule(*words)
    epochs = next(word for word in words if word.startswith("--epochs"))
    assert line == f"{epochs}: {broken}; keep the recipe's shares with {kept}"
    if "--learning_rate" not in broken:  # which the command line has, too
        assert on_schedule(*words, *kept.split()) == []


@pytest.mark.parametrize("words", [[], ["--epochs=6"], ["--epochs=2", "--warmup_epochs=0.5"],
                                   ["--epochs=1", "--warmup=none"], [f"--flagfile={GOYAL}", "--epochs=81"],
                                   ["--batch_size=64", "--learning_rate=4"], ["--batch_size=128"],
                                   ["--batch_size=64", "--lr_scaling=sqrt", "--base_batch_size=128"],
                                   ["--batch_size=256", "--optimizer=sgd"], ["--batch_size=256", "--model=convnet"],
                                   ["--batch_size=256", "--trust_coefficient=0.002"],
                                   ["--batch_size=256", "--momentum_schedule=noise_scale"],
                                   ["--flagfile=study/sgd", "--batch_size=64", "--lr_scaling=none"],
                                   ["--flagfile=small_images", "--batch_size=32"]])  # named, it has no batch size
def test_what_keeps_the_schedule_draws_no_remark(words):
    assert on_schedule(*words) == []


def test_the_factors_for_another_batch_size_are_those_of_the_flags_it_names():
    def peak(*words) -> float:
        settings = flags.parse(["train.py", "--batch_size=32", *words])
        return plan_for(settings, 1, 1, 1437).learning_rate.peak

    [line] = on_schedule("--batch_size=32")
    linear, sqrt = (peak(f"--lr_scaling={rule}", "--base_batch_size=128") for rule in ("linear", "sqrt"))
    assert "--lr_scaling=linear --base_batch_size=128 would" in line and peak() == 8
    assert line.endswith(f"multiply it by {linear / 8:g}, sqrt by {sqrt / 8:g}") and (linear, sqrt) == (2, 4)
    [line] = on_schedule("--flagfile=study/muon", "--batch_size=1024")
    assert line.endswith("--lr_scaling=sqrt --base_batch_size=256 would multiply it by 2, linear by 4")


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.flags")), ids=lambda path: path.stem)
def test_no_recipe_draws_a_remark_on_its_schedule(path):
    assert on_schedule(f"--flagfile={path}") == []


@pytest.mark.parametrize(("recipe", "workers", "problem", "nearest"), [
    (SONY, 1024, "micro-batches of size 2, 4, 1, 1 with 17 to 119 accumulation steps and batch norm synchronized over "
                 "32 workers", "544 or 1,088 workers do better"),
    ("dle/resnet50-2048", 128, "batch norm synchronized over 16 workers", "64 workers do better")])
def test_workers_that_a_recipe_does_not_fit(recipe, workers, problem, nearest):
    assert on_workers(recipe, workers) == [f"{workers:,} workers: {problem}; {nearest}"]


@pytest.mark.parametrize(("recipe", "workers", "words"), [
    (SONY, 1088, []), (SONY, 8, []), ("dle/resnet50-2048", 8, []), ("dle/resnet50-2048", 16, []),
    (SONY, 2176, ["--workers_schedule=0:2176,30:4352,45:2720,75:3808"]),
    ("digits", 1, ["--batch_size=254", "--batch_norm_span=auto", "--micro_batch_size=2", "--train_samples=1437"])])
def test_workers_that_it_fits_or_that_are_chosen_phase_by_phase(recipe, workers, words):
    assert on_workers(recipe, workers, *words) == []


@pytest.mark.parametrize(("words", "workers", "per_node", "messages"), [
    ("--allreduce=ring", 1024, 4, (2046, 124)), ("--allreduce=ring", 256, 1, (510, 60)),
    ("--allreduce=ring", 255, 1, None), ("--allreduce=ring", 257, 1, None),  # a prime number of workers has no torus
    ("--allreduce=torus", 1024, 4, None), ("--allreduce=hierarchical", 1024, 4, None)])
def test_a_ring_of_many_workers_is_slow(words, workers, per_node, messages):
    """arXiv:1811.05233, section 2.2: 2(N - 1) operations in a ring, 4(X - 1) along rows and columns of a square."""
    settings = flags.parse(["train.py", f"--batch_size={32 * workers}", "--batch_norm_span=auto", words])
    plan = plan_for(settings, workers, per_node, 1_281_167)
    found = [line for line in remarks(settings, plan, per_node) if line.startswith("--allreduce=ring: ")]
    assert len(found) == bool(messages)
    if messages:
        ring, torus = (f"{number:,}" for number in messages)
        assert f" {ring} messages, one after another, and {torus} with --allreduce=torus" in found[0]


@hypothesis_settings(max_examples=20, deadline=None)
@given(st.integers(1, 200), st.integers(1, 60), st.sampled_from([1, 2, 4, 8]))
def test_the_nearest_workers_are_those_of_a_search_through_all(factor, nodes, per_node):
    """All numbers on whole nodes are planned one by one, each as if it were given."""
    workers = nodes * per_node
    batch = factor * workers
    words = (f"--batch_size={batch}", "--train_samples=100000", "--batch_norm_span=auto")

    def phases(number):
        settings = flags.parse(["train.py", "--flagfile=digits", *words])
        return plan_for(settings, number, per_node, 100_000).phases

    def is_easy(number):
        return all(phase.batch_norm_span // phase.micro_batch_size <= MOST_NEIGHBOURS
                   and (phase.accumulation_steps == 1 or phase.micro_batch_size >= SMALL_MICRO_BATCH)
                   for phase in phases(number))

    said = on_workers("digits", workers, *words, per_node=per_node)
    assert bool(said) == (not is_easy(workers))
    if said:
        better = [number for number in range(per_node, batch + 1, per_node) if batch % number == 0 and is_easy(number)]
        below = max((number for number in better if number < workers), default=math.nan)
        above = min((number for number in better if number > workers), default=math.nan)
        named = [f"{number:,}" for number in (below, above) if not math.isnan(number)]
        assert said[0].endswith(f"{' or '.join(named)} workers do better" if named else "may do better")


@pytest.mark.parametrize(("words", "says"), [
    (["--repeats=3", "--augmentation=none"], "--repeats=3: --augmentation=none is not random, so an epoch takes the "
     "same pixels 3 times; add --rand_augment or choose another --augmentation"),
    (["--repeats=3"], None), (["--augmentation=none"], None),
    (["--repeats=3", "--augmentation=none", "--mixup=1"], None),
    (["--repeats=3", "--augmentation=none", "--rand_augment=m6-n2-mstd0.5-inc1"], None),
    (["--optimizer=muon", "--log_trust_ratios"], "--log_trust_ratios: muon has no trust ratios that could be recorded; "
                                                 "norms of weights and gradients are"),
    (["--log_trust_ratios"], None)])
def test_a_flag_that_does_little_beside_the_others(words, says):
    """digits.flags has LARS and random crops."""
    found = [line for line in on_plan(*words) if line.startswith(("--repeats", "--log_trust_ratios"))]
    assert found == ([says] if says else [])


@pytest.mark.parametrize(("points", "words", "says"), [
    ("1 0.2\n3 0.4\n", [], None), ("0.5 0.2\n90 0.4\n", [], None), ("3 0.4\n", [], None),
    ("90 0.759\n", [], "no evaluation is compared, because the curve goes from epoch 90 to 90, and evaluations follow "
                       "epochs 1 to 3"),
    ("1 0.2\n2 0.4\n", ["--evaluate_every=3"], "no evaluation is compared, because the curve goes from epoch 1 to 2, "
                                               "and evaluations follow epochs 3 to 3"),
    ("1 0.2\n2.5 0.4\n", [], "evaluations after epoch 2 are not compared, because the curve ends at epoch 2.5"),
    ('{"epoch": 1, "val_top1": 0.2}\n{"epoch": 3, "val_top1": 0.4}\n{"epoch": 4, "val_to', [],
     "its last line is half-written and was left out")])
def test_what_is_not_compared_with_the_expected_curve(points, words, says, tmp_path):
    (tmp_path / "curve").write_text(points)
    found = [line for line in on_plan("--epochs=3", f"--expect={tmp_path}/curve", *words) if "--expect" in line]
    assert found == ([f"--expect={tmp_path}/curve: {says}"] if says else [])


SMALL = ("--data_dir=DATA", "--train_samples=100")  # batches of 8


@pytest.mark.parametrize(("words", "line"), [
    (["--allreduce=torus"], "--allreduce=torus continues with a ring: 2 workers can only form a ring, because 2 is "
                            "prime"),
    (["--order=file"], "--order=file: the order within a file is fixed, and batches depend on the number of workers"),
    (["--order=file", "--cutmix=1"], "--order=file: the order within a file is fixed, and batches, and the pairs of "
                                     "--mixup and --cutmix, depend on the number of workers"),
    (["--deterministic"], "--deterministic: on another number of workers, the same bits need the same "
                          "--micro_batch_size, which is 64 here"),
    (["--deterministic", "--batch_size=0:32,4:128"], "--deterministic: on another number of workers, the same bits "
                                                     "need a --micro_batch_size, given to each run"),
    (SMALL, "less than 50,000 images: a network that knows ImageNet usually reaches more, with "
            "--model=keras:MobileNetV3Small --pretrained"),
    (["--batch_size=100"], "--batch_norm_span: that of the recipe does not divide --batch_size or --micro_batch_size; "
                           "batch norm covers a micro-batch, which depends on the number of workers"),
    (["--batch_size=100", "--micro_batch_size=10"], "--batch_norm_span: that of the recipe does not divide "
                                                    "--batch_size or --micro_batch_size; batch norm covers a "
                                                    "micro-batch"),
    (["--batch_size=0:128,4:1536"], "--batch_size=1536 is larger than the training set: an update reads some of its "
                                    "1437 images more than once")])
def test_a_remark_on_a_plan(words, line):
    assert line in on_plan(*words)


@pytest.mark.parametrize(("words", "part"), [
    ([], ""), (["--allreduce=ring"], "continues with"), (["--deterministic", "--micro_batch_size=8"], "same bits"),
    (["--deterministic=same_workers", "--order=file"], "same bits"), (["--batch_size=64"], "--batch_norm_span"),
    (["--batch_size=100", "--micro_batch_size=10"], "depends on the number of workers"),
    (["--batch_size=1424"], "larger than"), (["--data_dir=DATA", "--train_samples=50000"], "ImageNet"),
    *(([*SMALL, *words.split()], "ImageNet") for words in (
        "--model=resnet18", "--learning_rate=0.01", "--optimizer=sgd", "--model=keras:MobileNetV3Small --pretrained")),
    (["--flagfile=small_images", *SMALL], "ImageNet")])
def test_where_it_would_be_wrong_a_remark_is_not_made(words, part):
    assert not any(part in line for line in on_plan(*words))


def test_a_dry_run_says_them_and_prints_the_same_plan():
    done = run("python", 1, ROOT / "train.py", "--dry_run", f"--flagfile={SONY}", "--workers=1024")
    assert done.returncode == 0 and len(json.loads(done.stdout)["phases"]) == 4
    assert [line.partition(": ")[0] for line in done.stderr.splitlines()] == ["1,024 workers", "--allreduce=ring"]


def test_a_dry_run_in_a_terminal_is_the_summary_alone():
    """Both outputs are a terminal. The summary with its remarks has no JSON before it."""
    ours, theirs = pty.openpty()
    subprocess.run([*launcher("python", 1), ROOT / "train.py", "--dry_run", "--epochs=2"], cwd=ROOT, check=True,
                   env=environment(), stdin=theirs, stdout=theirs, stderr=theirs, timeout=300)
    os.close(theirs)
    shown = os.read(ours, 65536).decode().splitlines()
    os.close(ours)
    settings = flags.parse(["train.py", "--epochs=2"])
    plan = plan_for(settings, 1, 1, 1437)
    assert shown[0].startswith("recipe: ") and shown[1:] == summary(settings, plan, 1)
    assert {*remarks(settings, plan)} <= {*shown} and "1,437 training images" in shown[2]
