"""What to try after a training: made-up endings, each with the hint that it draws or where a hint is silent."""
import re
from dataclasses import replace

import pytest

from common.run_folder import FLAGS
from hints.after import Ending, on_result
from hints.before import on_plan
from plan import flags
from plan.plan import plan_for
from training.divergence import Diverged, WeightsDiffer
from training.recovery import after_divergence

IMAGES = "--data_dir=DATA --dry_run --train_samples=500"  # for which the recipe has 80 epochs and batches of 32
SGD, LARS = "--flagfile=study/sgd", "--flagfile=study/lars"  # a peak of 0.025 * 256 / 64 = 0.1; 8 * 0.001
SWEPT = "--flagfile=small_images --data_dir=DATA --epochs=40 --batch_size=32"  # as a sweep starts a run
TRAINED = "--model=keras:MobileNetV3Small --pretrained"
MIXED = ("--mixup=0.2", "--cutmix=1", "--rand_augment=m6-n2-mstd0.5-inc1")
NOT_COMPARABLE = ("--model=convnet", "--optimizer=sgd --learning_rate=0.1", "--batch_size=64", TRAINED,
                  "--loss=binary_cross_entropy", "--model=resnet10_narrow --init_checkpoint=RUN")


def ending(words, train_top1, *val_top1s, samples=200, guessed=0.1):
    """How a training ends, and its command line: that of IMAGES if it has no recipe and no data."""
    own = "" if "--flagfile" in words or "--data_dir" in words else IMAGES
    settings = flags.parse(["train.py", *own.split(), *words.split()])
    rows = [{"epoch": epoch, "train_top1": train_top1, "val_top1": top1, "val_loss": 1.0}
            for epoch, top1 in enumerate(val_top1s, 1)]
    summary = rows[-1] | {"val_samples": samples, "val_guess_count": round(samples * guessed)}
    return Ending(settings, rows, summary), f"{own} {words}"


def untaught(words="", **others):
    return ending(words, 0.11, 0.1, 0.12, **others)


def halfway(words=""):
    return ending(words, 0.62, 0.2, 0.6)


def overfitted(words=""):
    return ending(words, 0.96, 0.3, 0.31)


CASES = {  # a part of a hint -> its flags, endings that draw it, and others that do not
    "10 times the recipe's, which has": (
        "--learning_rate=0.003", [halfway("--learning_rate=0.03")], [
            *(untaught(f"--learning_rate=0.03 {words}") for words in NOT_COMPARABLE),
            *(halfway(f"--learning_rate=0.03 {words}") for words in MIXED), halfway("--learning_rate=0.006"),
            ending("--learning_rate=0.03", 0.92, 0.9, 0.91)]),  # it learns with it
    "0.01 times the recipe's": ("--learning_rate=0.003", [untaught("--learning_rate=0.00003")], [untaught()]),
    "4 times the recipe's": ("--learning_rate=0.025", [halfway(f"{SGD} --learning_rate=0.1")], [
        halfway(f"{SGD} {words}") for words in ("--lr_scaling=none --learning_rate=0.1", "--learning_rate=0.06",
                                                "--base_batch_size=256 --learning_rate=0.1",
                                                "--learning_rate=0.1 --momentum=0")]),
    "the learning rate is 10 times": (
        "--learning_rate=0.025 --lr_scaling=linear", [halfway(f"{SGD} --lr_scaling=none --learning_rate=1")],
        [halfway(f"{LARS} --trust_coefficient=0.01 --learning_rate=0.8")]),
    "learning rate is 10 times the recipe's, which": (
        "--trust_coefficient=0.001", [halfway(f"{LARS} --trust_coefficient=0.01")],
        [halfway(f"{LARS} --lars_clip --learning_rate=0.1")]),
    "the recipe has more epochs than 2": ("--epochs=80", [halfway("--epochs=2")], [
        halfway(), halfway("--epochs=70"), overfitted("--epochs=2"), halfway(SWEPT), *(
            halfway(f"--epochs=2 {words}") for words in (*MIXED, TRAINED, "--model=resnet18", "--image_size=96"))]),
    "only the last layer was trained": ("", [untaught("--freeze")], [untaught()]),
    "top-1 is 96.0% in training and 31.0% in validation; a network that knows ImageNet needs fewer images": (
        TRAINED, [overfitted()], [ending("", 0.97, 0.96), *(overfitted(words) for words in (
            "--model=resnet18", "--learning_rate=0.01", "--optimizer=sgd", TRAINED, SGD, "--flagfile=digits",
            "--init_checkpoint=RUN --model=resnet18"))]),
    "top-1 is 11.0% in training and 12.0% in": (TRAINED, [untaught()], [untaught("--model=resnet18")])}


