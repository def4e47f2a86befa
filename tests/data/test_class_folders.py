"""Folders of images as people have them: what is read of them, the same by every program, and what is said about it."""
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image

from common.errors import UserError
from data import facts, prepare
from data.balance import check_dataset
from data.class_folders import Listing, class_names, count, layout
from data.dataset import open_dataset
from data.image_files import IMAGE_SUFFIXES, kind
from data.images import READ
from data.preparing.run import make_preparation
from data.preparing.team import Team
from data.staging.local_copy import stage
from inference.predict import image_files
from plan import flags
from tests.rigs.pictures import CLASSES, command, encode, fill, picture, stored

SYSTEMS = ("__MACOSX", "@eaDir", "lost+found", "$RECYCLE.BIN", ".AppleDouble", ".ipynb_checkpoints")
LATIN1 = b"caf\xe9.jpg"


def touch(*paths):
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize(("given", "table", "is_flat", "says"), [
    ("photos", None, True, ["images that are in no folder of a class", "--mode=predict --image={}/photos"]),
    ("photos", "photos/labels.csv", True, ["--image={}/photos", "data.prepare --source={}/photos/labels.csv "]),
    ("photos", "Species.TSV.gz", True, ["--image={}/photos", "data.prepare --source={}/Species.TSV.gz "]),
    (".", "labels.csv", True, ["a single class, 'photos'", "data.prepare --source={}/labels.csv "]),
    ("photos", "photos/labels.csv", False, ["data.prepare --source={}/photos/labels.csv "]),
    ("labels.csv", "labels.csv", True, ["labels.csv is a file; ", "data.prepare --source={}/labels.csv --output="]),
    ("photos/1.jpg", None, True, ["1.jpg is a file; for its class, give --mode=predict --image={}/photos/1.jpg"])])
def test_what_else_may_be_meant_is_named(given, table, is_flat, says, tmp_path, capsys):
    """By a folder without folders of classes, and by a file. data.prepare says the same of a folder."""
    for name in ("photos/0.jpg", "photos/1.jpg") if is_flat else ("photos/notes/1.txt",):
        touch(tmp_path / name)
        (tmp_path / name).write_bytes(encode(picture(0)) if is_flat else b"notes")
    if table:
        (tmp_path / table).write_text("file,label\n")
    with pytest.raises(UserError) as problem:
        check_dataset(open_dataset(tmp_path / given))
    assert all(words.format(tmp_path) in str(problem.value) for words in says), problem.value
    assert ("data.prepare --source" in str(problem.value)) == bool(table) and len(str(problem.value)) < 800
    if (tmp_path / given).is_dir() and is_flat:
        assert command(f"--source={tmp_path / given}", f"--output={tmp_path}-o", "--validation_fraction=0.5") == 1
        assert says[-1].format(tmp_path) in capsys.readouterr().err


@pytest.fixture
def messy(tmp_path):
    """train/ and val/ of two classes, with links and with what is no image of theirs; and the images to be read."""
    folder = tmp_path / "messy"
    fill(folder / "train", 3, classes=("cat", "dog"))
    fill(folder / "val", 2, first=100, classes=("cat", "dog"))
    fill(tmp_path, 2, first=200, classes=("elsewhere",))
    cat = folder / "train" / "cat"
    (cat / "more").symlink_to(tmp_path / "elsewhere")
    (cat / "again").symlink_to(tmp_path / "elsewhere")
    (cat / "z.jpg").symlink_to(folder / "val" / "dog" / "0 ü.jpg")
    (cat / "deep" / "deeper").mkdir(parents=True)
    shutil.copy(tmp_path / "elsewhere" / "0 ü.jpg", cat / "deep" / "deeper" / "Thumbs.db.jpg")
    wanted = sorted(path for name in ("", "more", "again", "deep/deeper") for path in (cat / name).glob("*.jpg"))
    (cat / "up").symlink_to(cat)  # eight to be left out
    (cat / "deep" / "top").symlink_to(folder)
    (cat / "gone.jpg").symlink_to(tmp_path / "nowhere")
    (cat / "round.jpg").symlink_to("round.jpg")
    touch(cat / ".DS_Store", cat / "THUMBS.DB", cat / "deep" / "desktop.ini", cat / "Icon\r")
    for name in SYSTEMS:  # twelve more
        for place in (folder / "train", cat / "deep"):
            touch(place / name / "1.jpg")
    return folder, wanted


