"""What belongs to a trained model, whichever dataset is opened: the normalization of its input and its classes."""
import json
import shutil

import numpy as np
import pytest
from conftest import DIGITS, ROOT, TINY, printed_json, rows, run, train, weights

from tests.rigs.bn_train import PROGRAM
from tests.rigs.making import CUTS, write_shards
from training.restoring import differing_classes, same_classes

FLAGS = (DIGITS, *TINY, "--epochs=1", "--batch_size=32", "--learning_rate=0.02", "--checkpoint_every=0.4",
         "--deterministic")
ORDER = (3, 1, 4, 0, 5, 9, 2, 6, 8, 7)  # new label -> old label
MEAN, STD = (60.0, 80.0, 100.0), (90.0, 80.0, 70.0)
METRICS = ("val_loss", "val_top1", "val_top5", "val_samples")


@pytest.fixture(scope="module")
def copies(digit_records, tmp_path_factory):
    """A function from changes of the description to a copy of the digits. order: new label -> old label."""
    def make(order=range(10), **changes):
        folder = tmp_path_factory.mktemp("data")
        records = {name: [(image, list(order).index(label)) for image, label in part]
                   for name, part in digit_records.items()}
        write_shards("tfrecord", records, folder, {"train": CUTS["train"][::3], "validation": CUTS["validation"]})
        described = json.loads((folder / "dataset.json").read_text())
        described["classes"] = [f"digit {label}" for label in order]
        described["image"] |= changes.pop("image", {})
        (folder / "dataset.json").write_text(json.dumps(described | changes))
        return folder

    return make


@pytest.fixture(scope="module")
def data(copies):
    return copies(image={"mean": MEAN, "std": STD})


@pytest.fixture(scope="module")
def other(copies):
    """The same images and labels with another normalization: that of data.prepare for a folder of dark pictures."""
    return copies(image={"mean": (110.0,) * 3, "std": (9.0,) * 3})


@pytest.fixture(scope="module")
def permuted(copies):
    return copies(ORDER, image={"mean": MEAN, "std": STD})


@pytest.fixture(scope="module")
def renamed(copies):
    return copies(image={"mean": MEAN, "std": STD},
                  classes=["digit 0", "one", "digit 2", "three", *(f"digit {label}" for label in range(4, 10))])


@pytest.fixture(scope="module")
def trained(train_once, data):
    return train_once(*FLAGS, f"--data_dir={data}")


def evaluated(folder, data, **options) -> tuple[dict, list[str]]:
    done = train("--mode=evaluate", f"--checkpoint={folder}", f"--data_dir={data}", **options)
    lines = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    judged = [line for line in lines if f"validation images of {data} are evaluated" in line]
    assert len(judged) == 1, lines
    return printed_json(done), [line for line in lines if line not in judged]


@pytest.mark.trainings
def test_exact_statistics_that_are_measured_again_have_the_bits_of_the_training(train_once):
    """On one worker and on two. The training evaluated after epoch 1, another one did not."""
    flags = (DIGITS, "--model=bn_convnet", "--image_size=8", "--augmentation=none", "--epochs=2",
             "--checkpoint_every=1", "--batch_norm_statistics=exact", "--batch_norm_span=auto", "--micro_batch_size=64",
             "--deterministic")
    seldom, often = (train_once(*flags, f"--evaluate_every={every}", program=PROGRAM) for every in (2, 1))
    checkpoint = min((seldom / "checkpoints").glob("step-*"))
    for kind, workers in (("python", 1), ("mpirun", 2)):
        done = train("--mode=evaluate", f"--checkpoint={checkpoint}", kind=kind, workers=workers, program=PROGRAM)
        assert "measured again" in done.stderr
        assert {name: printed_json(done)[name] for name in METRICS[:3]} == (
            {name: rows(often)[0][name] for name in METRICS[:3]}), (kind, workers)


