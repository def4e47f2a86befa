"""What open_dataset refuses and what it tells: all that can be seen without reading the images."""
import contextlib
import json
import re
import shlex
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import TRAIN, run, train

import train as train_py
from common.errors import UserError
from data import facts, named
from data.balance import train_counts
from data.dataset import describe, labels_checksum, open_dataset
from data.formats import tfrecord
from data.named import open_named
from data.prepare import Options
from data.preparing.run import make_preparation
from data.preparing.team import Team
from launch import topology
from tests.rigs.pictures import command, encode, fill, picture


@pytest.fixture
def copy(odd_digits, tmp_path):
    return shutil.copytree(odd_digits, tmp_path / "copy")


@pytest.mark.parametrize("flag", ["data_dir", "source", "topology"])
def test_a_name_that_is_built_in_and_here(flag, tmp_path, monkeypatch, capsys):
    """What is built in is taken, as ever, and one line says how to name the other, which that does."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "digits" / "train", 4)
    fill(tmp_path / "digits" / "val", 4, first=50)
    (tmp_path / "abci").write_text("{}")
    if flag == "data_dir":
        assert (len(open_named("digits").classes), len(open_named("./digits").classes)) == (10, 3)
    elif flag == "source":
        assert [len(make_preparation(Options(source=name, output="o"), Team(single_process=True))[0].source.classes)
                for name in ("digits", "./digits")] == [10, 3]
    else:
        assert topology.load("abci").network.local_size == 4
        with pytest.raises(UserError, match="within is missing"):
            topology.load("./abci")
    name = "abci" if flag == "topology" else "digits"
    said = [line for line in capsys.readouterr().err.splitlines() if "built-in" in line]
    assert said == [f"bigbatch: --{flag}={name} is the built-in {name}; for ./{name}, give --{flag}=./{name}"]


def edit(folder, change):
    described = json.loads((folder / "dataset.json").read_text())
    change(described)
    (folder / "dataset.json").write_text(json.dumps(described))


@pytest.mark.parametrize(("broken", "rank", "raised", "alone"), [
    ("", 0, False, False), ("nowhere", 0, True, False), ("nowhere", 1, True, False),
    ("shard", 0, True, True), ("shard", 1, False, False)])
def test_what_rank_0_alone_finds_ends_it_together_with_the_others(broken, rank, raised, alone, copy, monkeypatch):
    """mpirun may hang if it kills a rank in MPI_Init. What all find before that ends all of them at once."""
    ended = []

    @contextlib.contextmanager
    def ended_together():
        ended.append(rank)
        yield

    monkeypatch.setattr(named, "ended_together", ended_together)
    monkeypatch.setattr(named, "launched", lambda: SimpleNamespace(rank=rank))
    if broken == "shard":
        next(path for path in copy.rglob("*") if path.is_file() and path.name != "dataset.json").unlink()
    with pytest.raises(UserError) if raised else contextlib.nullcontext():
        dataset = named.open_on_each_rank(str(copy / "nowhere" if broken == "nowhere" else copy), 0.1, None)
        assert dataset.train.samples == 1437
    assert ended == [0] * alone


def test_a_dataset_of_several_files_opens(copy):
    dataset = open_dataset(copy)
    assert dataset.train.samples == 1437 and dataset.train.file_starts.tolist() == [0, 500, 900, 1437]
    assert [index.shape for index in dataset.train.entries] == [(500, 2), (400, 2), (537, 2)]
    assert describe(dataset) == json.loads((copy / "dataset.json").read_text())


@pytest.mark.parametrize(("damage", "message"), [
    (lambda folder: (folder / "dataset.json").unlink(), "contains neither dataset.json"),
    (lambda folder: (folder / "dataset.json").write_text("{"), "cannot be read"),
    (lambda folder: (folder / "dataset.json").write_text("[]"), "malformed"),
    (lambda folder: edit(folder, lambda d: d.pop("image")), "malformed"),
    (lambda folder: edit(folder, lambda d: d["train"].update(samples=1438)), "add up to 1437"),
    (lambda folder: edit(folder, lambda d: d["train"]["files"][0].update(samples=499)), "add up to 1436"),
    (lambda folder: edit(folder, lambda d: d["validation"].update(samples=0, files=[])), "validation split is empty"),
    (lambda folder: edit(folder, lambda d: d["train"].pop("samples")), "malformed"),
    (lambda folder: edit(folder, lambda d: d.update(format="cards")), "'cards' is not one of"),
    (lambda folder: edit(folder, lambda d: d.update(classes=[])), "must be a list of at least one name"),
    (lambda folder: edit(folder, lambda d: d.update(classes="abc")), "must be a list of at least one name"),
    (lambda folder: edit(folder, lambda d: d["image"].update(mean=[1, 2])), "three finite numbers"),
    (lambda folder: edit(folder, lambda d: d["image"].update(mean=[1, 2, float("nan")])), "three finite numbers"),
    (lambda folder: edit(folder, lambda d: d["image"].update(std=[1, 0, 1])), "must be positive"),
    (lambda folder: (folder / "validation 0.tfrecord.idx").write_text("-5 -7\n" * 353), "is not a TFRecord index"),
    (lambda folder: (folder / "train 1.tfrecord").unlink(), "No such file"),
    (lambda folder: (folder / "train 1.tfrecord.idx").unlink(), "No such file"),
    (lambda folder: (folder / "train 1.tfrecord.idx").write_text("0 1\n2"), "not an index with one line"),
    (lambda folder: (folder / "train 1.tfrecord.idx").write_text("0 1\n"), "is not a TFRecord index"),
    (lambda folder: truncate(folder / "train 2.tfrecord"), "truncated"),
])
def test_a_damaged_dataset_is_refused(copy, damage, message):
    damage(copy)
    with pytest.raises(UserError, match=message):
        open_dataset(copy)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def test_a_pointer_in_place_of_a_shard_is_named(copy):
    """Of a clone without Git LFS."""
    path = next(copy.glob("train*.tfrecord"))
    path.write_text("version https://git-lfs.github.com/spec/v1\nsize 12345\n")
    with pytest.raises(UserError, match=f"^{path} is a Git LFS pointer; `git lfs pull`"):
        open_dataset(copy)


def test_scanning_a_truncated_shard(copy):
    truncate(copy / "train 2.tfrecord")
    with pytest.raises(ValueError, match="ends inside record 536"):
        tfrecord.scan(copy / "train 2.tfrecord")


def commands(folder) -> tuple[list[str], list[str]]:
    """The words after `data.prepare` and after `train.py` in the commands that an error names."""
    with pytest.raises(UserError) as error:
        open_dataset(folder)
    assert "\n" not in str(error.value)
    prepare, training = (shlex.split(words) for words in re.findall("`(.*?)`", str(error.value)))
    assert prepare[:5] == ["uv", "run", "python", "-m", "data.prepare"] and training[:3] == ["uv", "run", "train.py"]
    return prepare[5:], training[3:]


@pytest.mark.parametrize("within", [".", "train"])
def test_class_folders_without_validation_name_the_commands_that_work(tmp_path, within):
    """The prepared dataset has the same validation images, and the one that DALI does not read."""
    folder = tmp_path / "it's mine"
    fill(folder / within, 10)
    ours = open_dataset(folder)
    (folder / within / "dog" / "x.gif").write_bytes(encode(picture(99), "GIF"))
    prepare, training = commands(folder)
    assert command(*prepare) == 0
    dataset = open_dataset(training[0].partition("=")[2])
    assert dataset.format == "tfrecord" and dataset.train.samples + dataset.validation.samples == 31
    for split, own in ((dataset.train, ours.train), (dataset.validation, ours.validation)):
        names = {split.source_name(sample).removeprefix("train/") for sample in range(split.samples)}
        assert names - {"dog/x.gif"} == {*own.entries[0].files}


@pytest.mark.parametrize(("name", "kind"), [
    ("x.gif", "GIF"), ("y.HEIC", "HEIF"), ("z.avif", "AVIF"), ("phone.jpg", "HEIF")])
def test_a_format_that_dali_does_not_read_names_the_file_and_the_commands(tmp_path, name, kind):
    fill(tmp_path / "set" / "train", 3)
    fill(tmp_path / "set" / "val", 3, first=100)
    (tmp_path / "set" / "val" / "dog" / "a.gif").write_bytes(encode(picture(7)))  # a JPEG: the content counts
    assert open_dataset(tmp_path / "set").validation.samples == 10
    file = tmp_path / "set" / "val" / "dog" / name
    file.write_bytes(encode(picture(8), kind))
    with pytest.raises(UserError, match=f"{file}: DALI does not read GIF, HEIC and AVIF, whatever their names; run "):
        open_dataset(tmp_path / "set")
    prepare, training = commands(tmp_path / "set")
    assert command(*prepare) == 0 and open_dataset(training[0].partition("=")[2]).validation.samples == 11


def test_what_dali_would_misread_is_refused_before_training(tmp_path):
    """A PPM whose white is 4095. The content counts, and one file of each suffix is looked at, not each file."""
    fill(tmp_path / "train", 3)
    fill(tmp_path / "val", 3, first=100)
    for name in ("a.ppm", "b.bmp"):
        (tmp_path / "train" / "dog" / name).write_bytes(encode(picture(7), "BMP"))
    assert open_dataset(tmp_path).train.samples == 11
    file = tmp_path / "train" / "dog" / "a.ppm"
    file.write_bytes(b"P6\n2 1\n4095\n" + bytes([0, 9, 3, 7] * 3))
    with pytest.raises(UserError, match=f"--data_dir: {file}: DALI makes other pixels of it .*; prepare the images"):
        open_dataset(tmp_path)


def test_a_gif_under_another_name_is_found_at_the_start(tmp_path, capsys):
    fill(tmp_path / "train", 3)
    fill(tmp_path / "val", 3, first=100)
    (tmp_path / "val" / "dog" / "x.jpg").write_bytes(encode(picture(8), "GIF"))
    assert command("--verify", f"--output={tmp_path}") == 1
    [told] = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/val/dog/x.jpg: DALI does not read GIF, HEIC and AVIF, whatever their names; run" in told


def test_what_the_labels_tell(tmp_path, capsys):
    for number, (name, training, validation) in enumerate((("cat", 20, 4), ("dog", 10, 0), ("fox", 0, 2))):
        fill(tmp_path / "set" / "train", training, first=100 * number, classes=(name,))
        fill(tmp_path / "set" / "val", validation, first=1000 + 100 * number, classes=(name,))
    expected = ["no training images in class 'fox'", "no validation images in class 'dog'",
                "training + validation images by class: cat 20 + 4, dog 10 + 0, fox 0 + 2"]
    assert facts.of_dataset(open_dataset(tmp_path / "set")) == expected
    assert command(f"--source={tmp_path}/set", f"--output={tmp_path}/o", "--shard_samples=7") == 0
    assert capsys.readouterr().err.splitlines()[1:] == [f"data.prepare: {line}" for line in expected]
    assert facts.of_dataset(open_dataset(tmp_path / "o")) == expected
    np.testing.assert_array_equal(train_counts(open_dataset(tmp_path / "o")), [20, 10, 0])
    for path in (tmp_path / "o").glob("*.crc32"):
        path.unlink()
    assert facts.of_dataset(open_dataset(tmp_path / "o")) == []  # nobody knows without reading the records
    with pytest.raises(UserError, match=f"^--class_weights: the labels of {tmp_path}/o are not known before"):
        train_counts(open_dataset(tmp_path / "o"))


def test_balanced_classes_are_no_news(odd_digits, digits):
    assert facts.of_dataset(open_dataset(digits), True) == facts.of_dataset(open_dataset(odd_digits), True) == []


def test_a_training_tells_it_once_and_refuses_a_single_class(tmp_path):
    fill(tmp_path / "train", 8, classes=("cat",))
    fill(tmp_path / "val", 4, first=100, classes=("cat",))
    flags = (f"--data_dir={tmp_path}", "--model=convnet", "--image_size=24", "--batch_size=8", "--epochs=1",
             f"--output_dir={tmp_path}/run")
    done = run("mpirun", 2, TRAIN, *flags)
    assert done.returncode == 1 and "has a single class, 'cat'" in done.stderr
    assert not (tmp_path / "run").exists()
    fill(tmp_path / "train", 4, first=200, classes=("ant",))
    (tmp_path / "train" / "dog").mkdir()
    fill(tmp_path / "val", 2, first=300, classes=("ant", "dog"))
    done = train(*flags, kind="mpirun", workers=2)
    assert done.stderr.count("train.py: no training images in class 'dog'") == 1


def test_a_validation_set_is_known_wherever_it_lies_and_in_any_order(digits, tmp_path):
    folder = shutil.copytree(digits, tmp_path / "moved")
    [lines] = folder.glob("validation*.crc32")
    first, *rest = lines.read_text().splitlines()
    lines.write_text("\n".join([*reversed(rest), first]))
    known = open_dataset(folder).validation_content
    assert known == open_dataset(digits).validation_content and {*known} == {"class_names", "images"}
    lines.write_text("\n".join([f"{first[:-1]}{1 - int(first[-1])}", *rest]))  # another label
    assert open_dataset(folder).validation_content["images"] != known["images"]
    edit(folder, lambda described: described["classes"].__setitem__(0, "nought"))
    assert open_dataset(folder).validation_content["class_names"] != known["class_names"]
    lines.unlink()
    assert {*open_dataset(folder).validation_content} == {"class_names"}


def test_a_folders_validation_set_is_known_by_its_files(tmp_path):
    for split in ("train", "val"):
        fill(tmp_path / "images" / split, 4)
    folder = shutil.copytree(tmp_path / "images", tmp_path / "moved")
    known = open_dataset(folder).validation_content
    assert known == open_dataset(tmp_path / "images").validation_content
    assert {*known} == {"class_names", "files", "sizes"}
    file = next((folder / "val").glob("*/*"))
    file.write_bytes(file.read_bytes() + b"x")  # another image with the same name
    changed = open_dataset(folder).validation_content
    assert changed["files"] == known["files"] and changed["sizes"] != known["sizes"]
    file.rename(file.with_stem("another"))
    assert open_dataset(folder).validation_content["files"] != known["files"]


@pytest.mark.parametrize("format", ["folder", "tfrecord", "lmdb", "recordio"])
def test_labels_that_moved_are_noticed(format, tmp_path):
    """Two images change their classes, so that all counts stay. A copy elsewhere is the same set."""
    def checksum(source):
        if format != "folder":
            assert command(f"--source={source}", f"--output={source}-{format}", f"--format={format}") == 0
        return labels_checksum(open_dataset(source if format == "folder" else f"{source}-{format}").train)

    fill(tmp_path / "set" / "train", 3)
    fill(tmp_path / "set" / "val", 3, first=50)
    before = checksum(tmp_path / "set")
    shutil.copytree(tmp_path / "set", tmp_path / "copy")
    assert before and checksum(tmp_path / "copy") == before
    shutil.copytree(tmp_path / "copy", tmp_path / "moved")
    top = tmp_path / "moved" / "train"
    (top / "dog" / "0 ü.jpg").rename(top / "a b" / "x.jpg")
    (top / "a b" / "1 ü.jpg").rename(top / "dog" / "y.jpg")
    after = checksum(tmp_path / "moved")
    assert after and after != before
    if format == "tfrecord":
        for path in (tmp_path / "moved-tfrecord").glob("*.crc32"):
            path.unlink()
        assert labels_checksum(open_dataset(tmp_path / "moved-tfrecord").train) == ""


@pytest.mark.parametrize("format", ["folder", "tfrecord"])
def test_a_dry_run_says_the_forecast_and_that_training_enlarges_images(format, tmp_path, capsys):
    """Most images have 16 pixels. Those that are larger, or no images, do not count."""
    folder = fill(tmp_path / "images" / "train", 5, size=(20, 16)).parent
    fill(folder / "val", 3, first=50, size=(20, 16))
    (folder / "train" / "dog" / "0 large.jpg").write_bytes(encode(picture(99, (300, 400))))
    if format == "folder":
        (folder / "train" / "dog" / "1 none.jpg").write_bytes(b"none")
    else:
        assert command(f"--source={folder}", f"--output={tmp_path / 'set'}") == 0
        folder = tmp_path / "set"
    assert facts.typical_side(open_dataset(folder).train) == 16
    capsys.readouterr()
    assert train_py.main(["train.py", f"--data_dir={folder}", "--dry_run"]) == 0
    said = capsys.readouterr().err
    assert "forecast: about 1 min on " in said
    assert ("note: the training images have about 16 pixels, and --image_size=64 enlarges them 4 times; a step takes "
            "much less time with --model=resnet20 --image_size=16\n") in said
    assert train_py.main(["train.py", f"--data_dir={folder}", "--dry_run", "--workers=2"]) == 0
    assert "forecast" not in capsys.readouterr().err  # of another machine