def test_files_are_sorted_as_pathlib_sorts_them(tmp_path):
    """The permutation of an epoch is one of this order. Names sort otherwise than paths as strings do."""
    names = ("a", "a!", "a b", "a.b", "B", "b", "é", "ü", "10", "9", "a/b", "a/a", "a!/c", "c/d/e", "c/d!", "c/d/a/x")
    for name in ("dog", "cat", "dog 2"):
        touch(*(tmp_path / "train" / name / f"{file}.jpg" for file in names), tmp_path / "val" / name / "1.jpg")
    expected = [str(path.relative_to(tmp_path / "train")) for path in sorted(
        path for path in (tmp_path / "train").rglob("*") if path.is_file())]
    assert expected != sorted(expected)
    [listing] = open_dataset(tmp_path).train.entries
    assert listing.files == expected and listing.labels.tolist() == [0] * 16 + [1] * 16 + [2] * 16


def test_a_prepared_dataset_is_recognized_by_the_same_listing(tmp_path):
    """The hash by which an interrupted preparation goes on, from pathlib's list of files."""
    fill(tmp_path / "source", 2)
    touch(tmp_path / "source" / "dog" / "deep" / "1.jpg")
    options = prepare.Options(source=str(tmp_path / "source"), output=str(tmp_path / "o"), validation_fraction=0.25)
    preparation, terms = make_preparation(options, Team(single_process=True))
    files = sorted(path for path in (tmp_path / "source").rglob("*") if path.is_file())
    items = preparation.source.splits
    assert sorted(items["train"].names + items["validation"].names) == [
        str(path.relative_to(tmp_path / "source")) for path in files]
    digest = hashlib.sha256(repr(CLASSES).encode())
    for split in ("train", "validation"):
        names, labels = items[split].names, items[split].labels
        hashed = hashlib.sha256("\0".join(names).encode())
        for column in (np.zeros(len(names), np.int64), np.full(len(names), -1, np.int64), labels.astype(np.int32)):
            hashed.update(column.tobytes())
        digest.update(hashed.digest())
    assert terms["listing"] == digest.hexdigest()


def test_every_program_reads_the_same_images(messy, tmp_path, capfd):
    folder, wanted = messy
    dataset = open_dataset(folder)
    train = dataset.train
    listed = [train.paths[0] / name for name in train.entries[0].files]
    assert listed[:len(wanted)] == wanted and len(listed) == len(wanted) + 3 and dataset.classes == ("cat", "dog")
    assert image_files([folder / "train" / "cat"]) == wanted
    assert capfd.readouterr().err == (f"bigbatch: left out of {folder}/train/cat: hidden files, system files (such as "
                                      "Thumbs.db) and links that lead nowhere (14): .DS_Store, Icon, THUMBS.DB, ...\n")
    assert count(folder / "train", 10**6) == len(listed)
    lines = facts.of_dataset(dataset)
    below = [path for path in listed if len(path.relative_to(folder).parts) > 3]
    assert lines[:2] == [
        f"{len(below)} images lie in subfolders of classes ({len({path.parent for path in below})}), such as "
        f"{min(str(path.parent.relative_to(folder / 'train')) for path in below)}; the outermost "
        "folder is the class",
        f"left out of {folder}/train: hidden files, system files (such as Thumbs.db) and links that lead nowhere "
        "(20): $RECYCLE.BIN, .AppleDouble, .ipynb_checkpoints, ..."]
    assert command(f"--source={folder}", f"--output={tmp_path}/o") == 0
    told = [line.removeprefix("data.prepare: ") for line in capfd.readouterr().err.splitlines()]
    assert told[:2] == lines[:2]
    pairs = stored(tmp_path / "o")["train"]
    assert sorted(pairs) == sorted((path.read_bytes(), path.relative_to(folder / "train").parts[0]) for path in listed)
    assert command("--adopt", f"--output={folder}") == 0
    told = [line.removeprefix("data.prepare: ") for line in capfd.readouterr().err.splitlines()]
    assert told[:2] == lines[:2] and open_dataset(folder).train.samples == len(listed)


