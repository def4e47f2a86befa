"""--init_checkpoint: what is taken from a trained model, bit for bit, and what starts anew."""
import json
import shutil
import unicodedata

import numpy as np
import pytest
from conftest import DIGITS, ROOT, rows, run, train, weights

from tests.rigs.bn_train import PROGRAM
from tests.rigs.making import write_shards
from training.weight_check import DIFFER

pytestmark = pytest.mark.trainings

STILL = ("--learning_rate=0", "--warmup=none", "--weight_decay=0", "--epochs=0.1", "--batch_norm_momentum=1")
NORMED = ("--model=bn_convnet", "--image_size=12", "--epochs=0.5", "--warmup=none")
CONVNET = (DIGITS, "--model=convnet", "--optimizer=sgd", "--learning_rate=0.05", "--warmup=none", "--epochs=0.2")


@pytest.fixture(scope="module")
def few_classes(in_format, tmp_path_factory):
    """A copy of the digits in class folders with seven of the ten classes."""
    folder = tmp_path_factory.mktemp("few") / "data"
    shutil.copytree(in_format("folder"), folder)
    for split in ("train", "val"):
        for number, name in enumerate(sorted(path.name for path in (folder / split).iterdir())):
            if number >= 7:
                shutil.rmtree(folder / split / name)
    return folder


def model(folder) -> dict[str, np.ndarray]:
    return {name: value for name, value in weights(folder).items() if name.startswith("model/")}


def initialized(done) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("init_checkpoint: ")]


def test_the_same_model_starts_where_the_other_ended(train_once, tmp_path):
    """Also if it replaces the other one's run."""
    ended = train_once("--epochs=0.5")
    before = shutil.copytree(ended, tmp_path / "run", symlinks=True)
    done = train(*STILL, f"--init_checkpoint={before}/checkpoints", f"--output_dir={before}", "--resume=never")
    old, new = model(ended), model(before)
    assert old.keys() == new.keys() and all(np.array_equal(old[name], new[name]) for name in old)
    [line] = initialized(done)
    assert line.startswith(f"init_checkpoint: took {len(old)} of {len(old)} variables from {before}/checkpoints/step-")
    assert line.endswith(" (epoch 0.5)")
    assert f"--init_checkpoint={before}/checkpoints" in (before / "flags.txt").read_text().splitlines()
    assert not (before / ".replaced").exists() and len(rows(before)) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_other_classes_and_another_image_size(train_once, few_classes, tmp_path, workers):
    """Only the last layer is new: the one that the same run has without --init_checkpoint. On every worker."""
    before = train_once("--epochs=0.5")
    flags = (*STILL, f"--data_dir={few_classes}", "--image_size=40", "--batch_size=32")
    kind = {"kind": "mpirun", "workers": workers} if workers > 1 else {}
    done = train(DIGITS, *flags, f"--init_checkpoint={before}", f"--output_dir={tmp_path}/new", **kind)
    old, new = model(before), model(tmp_path / "new")
    [kernel, bias] = [name for name in old if "dense" in name]
    assert all(np.array_equal(old[name], new[name]) for name in old.keys() - {kernel, bias})
    assert new[kernel].shape == (64, 7) and new[bias].shape == (7,) and new[kernel].std() > 0
    taken, anew = initialized(done)
    assert f"took {len(old) - 2} of {len(old)} variables" in taken
    assert anew == "init_checkpoint: new: dense/kernel (64, 7) instead of (64, 10), dense/bias (7,) instead of (10,)"
    assert DIFFER not in done.stderr


def test_averages_are_taken_and_start_from_there(train_once, tmp_path):
    before = train_once(*CONVNET, "--ema_decay=0.9")
    done = train(*CONVNET, *STILL, "--ema_decay=0.5", f"--init_checkpoint={before}", f"--output_dir={tmp_path}")
    old, new = weights(before), weights(tmp_path)
    averages = [old[name] for name in sorted(old) if name.startswith("ema/")]
    assert not np.array_equal(averages[0], old[min(name for name in old if name.startswith("model/"))])
    for group in ("model/", "ema/"):
        ours = [new[name] for name in sorted(new) if name.startswith(group)]
        assert all(np.array_equal(*pair) for pair in zip(averages, ours, strict=True))
    assert "moving averages from" in initialized(done)[0]


