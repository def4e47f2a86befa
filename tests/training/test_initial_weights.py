"""--init_checkpoint: what is taken from a trained model, bit for bit, and what starts anew."""
import shutil

import numpy as np
import pytest
from conftest import DIGITS, ROOT, run, train, weights

from training.weight_check import DIFFER

pytestmark = pytest.mark.trainings

STILL = ("--learning_rate=0", "--warmup=none", "--weight_decay=0", "--epochs=0.1", "--batch_norm_momentum=1")
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
    before = train_once("--epochs=0.5")
    done = train(*STILL, f"--init_checkpoint={before}/checkpoints", f"--output_dir={tmp_path}")
    old, new = model(before), model(tmp_path)
    assert old.keys() == new.keys() and all(np.array_equal(old[name], new[name]) for name in old)
    [line] = initialized(done)
    assert line.startswith(f"init_checkpoint: took {len(old)} of {len(old)} variables from {before}/checkpoints/step-")
    assert line.endswith(" (epoch 0.5)")
    assert f"--init_checkpoint={before}/checkpoints" in (tmp_path / "flags.txt").read_text().splitlines()


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
