"""What a result is worth and what to try: made-up endings of a training, and the interval against SciPy's."""
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest

from common.run_folder import FLAGS
from plan import flags
from plan.plan import plan_for
from training.advice import Ending, advice, after_divergence, interval, is_guessing
from training.divergence import Diverged, WeightsDiffer


@pytest.mark.parametrize(("hits", "samples"), [(7, 7), (0, 5), (356, 360), (107, 1000), (1, 2), (37_950, 50_000)])
def test_the_interval_is_wilsons(hits, samples):
    expected = binomtest(hits, samples).proportion_ci(0.95, "wilson")
    assert interval(hits / samples, samples) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_chance_is_called_so():
    """10.7 % of 1,000 images of ten classes; 12 % would be better, and so is 7 of 7 where half are of one class."""
    assert is_guessing(0.107, 1000, 0.1) and not is_guessing(0.13, 1000, 0.1)
    assert not is_guessing(1.0, 7, 4 / 7) and is_guessing(1.0, 2, 0.5)
    assert not is_guessing(1.0, 20, 1.0) and not is_guessing(0.4, 20, 1.0)  # images of one class: nothing to guess


IMAGES = ("--data_dir=DATA", "--train_samples=500")  # for which the recipe has 80 epochs and batches of 32
SGD, LARS = "--flagfile=study/sgd", "--flagfile=study/lars"  # a peak of 0.025 * 256 / 64 = 0.1; 8 * 0.001
SMALL = "--flagfile=small_images --data_dir=DATA --epochs=40 --batch_size=32"  # as a sweep starts a run
TRAINED = "--model=keras:MobileNetV3Small --pretrained"
CLASSES = tuple("abcdefghij")


def ending(words, train_top1, *val_top1s, losses=None, wrong=(), samples=200, guessed=0.1, classes=CLASSES,
           averages=()):
    """A training of a real plan. words: its command line; that of IMAGES if it has no recipe and no data.

    val_top1s, losses, averages: of each evaluation. wrong: pairs of classes, one for each error that is given.
    """
    words = words.split()
    own = () if any(word.startswith(("--flagfile", "--data_dir")) for word in words) else IMAGES
    settings = flags.parse(["train.py", *own, *words])
    plan = plan_for(settings, 1, 1, 500)
    epochs = np.linspace(0, plan.epochs, len(val_top1s) + 1)[1:].tolist()
    rows = [{"epoch": epoch, "train_top1": train_top1, "val_top1": top1, "val_loss": loss}
            for epoch, top1, loss in zip(epochs, val_top1s, losses or [1.0] * len(epochs), strict=True)]
    for row, top1 in zip(rows, averages, strict=False):
        row |= {"ema_val_top1": top1, "ema_val_loss": row["val_loss"]}
    outcomes = np.array([(label, predicted, 1, 1) for label, predicted in wrong] + [(0, 0, 0, 0)], np.float32)
    summary = rows[-1] | {"val_samples": samples, "val_guess_count": round(samples * guessed)}
    return Ending(settings, plan, rows, summary, classes, outcomes)


def untaught(words, **others):
    return ending(words, 0.11, 0.1, 0.12, **others)


def halfway(words):
    return ending(words, 0.62, 0.2, 0.3, 0.4, 0.6)


def overfitted(words):
    return ending(words, 0.96, 0.3, 0.31)


IDLE = "The network has not begun to learn: its top-1 in training is 11.0%, too. "
LOOK = f"{IDLE}Look at the images in report.html: can the classes be told apart, and are the labels right?"
OTHERS = " Other flags need another --output_dir."