@pytest.mark.trainings
def test_an_evaluation_normalizes_as_training_did(trained, data, other, tmp_path):
    ours, said = evaluated(trained, data)
    assert not said and weights(trained)["input/000/input_normalization/numbers"].tolist() == [[*MEAN], [*STD]]
    theirs, [line] = evaluated(trained, other, kind="mpirun", workers=2)
    assert [theirs[name] for name in METRICS] == [ours[name] for name in METRICS]
    assert "with mean 60 80 100 and divisor 90 80 70, not as in the dataset, with 110 110 110 and 9 9 9" in line


@pytest.mark.trainings
def test_a_resumed_run_normalizes_as_before(trained, other, copies, tmp_path):
    """Other digits of the same mean are no line: another preparation of the same images may round."""
    alike = copies(image={"mean": [value + 0.01 for value in MEAN], "std": STD})
    for number, (folder, lines) in enumerate(((other, 1), (alike, 0))):
        half = tmp_path / str(number)
        shutil.copytree(trained, half, symlinks=True)
        shutil.rmtree(sorted((half / "checkpoints").glob("step-*"))[-1])
        (half / "checkpoints" / "best").unlink()
        done = train(*FLAGS, f"--data_dir={folder}", f"--output_dir={half}")
        assert "resumed after step" in done.stderr
        assert done.stderr.count("not as in the dataset") == lines
        whole, found = weights(trained), weights(half)
        assert whole.keys() == found.keys() and all(np.array_equal(whole[name], found[name]) for name in whole)


@pytest.mark.trainings
def test_classes_in_another_order_are_mapped_by_name(trained, data, permuted):
    ours, _ = evaluated(trained, data)
    theirs, said = evaluated(trained, permuted)
    assert not said and [theirs[name] for name in METRICS[1:]] == [ours[name] for name in METRICS[1:]]
    assert theirs["val_loss"] == pytest.approx(ours["val_loss"], rel=1e-6) and ours["val_top1"] > 0.3


@pytest.mark.trainings
@pytest.mark.parametrize(("kind", "message"), [
    ("renamed", "class 1 is 'digit 1' in the checkpoint and 'one' in the dataset, and 1 more differ"),
    ("permuted", "class 0 is 'digit 0' in the checkpoint and 'digit 3' in the dataset, and 7 more differ")])
def test_other_classes_are_refused(kind, message, trained, request, tmp_path):
    """A resume refuses another order, too, because the labels would mean others from then on."""
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    data = f"--data_dir={request.getfixturevalue(kind)}"
    resumed = (*FLAGS, data, f"--output_dir={tmp_path}/run")
    tries = [resumed, ("--mode=evaluate", f"--checkpoint={trained}", data)]
    unknown = "the model does not know the class 'one' and 1 more; it knows 'digit 0', 'digit 1', "
    for flags, said in [*zip(tries, (message, unknown), strict=True)][:2 if kind == "renamed" else 1]:
        done = run("mpirun", 2, ROOT / "train.py", *flags)
        wrong = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
        assert done.returncode == 1 and len({*wrong}) == 1 and said in wrong[0], done.stderr


@pytest.mark.trainings
def test_prediction_names_the_classes_of_training(trained, data, permuted, renamed, other, digit_records, tmp_path):
    (tmp_path / "x.jpg").write_bytes(digit_records["validation"][3][0])
    found = {}
    for folder in (data, permuted, renamed, other):
        done = train("--mode=predict", f"--checkpoint={trained}", f"--data_dir={folder}", f"--image={tmp_path}/x.jpg")
        found[folder] = json.loads(done.stdout)
        assert ("the names are the checkpoint's" in done.stderr) == (folder in (permuted, renamed))
    assert all(one == found[data] for one in found.values())


def test_names_that_occur_twice_have_one_order():
    assert same_classes(["a", "b", "b"], ["a", "b", "b"]) and not same_classes(["a", "b", "b"], ["b", "a", "b"])
    assert same_classes(["a", "b"], ("b", "a")) and not same_classes(["a", "b"], ["a", "b", "c"])
    assert differing_classes(["a"], ("a",)) == ""
    assert differing_classes(["a", "b"], ["a"]) == "class 1 is 'b' in the checkpoint and missing in the dataset"