@pytest.mark.parametrize("format", READ)
def test_the_first_bytes_tell_an_image(format, tmp_path):
    """Of what Pillow writes, whatever the name. All suffixes that Pillow knows tell it, too."""
    for number, name in enumerate(("no suffix", "img.0001")):
        (tmp_path / name).write_bytes(encode(picture(number), format))
        assert kind(tmp_path, name) in IMAGE_SUFFIXES
    known = [suffix for suffix, name in Image.registered_extensions().items() if name == format]
    assert known and {kind(tmp_path, f"none{suffix.upper()}") for suffix in known} == set(known)


@pytest.mark.parametrize("content", [
    b"", b"notes", b"BMW 320, a car", b"P1 is a file", b"RIFF\0\0\0\0WAVEfmt ", b"\0\0\0\x18ftypmp42", b"%PDF-1.4"])
def test_first_bytes_of_other_files(content, tmp_path):
    (tmp_path / "file.dat").write_bytes(content)
    assert kind(tmp_path, "file.dat") == ""


@pytest.fixture
def odd(tmp_path):
    """Two classes of images with rare suffixes or none, other files, and an image in no class folder."""
    folder = fill(tmp_path / "odd" / "train", 3, classes=("cat", "dog"))
    fill(tmp_path / "odd" / "val", 2, first=100, classes=("cat", "dog"))
    for number, path in enumerate(sorted(folder.rglob("*.jpg"))):
        path.rename(path.with_suffix((".jfif", "", ".1")[number % 3]))
    shutil.copy(folder / "cat" / "0 ü.jfif", folder / "top.jpg")
    (folder / "cat" / "notes.txt").write_text("no image")
    (folder / "dog" / "1.xml").write_text("no image")
    return tmp_path / "odd"


def test_one_rule_in_every_program(odd, tmp_path, capfd):
    images = sorted(path for path in odd.rglob("*") if path.suffix in (".jfif", "", ".1", ".jpg") and path.is_file())
    images.remove(odd / "train" / "top.jpg")
    line = (f"left out of {odd}/train: files that are no images (2): cat/notes.txt, dog/1.xml; "
            "images in no class folder (1): top.jpg")
    dataset = open_dataset(odd)
    assert [path / file for split in (dataset.train, dataset.validation) for path, listing in zip(
        split.paths, split.entries, strict=True) for file in listing.files] == images
    assert facts.of_folder(dataset) == [line] and count(odd / "train", 10**6) == 6
    assert command(f"--source={odd}", f"--output={tmp_path}/o", "--strict") == 0
    assert capfd.readouterr().err.splitlines()[0] == f"data.prepare: {line}"
    assert sorted(image for pairs in stored(tmp_path / "o").values() for image, _ in pairs) == sorted(
        path.read_bytes() for path in images)
    assert image_files([odd]) == sorted([*images, odd / "train" / "top.jpg"])
    assert capfd.readouterr().err == (f"bigbatch: left out of {odd}: files that are no images (2): "
                                      "train/cat/notes.txt, train/dog/1.xml\n")
    for path in odd.rglob("*.jfif"):  # without any known suffix, the classes are still found
        path.rename(path.with_suffix(""))
    assert layout(odd.parent)[:2] == (odd / "train", odd / "val")


@pytest.mark.parametrize("format", ["GIF", "BMP"])
def test_formats_that_dali_does_not_read_without_a_suffix(format, odd):
    """They are refused at the start, or decoded once, as with their suffix."""
    (odd / "train" / "dog" / "0").write_bytes(encode(picture(1), format)[:-60])
    with pytest.raises(UserError, match=rf"{odd}/train/dog/0: (DALI does not read GIF|image file is truncated)"):
        open_dataset(odd)