@pytest.mark.parametrize(("end", "expected"), [
    (halfway("--learning_rate=0.03"), ["With --learning_rate, the learning rate is 10 times the recipe's."]),
    (untaught("--learning_rate=0.00003"), ["With --learning_rate, the learning rate is 0.01 times the recipe's."]),
    (halfway(f"{SGD} --learning_rate=0.1"), ["With --learning_rate, the learning rate is 4 times the recipe's."]),
    (halfway(f"{SGD} --lr_scaling=none --learning_rate=1"), [
        "With --learning_rate and --lr_scaling, the learning rate is 10 times the recipe's."]),
    (halfway(f"{LARS} --trust_coefficient=0.01"), [
        "With --trust_coefficient, the learning rate is 10 times the recipe's."]),
    (halfway("--epochs=2 --output_dir=RUN"), [f"Leave out --epochs=2: the recipe has 80.{OTHERS}"]),
    (halfway("--epochs=2 --output_dir=RUN --resume=never"), ["Leave out --epochs=2: the recipe has 80."]),
    (halfway("--batch_size=256 --epochs=60"), [
        "117 updates are few: with the recipe's --batch_size, there are more."]),
    (untaught(""), [LOOK]),
    (untaught("--freeze --output_dir=RUN --data_dir=digits"), [
        "Only the last layer was trained. To train all layers from here, run `uv run train.py --data_dir=digits "
        "--init_checkpoint=RUN/checkpoints/best --output_dir=RUN-whole`."]),
    (untaught("--learning_rate=0.002"), [LOOK]),
    (untaught("--learning_rate=0.04 --model=convnet"), [
        f"{IDLE}Compare learning rates: `python -m experiments.sweep --sweep=learning_rate=0.004,0.04,0.4` with the "
        "same flags."]),
    (untaught(f"{LARS} --optimizer=sgd --learning_rate=0.1"), [
        f"{IDLE}Compare learning rates: `python -m experiments.sweep --sweep=learning_rate=0.01,0.1,1` with the same "
        "flags."]),
    (untaught(f"{LARS} --optimizer=sgd"), [
        f"{IDLE}The learning rate is that for the recipe's lars: give --learning_rate for sgd, such as 0.1."]),
    (ending("", 0.6, 0.8, 0.5, 0.8, losses=[1, 31, 1]), [
        "Validation loss was as high as 31 in the second half, where guessing has 2.3. A third of the learning rate "
        "may be steadier."]),
    (untaught("", losses=[31, 30]), [
        "Validation loss was as high as 30 in the second half, where guessing has 2.3. A third of the learning rate "
        "may be steadier."]),
    (overfitted("--output_dir=RUN"), [
        "Top-1 is 96.0% in training and 31.0% in validation: the network overfits its 500 training images. A network "
        f"that knows ImageNet needs fewer images: {TRAINED}.{OTHERS}"]),
    (overfitted(TRAINED), [
        "Top-1 is 96.0% in training and 31.0% in validation: the network overfits its 500 training images. More "
        "images help. Mixing them may, too: --mixup=0.2."]),
    (overfitted("--model=resnet18 --batch_size=1"), [
        "Top-1 is 96.0% in training and 31.0% in validation: the network overfits its 500 training images. More "
        "images help."]),
    (ending("", 0.92, 0.8, 0.81), [
        f"Less than 50,000 images: a network that knows ImageNet usually reaches more, with {TRAINED}."]),
    (ending("", 0.96, 0.2, 0.9, 0.96, wrong=[(1, 2)] * 5 + [(3, 4)] * 15), [
        "15 of 20 errors are d taken for e. report.html shows the errors with the highest losses: are their labels "
        "right?"]),
    (ending("", 0.97, 0.95, samples=20), [
        "20 validation images tell little: the 95% interval of top-1 is 76% to 99%."]),
])
def test_a_result_says_what_to_try(end, expected):
    assert advice(end) == expected


MIXED = ("--mixup=0.2", "--cutmix=1", "--rand_augment=m6-n2-mstd0.5-inc1")
NOT_COMPARABLE = ("--model=convnet", "--optimizer=sgd", "--batch_size=64", "--loss=binary_cross_entropy", TRAINED,
                  "--model=resnet10_narrow --init_checkpoint=RUN")