def test_a_resumed_run_does_not_start_again(train_once, tmp_path):
    """It goes on exactly, also when the other checkpoint has gone."""
    source = tmp_path / "source"
    shutil.copytree(train_once(*CONVNET), source)
    flags = (*CONVNET, "--deterministic", f"--init_checkpoint={source}", "--epochs=0.5",
             "--checkpoint_every=0.1")
    train(*flags, f"--output_dir={tmp_path}/whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "half", symlinks=True)
    newest = sorted((tmp_path / "half" / "checkpoints").glob("step-*"))[-1]
    shutil.rmtree(newest)
    (tmp_path / "half" / "checkpoints" / "best").unlink(missing_ok=True)
    shutil.rmtree(source)
    done = train(*flags, f"--output_dir={tmp_path}/half")
    assert "resumed after step" in done.stderr and not initialized(done)
    whole, half = model(tmp_path / "whole"), model(tmp_path / "half")
    assert all(np.array_equal(whole[name], half[name]) for name in whole)


def test_moving_statistics_of_trained_weights_count_also_after_a_resume(train_once, tmp_path):
    """With or without --init_checkpoint on the command line that resumes."""
    source = train_once(*NORMED, program=PROGRAM)
    flags = (*NORMED, "--deterministic", "--seed=1", "--checkpoint_every=0.1")
    train(*flags, f"--init_checkpoint={source}", f"--output_dir={tmp_path}/whole", program=PROGRAM)
    whole = weights(tmp_path / "whole")
    for number, more in enumerate(((), (f"--init_checkpoint={source}",))):
        half = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", half, symlinks=True)
        for late in sorted((half / "checkpoints").glob("step-*"))[1:]:
            shutil.rmtree(late)
        (half / "checkpoints" / "best").unlink(missing_ok=True)
        done = train(*flags, *more, f"--output_dir={half}", program=PROGRAM)
        found = weights(half)
        assert "resumed after step" in done.stderr and whole.keys() == found.keys()
        assert all(np.array_equal(whole[name], found[name]) for name in whole), more


def relabelled(digit_records, folder, order, names, mean=80.0):
    """A dataset of the digits with other labels (new -> old), names and mean."""
    folder.mkdir()
    write_shards("tfrecord", {split: [(image, order.index(label)) for image, label in records]
                              for split, records in digit_records.items()}, folder)
    described = json.loads((folder / "dataset.json").read_text())
    described["image"]["mean"] = [mean] * 3
    (folder / "dataset.json").write_text(json.dumps(described | {"classes": names}))
    return folder


def test_classes_by_name_and_the_normalization_of_the_weights(digit_records, tmp_path):
    """In another order, the last layer is taken by name. With other names, it is new, whatever its shape.

    A name is the same in both forms of Unicode.
    """
    order, names = [3, 1, 4, 0, 5, 9, 2, 6, 8, 7], [f"digit {label}" for label in range(9)] + ["n\xe9uf"]
    first = relabelled(digit_records, tmp_path / "first", [*range(10)], names)
    decomposed = [unicodedata.normalize("NFD", names[label]) for label in order]
    permuted = relabelled(digit_records, tmp_path / "permuted", order, decomposed, mean=30.0)
    renamed = relabelled(digit_records, tmp_path / "renamed", [*range(10)], ["none", *names[1:]])
    train(*CONVNET, f"--data_dir={first}", f"--output_dir={tmp_path}/run")
    old = weights(tmp_path / "run")
    head = sorted(name for name in old if name.startswith("model/"))[-2:]
    assert [old[name].shape[-1] for name in head] == [10, 10]
    flags = (*CONVNET, *STILL, f"--init_checkpoint={tmp_path}/run", "--checkpoint_every=1")
    done = train(*flags, f"--data_dir={permuted}", f"--output_dir={tmp_path}/by-name")
    new = weights(tmp_path / "by-name")
    for name in (name for name in old if name.startswith(("model/", "input/"))):
        expected = old[name][..., order] if name in head else old[name]
        np.testing.assert_array_equal(new[name], expected, err_msg=name)
    assert done.stderr.count("with mean 80 80 80 and divisor 80 80 80, not as in the dataset, with 30 30 30") == 1
    assert len(initialized(done)) == 1

    done = train(*flags, f"--data_dir={renamed}", f"--output_dir={tmp_path}/other")
    new, (taken, anew) = weights(tmp_path / "other"), initialized(done)
    for name in (name for name in old if name.startswith("model/")):
        assert np.array_equal(new[name], old[name]) == (name not in head), name
    assert f"took {len(model(tmp_path / 'run')) - 2} of" in taken
    assert anew == ("init_checkpoint: new: dense/kernel (128, 10), dense/bias (10,), because class 0 is 'digit 0' in "
                    "the checkpoint and 'none' in the dataset")


@pytest.mark.parametrize(("flags", "message"), [
    (["--model=resnet20"], "does not fit this model"),
    (["--image_size=48"], "also needs its --image_size"),  # its first dense layer depends on the size
    (["--init_checkpoint={empty}"], "contains no readable checkpoint"),
    (["--init_checkpoint={empty}/none"], "contains no readable checkpoint"),
])
def test_what_does_not_fit(flags, message, train_once, tmp_path):
    (tmp_path / "empty").mkdir()
    flags = [flag.format(empty=tmp_path / "empty") for flag in flags]
    done = run("python", 1, ROOT / "train.py", *CONVNET, f"--init_checkpoint={train_once(*CONVNET)}", *flags,
               f"--output_dir={tmp_path}/run")
    wrong = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]
    assert done.returncode == 1 and len(wrong) == 1 and message in wrong[0] and "Traceback" not in done.stderr
    assert not list((tmp_path / "run").glob("checkpoints/*")) and not done.stdout