def test_a_listing_for_another_worker_is_the_same(odd):
    """Also with labels that do not follow the names of the classes."""
    listing = Listing(odd / "train", ("dog", "cat"))
    sent = pickle.loads(pickle.dumps(listing))
    assert sent.labels.tolist() == [1, 1, 1, 0, 0, 0] and sent.files == listing.files
    assert vars(sent).keys() == vars(listing).keys() and sent.left_out == listing.left_out
    assert all(sent.left_out[what] for what in ("files that are no images", "images in no class folder"))


@pytest.mark.parametrize("split", ["", "train"])
def test_images_beside_their_labels_are_one_class(split, tmp_path, capsys):
    """As YOLO has them. An empty folder is no class, either."""
    top = tmp_path / "yolo"
    for number, name in enumerate((split, "val") if split else (split,)):
        fill(top / name, 4, first=10 * number, classes=("images",))
        touch(*(top / name / "labels" / f"{image}.txt" for image in range(4)))
    said = f"{top} has a single class, 'images', so there is nothing to learn; it needs images of at least two classes"
    flags = () if split else ("--validation_fraction=0.5",)
    assert command(f"--source={top}", f"--output={tmp_path}/o", *flags) == 1
    assert capsys.readouterr().err.startswith(f"data.prepare: {said}") and not (tmp_path / "o").exists()
    if split:
        with pytest.raises(UserError, match=said):
            check_dataset(open_dataset(top, check_files=False))
        for name in ("train", "val"):
            (top / name / "empty").mkdir()
        with pytest.raises(UserError, match=said):
            check_dataset(open_dataset(top))


@pytest.mark.parametrize("split", ["", "train"])
def test_a_folder_without_images_is_no_class(split, tmp_path, capsys):
    """A class that has images in one split is one. The labels are those of the names that are left."""
    top, names = tmp_path / "set", ("ant", "cat", "dog")
    for number, name in enumerate((split, "val") if split else (split,)):
        fill(top / name, 8, first=10 * number, classes=names)
        (top / name / "bee").mkdir()
        touch(top / name / "eel" / "notes.txt")
    if split:
        shutil.rmtree(top / "val" / "cat")
        (top / "val" / "cat").mkdir()
    dataset = open_dataset(top)
    assert dataset.classes == names and [counts.tolist()[1] > 0 for counts in dataset.class_counts] == [True, not split]
    for part in (dataset.train, dataset.validation):
        for file, label in zip(part.entries[0].files, part.entries[0].labels, strict=True):
            assert file.partition("/")[0] == names[label]
    said = "no classes, because they have no images: 'bee', 'eel'"
    assert said in facts.of_folder(dataset)
    flags = () if split else ("--validation_fraction=0.5",)
    assert command(f"--source={top}", f"--output={tmp_path}/o", *flags) == 0
    assert said in capsys.readouterr().err
    assert json.loads((tmp_path / "o" / "dataset.json").read_text())["classes"] == [*names]


def test_a_class_is_lost_when_all_its_images_are_rejected(tmp_path, capsys):
    fill(tmp_path / "set" / "train", 2, classes=("cat",))
    fill(tmp_path / "set" / "val", 2, first=9, classes=("cat", "dog"))
    touch(tmp_path / "set" / "train" / "dog" / "1.jpg")
    assert command(f"--source={tmp_path}/set", f"--output={tmp_path}/o") == 1
    assert f"{tmp_path}/o has a single class, 'cat'" in capsys.readouterr().err
    assert not (tmp_path / "o" / "dataset.json").exists()


@pytest.mark.parametrize("name", ["train", "val"])
def test_one_split_of_two(name, tmp_path, capsys):
    for number, split in enumerate(("train", "val")):
        fill(tmp_path / split, 4, first=20 * number)
    with pytest.raises(UserError, match=rf"{tmp_path}/{name} is one .*; give --data_dir={tmp_path}$"):
        open_dataset(tmp_path / name)
    assert command(f"--source={tmp_path}/{name}", f"--output={tmp_path}-o") == 1
    assert f"give --source={tmp_path}, or --validation_fraction" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "train")
    with pytest.raises(UserError, match=f"{tmp_path} contains val/ but no train/"):
        open_dataset(tmp_path)