SILENT = {  # a part of a sentence -> where it would be wrong
    "times the recipe's": [
        *(halfway(f"{SGD} {words}") for words in (
            "--lr_scaling=none --learning_rate=0.1", "--base_batch_size=256 --learning_rate=0.1",
            "--learning_rate=0.025 --epochs=1", "--learning_rate=0.06", "--learning_rate=0.1 --momentum=0")),
        *(halfway(f"{LARS} {words}") for words in (
            "--trust_coefficient=0.01 --learning_rate=0.8", "--lars_clip --learning_rate=0.1")),
        *(untaught(f"--learning_rate=0.03 {words}") for words in NOT_COMPARABLE),
        *(halfway(f"--learning_rate=0.03 {words}") for words in MIXED),
        ending("--learning_rate=0.03", 0.92, 0.9, 0.91)],  # it learns with it
    "Leave out --epochs": [
        halfway(""), halfway("--epochs=80"), halfway("--epochs=70"), halfway(f"--epochs=2 {TRAINED}"),
        overfitted("--epochs=2"), halfway(SMALL), *(halfway(f"--epochs=2 {words}") for words in MIXED)],
    "Train longer": [
        halfway(""), halfway("--flagfile=lars_1708.03888/table1-resnet50-8192"), halfway("--epochs=400"),
        halfway("--flagfile=rsb_2110.00476/a3-resnet50-2048"), halfway("--lr_schedule=constant")],
    "updates are few": [
        halfway("--epochs=60"), halfway("--flagfile=digits --data_dir=DATA"), halfway("--batch_size=64 --epochs=60"),
        halfway("--flagfile=digits --data_dir=DATA --batch_size=64"), overfitted("--batch_size=256"),
        halfway(f"{SMALL} --epochs=60 --batch_size=1024"),
        *(halfway(f"--batch_size=256 {words}") for words in (*MIXED, TRAINED))],
    "Validation loss was": [
        ending("", 0.96, 0.8, 0.8, losses=[1, 9]), ending("", 0.6, 0.6, 0.6, losses=[1, 9]),  # sure of its errors
        ending("", 0.96, 0.6, 0.6, losses=[1, 9], classes=("a", "b"), guessed=0.6),
        ending("", 0.6, 0.5, 0.8, 0.8, losses=[31, 1, 1])],
    "has not begun to learn": [
        ending("", 0.3, 0.1, 0.12), ending("", 0.15, 0.1, 0.5), halfway(""), *map(untaught, MIXED),
        untaught("--data_dir=synthetic:500")],
    "Look at the images": [*map(untaught, NOT_COMPARABLE)],
    "--sweep=learning_rate": [
        untaught(""), untaught("--learning_rate=0.002"), untaught("--learning_rate=0.03"),
        untaught("--model=convnet --learning_rate=0:0.1,3:0.01"), untaught(f"{LARS} --optimizer=sgd")],
    "overfits": [
        ending("", 0.8, 0.5, 0.5), ending("", 0.96, 0.8, 0.8), ending("", 0.96, 0.1, 0.12), *map(overfitted, MIXED),
        ending("", 0.92, 0.7, samples=5), ending("", 0.96, 0.9, 0.92, averages=(0.2, 0.3))],  # which lags behind
    TRAINED: [
        *(overfitted(words) for words in ("--model=resnet18", "--learning_rate=0.01", "--optimizer=sgd", TRAINED,
                                        "--flagfile=digits", "--flagfile=digits --data_dir=DATA", SGD)),
        ending("", 0.97, 0.96)],
    "--mixup": [overfitted("--model=resnet18 --batch_size=1"), *map(overfitted, MIXED)],
    "errors are": [
        ending("", 0.96, 0.96, wrong=[(label, 9) for label in range(9)] * 3), untaught("", wrong=[(1, 2)] * 30),
        ending("", 0.96, 0.8, wrong=[(1, 2)] * 19), ending("", 0.96, 0.8, wrong=[(1, 0)] * 30, classes=("a", "b")),
        ending("--data_dir=synthetic:500", 0.9, 0.8, wrong=[(1, 2)] * 30)],
    "tell little": [ending("", 0.96, 0.96)],
    "data.prepare": [ending("", 0.97, 0.96, samples=5)],
    OTHERS: [halfway("--epochs=2"), untaught("--output_dir=RUN"),
             halfway("--output_dir=RUN --resume=never --epochs=2")],
}