def cases(which):
    return [(part, *end) for part, case in CASES.items() for end in case[which]]


def before(words) -> set[str]:
    settings = flags.parse(["train.py", *words.split()])
    return {re.sub(r"[\d.,]+", "#", hint.text) for hint in on_plan(settings, plan_for(settings, 1, 1, 500))}


@pytest.mark.parametrize(("part", "end", "words"), cases(1))
def test_a_hint_is_said_and_its_flags_are_its_cure(part, end, words):
    """With its flags, the same ending does not draw it again, and the next start draws nothing new."""
    [hint] = on_result(end)
    assert part in hint.text and hint.flags == tuple(CASES[part][0].split()) and hint.sentence.endswith(".")
    if hint.flags:
        again = " ".join([words, *hint.flags])
        settings = flags.parse(["train.py", *again.split()])
        assert not any(one.flags == hint.flags for one in on_result(replace(end, settings=settings)))
        assert before(again) <= before(words)


@pytest.mark.parametrize(("part", "end", "words"), cases(2))
def test_where_it_would_be_wrong_it_is_silent(part, end, words):
    assert not any(part in hint.text for hint in on_result(end))


def test_weights_that_cannot_be_had_are_not_proposed():
    for end, _ in (overfitted(), untaught(), ending("", 0.92, 0.81)):
        assert not any(hint.flags for hint in on_result(replace(end, can_pretrain=lambda: False)))


def test_what_a_resumed_run_has_is_not_taken_for_the_recipes(tmp_path):
    """Its recipe is its own flags.txt, so nobody knows what was changed."""
    first, words = halfway(f"{IMAGES} --output_dir={tmp_path} --epochs=15")
    assert on_result(first)[0].flags == ("--epochs=80",)
    (tmp_path / FLAGS).write_text(first.settings.text)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert on_result(halfway(words)[0]) == []


@pytest.mark.parametrize(("words", "said"), [
    ("--learning_rate=0.4", ["the learning rate is 16 times the recipe's, which has --learning_rate=0.025"]),
    ("--learning_rate=0.001", []), ("--learning_rate=0.05", []), ("--learning_rate=0.4 --model=resnet20", []),
    ("--learning_rate=0.4 --batch_size=1024", [])])
def test_after_a_divergence_only_a_higher_rate_than_the_recipes_is_named(words, said):
    settings = halfway(f"{SGD} {words}")[0].settings
    found = after_divergence(Diverged("", 1, 0.5, 0.1), settings), after_divergence(WeightsDiffer("", 1, 0.5), settings)
    assert [[hint.words for hint in hints] for hints in found] == [
        [Diverged.advice, *said], [WeightsDiffer.advice]]


def test_what_was_wanted_is_reached():
    end, _ = untaught()
    assert on_result(replace(end, summary=end.summary | {"epochs_to_target": 2})) == []


@pytest.mark.parametrize("row", [{"epoch": 1}, {"epoch": 1, "train_top1": 0.1, "val_top1": 0.1, "val_loss": None}])
def test_rows_that_lack_a_value_are_left_out(row):
    """A loss that is not a number is null in metrics.jsonl."""
    end, _ = untaught()
    found = [on_result(replace(end, rows=rows)) for rows in ([*end.rows, row], [row])]
    assert found == [on_result(end), []]
