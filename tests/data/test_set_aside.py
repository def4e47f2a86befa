"""A folder of classes without validation images: which of them are set aside, in training and by data.prepare."""
import hashlib
import shutil

import numpy as np
import pytest
from conftest import TRAIN, printed_json, rows, run, train, weights

from data import facts
from data.dataset import open_dataset
from data.set_aside import SetAside, set_aside
from tests.rigs.pictures import CLASSES, command, encode, fill, picture

FLAGS = ("--model=convnet", "--image_size=24", "--batch_size=8", "--batch_norm_span=auto", "--micro_batch_size=4",
         "--epochs=2", "--evaluate_every=1", "--checkpoint_every=0.4", "--deterministic")


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three classes of 20 pictures, and one that is there under two labels."""
    folder = fill(tmp_path_factory.mktemp("photos") / "photos", 20)
    shutil.copy(folder / "dog" / "1 ü.jpg", folder / "épée" / "copy.jpg")
    return folder


def position(file: str) -> float:
    """Where the hash of a path lies between 0 and 1."""
    return int(hashlib.sha256(file.encode()).hexdigest()[:16], 16) / 16**16


def names_and_labels(sizes) -> tuple[list[str], np.ndarray]:
    return ([f"{label}/{number}.jpg" for label, size in enumerate(sizes) for number in range(size)],
            np.repeat(np.arange(len(sizes)), sizes))


def test_the_hash_of_its_path_decides_for_each_image():
    files, labels = names_and_labels((2000, 500))
    chosen = set_aside(files, labels, SetAside(0.2))
    assert chosen.tolist() == [position(file) < 0.2 for file in files]
    assert abs(chosen[:2000].mean() - 0.2) < 4 * (0.2 * 0.8 / 2000) ** 0.5
    assert set_aside(files, labels, SetAside(1)).all()


@pytest.mark.parametrize("fraction", [0.001, 0.2, 0.9])
def test_both_sides_have_an_image_of_each_class(fraction):
    files, labels = names_and_labels((1, 2, 3, 0, 15))
    chosen = set_aside(files, labels, SetAside(fraction))
    for label, size in enumerate((1, 2, 3, 0, 15)):
        if size:
            assert not chosen[labels == label].all() and chosen[labels == label].any() == (size > 1)


def test_a_new_image_moves_no_other_one():
    sizes = np.array((40, 40, 40))
    files, labels = names_and_labels(sizes)
    before = dict(zip(files, set_aside(files, labels, SetAside(0.2)), strict=True))
    files, labels = names_and_labels(sizes + 10)
    after = dict(zip(files, set_aside(files, labels, SetAside(0.2)), strict=True))
    assert {file: after[file] for file in before} == before and any(after[file] for file in files if file not in before)


def test_training_and_preparing_set_aside_the_same(photos, tmp_path, capsys):
    ours = open_dataset(photos, fraction=0.3)
    assert ours.classes == CLASSES and ours.train.samples + ours.validation.samples == 61
    for seed in (0, 1):
        output = tmp_path / str(seed)
        assert command(f"--source={photos}", f"--output={output}", "--validation_fraction=0.3", f"--seed={seed}") == 0
        theirs = open_dataset(output)
        for split, own in ((theirs.train, ours.train), (theirs.validation, ours.validation)):
            assert sorted(split.source_name(sample) for sample in range(split.samples)) == own.entries[0].files
    counts = {split: np.bincount(getattr(ours, split).entries[0].labels) for split in ("train", "validation")}
    sizes = ", ".join(f"{name} {train} + {validation}" for name, train, validation in zip(
        CLASSES, counts["train"], counts["validation"], strict=True))
    assert f"training + validation images by class: {sizes}\n" in capsys.readouterr().err
    first, second = facts.of_dataset(ours)[:2]
    assert first == (f"{photos} has no validation images, so about 0.3 of each class is set aside "
                     "(--validation_fraction), chosen by the names of the files")
    assert second == f"training + validation images by class: {sizes}"


def test_many_classes_are_not_all_listed(tmp_path):
    for number, size in enumerate((3, 1, *(5,) * 30)):
        for image in range(size):
            path = tmp_path / f"{number:02}" / f"{image}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.touch()
    [said] = [line for line in facts.of_dataset(open_dataset(tmp_path), compares=False) if " + " in line]
    assert said.startswith("training + validation images of the smallest 20 of 32 classes: 01 1 + 0, 00 2 + 1, ")
    assert said.count("+") == 21


def test_equal_bytes_on_both_sides_are_told(tmp_path):
    """Also of files that differ before their last bytes, which are read."""
    files, labels = names_and_labels((12, 12))
    chosen = set_aside(files, labels, SetAside(0.2))
    validation, train = files[np.flatnonzero(chosen)[0]], files[np.flatnonzero(~chosen)[0]]
    for number, file in enumerate(files):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(encode(picture(number), "BMP"))
    assert facts.of_equal_images(open_dataset(tmp_path)) == []
    shutil.copy(tmp_path / train, tmp_path / validation)
    assert facts.of_equal_images(open_dataset(tmp_path)) == [
        "identical images in both splits, so the validation accuracy is too high (1): "
        f"{train} = {validation}"]
    assert facts.of_equal_images(open_dataset(tmp_path)) == facts.of_dataset(open_dataset(tmp_path))[2:]


@pytest.fixture(scope="module")
def trained(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one"
    return folder, train(f"--data_dir={photos}", *FLAGS, f"--output_dir={folder}")


@pytest.mark.trainings
def test_a_folder_of_classes_trains_the_same_on_two_workers(photos, trained, tmp_path):
    folder, done = trained
    assert done.stderr.count("has no validation images, so about 0.2 of each class is set aside") == 1
    assert "identical images" in done.stderr and "--validation_fraction=0.2\n" in (folder / "flags.txt").read_text()
    two = train(f"--data_dir={photos}", *FLAGS, f"--output_dir={tmp_path}/two", kind="mpirun", workers=2)
    ours, theirs = weights(folder), weights(tmp_path / "two")
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert printed_json(two)["val_loss"] == printed_json(done)["val_loss"]
    assert two.stderr.count("is set aside") == 1


@pytest.mark.trainings
def test_a_resume_keeps_what_was_set_aside(photos, trained, tmp_path):
    folder, _ = trained
    half = tmp_path / "half"
    shutil.copytree(folder, half, symlinks=True)
    shutil.rmtree(sorted((half / "checkpoints").glob("step-*"))[-1])
    assert "resumed after step" in train(f"--data_dir={photos}", f"--output_dir={half}").stderr
    assert rows(half)[-1]["val_loss"] == rows(folder)[-1]["val_loss"]
    ours, theirs = weights(folder), weights(half)
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    other = run("python", 1, TRAIN, f"--data_dir={photos}", f"--output_dir={half}", "--validation_fraction=0.3")
    assert other.returncode == 1 and "validation_fraction was 0.2 and is now 0.3" in other.stderr