@pytest.mark.parametrize(("part", "end"), [(part, end) for part, ends in SILENT.items() for end in ends])
def test_where_it_would_be_wrong_a_sentence_is_not_said(part, end):
    assert part not in " ".join(advice(end))


def test_what_a_resumed_run_has_is_not_taken_for_the_recipes(tmp_path):
    """Its recipe is its own flags.txt, so nobody knows what was changed."""
    words = f"--data_dir=DATA --train_samples=500 --output_dir={tmp_path}"
    first = halfway(f"{words} --epochs=15")
    assert advice(first) == [f"Leave out --epochs=15: the recipe has 80.{OTHERS}"]
    (tmp_path / FLAGS).write_text(first.settings.text)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert advice(halfway(f"{words} --epochs=15")) == []
    [sweep] = advice(untaught(words))
    assert "--sweep=learning_rate=0.0003,0.003,0.03`" in sweep and sweep.endswith(OTHERS)


def test_trained_weights_have_a_rate_of_their_own_and_need_no_others(tmp_path):
    (tmp_path / "one.flags").write_text("--model=keras:MobileNetV3Small\n--learning_rate=0.1\n--optimizer=sgd\n")
    assert advice(halfway(f"--flagfile={tmp_path}/one.flags --pretrained --learning_rate=0.001")) == []
    end = overfitted("")
    tuned = replace(end.settings, run=replace(end.settings.run, init_checkpoint="RUN"))
    assert TRAINED in advice(end)[0] and TRAINED not in advice(replace(end, settings=tuned))[0]


def test_a_sweep_that_was_proposed_is_not_contradicted():
    """Each of its runs may fail, too."""
    [sentence] = advice(untaught("--model=convnet --learning_rate=0.04"))
    rates = sentence.partition("learning_rate=")[2].partition("`")[0].split(",")
    assert [*map(float, rates)] == [0.004, 0.04, 0.4]
    for rate in rates:
        [said] = advice(untaught(f"--model=convnet --learning_rate={rate}"))
        assert said.startswith(f"{IDLE}Compare learning rates: ")


@pytest.mark.parametrize(("words", "said"), [
    ("--learning_rate=0.4", "; with --learning_rate, the learning rate is 16 times the recipe's"),
    ("--learning_rate=0.001", ""), ("--learning_rate=0.05", ""), ("--learning_rate=0.4 --model=resnet20", ""),
    ("--learning_rate=0.4 --batch_size=1024", "")])
def test_after_a_divergence_only_a_higher_rate_than_the_recipes_is_named(words, said):
    settings = halfway(f"{SGD} {words}").settings
    assert after_divergence(Diverged("", 1, 0.5, 0.1), settings) == f"{Diverged.advice}{said}"
    assert after_divergence(WeightsDiffer("", 1, 0.5), settings) == WeightsDiffer.advice


def test_what_was_wanted_is_reached():
    end = untaught("")
    assert advice(replace(end, summary=end.summary | {"epochs_to_target": 2})) == []


@pytest.mark.parametrize("row", [
    {"epoch": 1}, {"epoch": 1, "train_top1": 0.1, "val_top1": 0.1, "val_loss": None},
    {"epoch": 1, "train_top1": 0.1, "val_top1": 0.1, "val_loss": 1.0, "ema_val_top1": 0.1, "ema_val_loss": None}])
def test_rows_that_lack_a_value_are_left_out(row):
    """A loss that is not a number is null in metrics.jsonl."""
    end = untaught("")
    assert advice(replace(end, rows=[row, *end.rows])) == advice(end) and advice(replace(end, rows=[row])) == []
