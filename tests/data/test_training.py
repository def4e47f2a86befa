"""train.py on every kind of data: real processes, one and two workers."""
import contextlib
import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from conftest import DIGITS, train, weights
from PIL import Image

from common.errors import UserError
from data.dataset import labels_checksum, open_dataset
from distributed.world import World
from plan.flags import parse
from tests.rigs.pictures import fill
from training.checkpoints import Checkpoints, write
from training.restoring import MEANING
from training.run import Training
from training.state import Progress

FLAGS = (DIGITS, "--model=convnet", "--epochs=1", "--batch_size=96", "--augmentation=crop")


@pytest.fixture(scope="module")
def runs(in_format, tmp_path_factory):
    """One epoch on two workers from LMDB, staged, and from RecordIO: the same records in the same files."""
    folders = {}
    for name, flags in (("lmdb", ["--stage_dir={}/disk", "--save_augmentations"]), ("recordio", [])):
        folders[name] = tmp_path_factory.mktemp(f"run-{name}")
        train(*FLAGS, f"--data_dir={in_format(name)}", f"--output_dir={folders[name]}",
              *(flag.format(folders[name]) for flag in flags), kind="mpirun", workers=2)
    return folders


@pytest.mark.trainings
def test_the_same_records_make_the_same_weights_in_any_format(runs):
    ours, theirs = (weights(folder) for folder in runs.values())
    assert len(ours) > 10
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@pytest.mark.trainings
def test_staging_copied_once_and_the_copy_was_read(runs, in_format):
    [copy] = [path for path in (runs["lmdb"] / "disk").glob("*/*") if path.is_dir()]
    assert sorted(path.name for path in copy.iterdir()) == sorted(path.name for path in in_format("lmdb").iterdir())
    assert json.loads((runs["lmdb"] / "summary.json").read_text())["val_samples"] == 353


@pytest.mark.trainings
def test_the_augmentations_are_shown(runs):
    """8 by 8 training images of 32 pixels; the digits are light on dark."""
    picture = Image.open(runs["lmdb"] / "augmentations.png")
    assert picture.size == (256, 256) and picture.mode == "RGB"
    pixels = np.asarray(picture).reshape(8, 32, 8, 32, 3).astype(float)
    assert (pixels.std(axis=(1, 3, 4)) > 30).all()


def test_folders_of_images_are_read_in_place(in_format, tmp_path):
    """And evaluated exactly, by two workers. Both say what is left out."""
    data = tmp_path / "data"
    for path in in_format("folder").glob("*/*"):
        (data / path.parent.name).mkdir(parents=True, exist_ok=True)
        (data / path.parent.name / path.name).symlink_to(path)
    (data / "val" / "notes.txt").write_text("no image")
    said = f"train.py: left out of {data}/val: files that are no images (1): notes.txt\n"
    assert train(*FLAGS, f"--data_dir={data}", f"--output_dir={tmp_path}/run").stderr.count(said) == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["val_samples"] == 353 and summary["train_samples"] == 1437
    done = train("--mode=evaluate", f"--checkpoint={tmp_path}/run/checkpoints", kind="mpirun", workers=2)
    counts = ("val_top1_count", "val_top5_count", "val_samples")
    assert done.stderr.count(said) == 1
    assert [json.loads(done.stdout)[name] for name in counts] == [summary[name] for name in counts]


@pytest.mark.parametrize("labels", ["the same", "none", "others"])
def test_a_training_goes_on_with_the_labels_that_it_had(labels, in_format, tmp_path):
    """A checkpoint of 0.9 has no checksum of them; what is saved next has it."""
    dataset = open_dataset(in_format("folder"))
    checksum = labels_checksum(dataset.train)
    written = {"step": 3, "labels": {"the same": checksum, "none": "", "others": "0c0ffee0"}[labels]}
    if labels == "others":
        refused = rf"^{tmp_path}/step-00000003 is .* another training: names or labels of training images have"
        with pytest.raises(UserError, match=refused):
            resumed(tmp_path, written, dataset)
    else:
        assert resumed(tmp_path, written, dataset).labels == checksum != ""


def resumed(folder, written: dict, dataset) -> Progress:
    """What a training with a checkpoint of this progress goes on from."""
    variables = {"model/000/a": tf.Variable(0.0)}
    write(folder / "step-00000003", {name: one.read_value() for name, one in variables.items()},
          {"meaning": MEANING, "recipe": {}, "classes": [], "epoch": 1.0, "top1": None, "progress": written})
    training = Training(parse(["train.py", f"--output_dir={folder}"]), dataset, World(), None, (None, None), None)
    setup = SimpleNamespace(state=SimpleNamespace(variables=variables, progress=Progress()))
    return training._read_disk(Checkpoints(folder, {}), setup).progress


def test_a_training_does_not_go_on_with_other_validation_images(tmp_path):
    """A folder without a division: another image under an old name. A checkpoint before 0.13 knows none of them."""
    images = fill(tmp_path / "images", 20)
    opened = open_dataset(images)
    begun = resumed(tmp_path, {"step": 3}, opened)
    assert begun.labels and {*begun.validation} == {"class_names", "files", "sizes"}
    for split, is_refused in ((opened.train, False), (opened.validation, True)):
        file = images / split.entries[0].files[0]
        other = next(path for path in images.glob("*/*") if path.stat().st_size != file.stat().st_size)
        before, _ = file.read_bytes(), file.write_bytes(other.read_bytes())
        refused = pytest.raises(UserError, match="checkpoint of another training: validation images have changed; ")
        with refused if is_refused else contextlib.nullcontext():
            assert resumed(tmp_path, dataclasses.asdict(begun), open_dataset(images)) == begun
        file.write_bytes(before)
        assert resumed(tmp_path, dataclasses.asdict(begun), open_dataset(images)) == begun


def test_synthetic_data(tmp_path):
    train(*FLAGS, "--data_dir=synthetic:960", f"--output_dir={tmp_path}/run")
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert row["samples"] == 960 and np.isfinite(row["train_loss"])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["val_samples"] == 39
    assert (tmp_path / "run" / "flags.txt").read_text().count("--data_dir=synthetic:960") == 1