def test_a_staged_copy_has_what_links_lead_to(messy, tmp_path):
    folder, _ = messy
    dataset = open_dataset(folder)
    copy = stage(dataset, tmp_path / "disk")
    samples = np.arange(dataset.train.samples)
    assert [*copy.train.records(samples)] == [*dataset.train.records(samples)]


def test_clean_folders_need_no_line(tmp_path):
    fill(tmp_path / "train", 2)
    fill(tmp_path / "validation", 2, first=50)
    assert facts.of_folder(open_dataset(tmp_path)) == []


def of_classes(*folders) -> list[str]:
    return [f"{folder}/{name}/1.jpg" for folder in folders for name in ("cat", "dog")]


def flat(*folders) -> list[str]:
    return [f"{folder}/1.jpg" for folder in folders]


@pytest.mark.parametrize(("files", "train", "validation", "unused"), [
    (of_classes("train", "val"), "train", "val", []),
    (of_classes("Training", "Testing"), "Training", "Testing", []),
    (of_classes("training", "validation"), "training", "validation", []),
    (of_classes("Train", "Test"), "Train", "Test", []),
    (of_classes("TRAIN", "VALID", "TEST"), "TRAIN", "VALID", ["TEST"]),
    (of_classes("train", "val", "test"), "train", "val", ["test"]),
    (of_classes("train", "Train", "val"), "train", "val", ["Train"]),
    (of_classes("images/train", "images/val"), "images/train", "images/val", []),
    ([*of_classes("images/Train", "images/Test"), "labels/1.xml", "images/x.txt"], "images/Train", "images/Test", []),
    (of_classes("__MACOSX/train", "__MACOSX/val", "data/train", "data/val"), "data/train", "data/val", []),
    ([*of_classes("train"), *flat("test")], "train", None, ["test"]),
    ([*of_classes("Train"), *flat("Test")], "Train", None, ["Test"]),
    ([*of_classes("train"), *flat("val", "devkit")], "train", "val", []),
    (flat("train", "test"), "train", None, ["test"]),
    ([*of_classes("train"), "notes/x.txt"], "train", None, []),
    # classes
    (flat("cat", "dog"), ".", None, []),
    (flat("test", "training", "exam"), ".", None, []),
    ([*flat("test", "exam"), "training/patient1/1.jpg"], ".", None, []),
    (flat("train", "bus", "car"), ".", None, []),
    (flat("cat/train", "cat/val", "dog/train", "dog/val"), ".", None, []),
])
def test_names_decide_which_folders_are_splits(files, train, validation, unused, tmp_path):
    touch(*(tmp_path / file for file in files))
    expected = tmp_path / train, validation and tmp_path / validation, [tmp_path / name for name in unused]
    assert layout(tmp_path) == expected


@pytest.mark.parametrize(("train", "validation", "unused"), [
    ("Training", "Testing", []), ("images/train", "images/val", ["images/test"])])
def test_splits_by_other_names(train, validation, unused, tmp_path, capfd):
    source = tmp_path / "source"
    for number, (name, images) in enumerate(((train, 3), (validation, 2), *((name, 1) for name in unused))):
        fill(source / name, images, first=100 * number)
    lines = [f"{source}/{train} has the training images, and {source}/{validation} the validation images",
             *(f"not used: {source}/{name}" for name in unused)]
    dataset = open_dataset(source)
    assert (dataset.classes, dataset.train.samples, dataset.validation.samples) == (CLASSES, 9, 6)
    assert facts.of_folder(dataset) == lines
    assert command(f"--source={source}", f"--output={tmp_path}/o") == 0
    told = [line.removeprefix("data.prepare: ") for line in capfd.readouterr().err.splitlines()]
    assert told[:-2] == lines
    prepared = open_dataset(tmp_path / "o")
    assert (prepared.classes, prepared.train.samples, prepared.validation.samples) == (CLASSES, 9, 6)
    assert command("--adopt", f"--output={source}") == 0
    adopted = open_dataset(source)
    assert [split.paths for split in (adopted.train, adopted.validation)] == [(source / train,), (source / validation,)]
    assert command(f"--source={source}", f"--output={tmp_path}/p", "--validation_fraction=0.5") == 1
    assert f"remove this flag, or prepare {source}/{train} alone" in capfd.readouterr().err


def test_validation_images_without_class_folders(tmp_path, capfd):
    """As ImageNet's are when they are unpacked. Both programs say the same."""
    fill(tmp_path / "train", 2)
    fill(tmp_path, 2, classes=("val",))
    said = f"{tmp_path}/val contains no images in class folders"
    for check_files in (True, False):
        with pytest.raises(UserError, match=f"^--data_dir: {said}$"):
            open_dataset(tmp_path, check_files)
    assert command(f"--source={tmp_path}", "--output=/tmp/never") == 1
    assert capfd.readouterr().err == f"data.prepare: --source: {said}\n"


def latin1(folder: bytes, name: bytes, number: int) -> None:
    os.makedirs(folder, exist_ok=True)
    with open(folder + b"/" + name, "wb") as file:
        file.write(encode(picture(number)))


def test_names_that_are_not_utf8(tmp_path, capfd):
    """DALI takes none. Prepared, they are read; the file that is named is the first."""
    source = tmp_path / "source"
    for number, place in enumerate((b"train/dog", b"train/ch\xe2t", b"val/dog", b"val/ch\xe2t")):
        latin1(os.fsencode(source) + b"/" + place, LATIN1, number)
    escaped = rf"{source}/train/ch\\xe2t/caf\\xe9.jpg: DALI does not read names that are not UTF-8; run "
    with pytest.raises(UserError, match=escaped) as refused:
        open_dataset(source)
    assert command("--adopt", f"--output={source}") == 1
    assert str(refused.value) in capfd.readouterr().err and not (source / "dataset.json").exists()
    assert command(f"--source={source}", f"--output={tmp_path}/o") == 0
    prepared = open_dataset(tmp_path / "o")
    assert [os.fsencode(name) for name in prepared.classes] == [b"ch\xe2t", b"dog"]
    for name in (prepared.validation.source_name(sample) for sample in range(2)):
        assert os.fsencode(name).endswith(LATIN1) and (source / name).is_file()
    assert class_names(source / "train") == [*prepared.classes]


@pytest.mark.parametrize("name", ["data_dir", "output_dir"])
def test_folders_that_are_not_utf8(name, tmp_path, capfd):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/f\xfcr")
    with pytest.raises(UserError, match=rf"--{name}={tmp_path}/f\\xfcr is not UTF-8"):
        flags.parse(["train.py", "--flagfile=digits", f"--{name}={folder}"])
    fill(tmp_path / "source", 2)
    assert command(f"--source={tmp_path}/source", f"--output={folder}", "--validation_fraction=0.5") == 2
    assert capfd.readouterr().err.startswith(rf"data.prepare: --output={tmp_path}/f\xfcr is not UTF-8")
    assert not os.path.exists(folder)


def test_a_decoder_that_checks_a_tiff_ends_before_python(tmp_path):
    """A pipeline of DALI that outlives its modules fails in its destructor, which prints `Exception ignored in`."""
    fill(tmp_path / "photos", 3)
    (tmp_path / "photos" / "dog" / "scan.tif").write_bytes(encode(picture(9), "TIFF"))
    program = ("import atexit, sys\n"
               "atexit.register(lambda: print(images._decoder.cache_info().currsize))  # runs last\n"
               "from data import dataset, images\n"
               "dataset.open_dataset(sys.argv[1])\n"
               "print(images._decoder.cache_info().currsize)\n")
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "photos"], cwd=ROOT, capture_output=True,
                          text=True, timeout=300)
    assert done.stdout.split() == ["1", "0"] and "Exception ignored" not in done.stderr, done.stderr
