"""A record that is damaged all the same is named, in every format."""
import copy
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from conftest import DIGITS, ROOT, run

from common.errors import UserError
from data import formats, order
from data.augmentation import AUGMENTATIONS
from data.dataset import open_dataset
from data.feed import Feed
from data.image_files import DAMAGED
from distributed.world import World
from tests.rigs.making import record, write_class_folders, write_shards
from tests.rigs.pictures import fill
from training.bad_input import first_damaged, input_reason
from training.evaluate import Evaluator

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
DAMAGES = {  # what becomes of an image, and what is said of it
    "truncated": (lambda image: image[:len(image) // 2], "cannot be decoded"),
    "header": (lambda image: image[:4] + bytes(200) + image[204:], "cannot be decoded"),
    "not an image": (lambda image: b"404: Not Found" + bytes(300), "cannot be decoded"),
    "web page": (lambda image: b"<html>404</html>" + bytes(300),
                 "is a web page, such as a sign-in or an error; download the file again"),
    "pointer": (lambda image: POINTER, "is a Git LFS pointer; `git lfs pull` in its repository fetches the file"),
    "empty": (lambda image: b"", "is empty"),
}


@pytest.fixture(params=formats.FORMATS)
def damaged(request, in_format, digit_records, tmp_path):
    """A function that makes a dataset whose training sample 777 is damaged; returns it and the record's name."""
    name = request.param

    def make(damage):
        records = {split: list(samples) for split, samples in digit_records.items()}
        if name == "folder":
            write_class_folders(name, records, tmp_path)
            split = open_dataset(tmp_path).train
            path = split.paths[0] / split.entries[0].files[777]
            with open(path, "rb+") as file:
                image = file.read()
                file.seek(0)
                file.truncate()
                file.write(DAMAGES[damage][0](image))
            return tmp_path, path
        image, label = records["train"][777]
        records["train"][777] = DAMAGES[damage][0](image), label
        write_shards(name, records, tmp_path)
        return tmp_path, f"{tmp_path}/train 1{formats.get(name).SUFFIX}, record 277"

    return make


def what_is_told(dataset) -> str:
    """The reason with which a training stops that reads the damaged sample as the 101st."""
    import tensorflow as tf

    stream = order.stream(dataset.train, 0, np.arange(1437))
    first = max(0, int(np.flatnonzero(stream == 777)[0]) - 100)
    with Feed(dataset, 24, AUGMENTATIONS["crop"], 0).train(first, 20, 32, 32) as batches:
        read = 0
        with pytest.raises(tf.errors.OpError) as caught:
            for _ in range(20):
                next(batches)
                read += 32
        assert read <= 128
        return input_reason(caught.value, batches, read)


@pytest.mark.parametrize("damage", [*DAMAGES][:-1])
def test_the_record_is_named(damaged, damage):
    folder, name = damaged(damage)
    dataset = open_dataset(folder)
    told = what_is_told(dataset)
    cure = "`data.prepare --verify` lists all damaged records" if dataset.format != "folder" else (
        f"to convert or leave out such files, {dataset.train.conversion('--format=tfrecord', '--verify')}")
    assert told == f"{name} {DAMAGES[damage][1]}; {cure}"


@pytest.mark.parametrize("damaged", ["folder"], indirect=True)
def test_a_file_of_zero_bytes_is_named_and_not_one_before_it(damaged):
    """DALI's reader, which reads ahead, fails on it before the files before it are decoded."""
    folder, name = damaged("empty")
    assert what_is_told(open_dataset(folder)).startswith(f"{name} is empty; to convert or leave out such files, ")


def test_a_sound_dataset_has_nothing_to_name(in_format):
    split = open_dataset(in_format("recordio")).train
    assert first_damaged(split, np.arange(480, 520)) is None


def test_a_file_that_is_gone_is_named(in_format):
    """The 100th of the samples from here on. Its neighbours are there."""
    split = open_dataset(in_format("folder")).train
    listing = copy.copy(split.entries[0])
    listing.files = [f"{name}.gone" if number == 599 else name for number, name in enumerate(listing.files)]
    assert first_damaged(replace(split, indexes=(listing,)), np.arange(500, 700)) == (
        f"{split.paths[0]}/{listing.files[599]} cannot be read: No such file or directory")


def with_damage(digits, split, sample, folder):
    """Writes a copy of the digits in which an image's bytes are zeros. Returns the copy and the record's name."""
    image, _ = record(getattr(open_dataset(digits), split), sample)
    for path in digits.iterdir():
        (folder / path.name).write_bytes(path.read_bytes().replace(image, bytes(len(image))))
    [file] = json.loads((digits / "dataset.json").read_text())[split]["files"]
    return open_dataset(folder), f"{folder}/{file['path']}, record {sample}"


def test_an_evaluation_says_how_far_it_came_and_names_the_record(digits, tmp_path):
    import tensorflow as tf

    dataset, name = with_damage(digits, "validation", 213, tmp_path)
    model = tf.keras.Sequential([tf.keras.layers.Flatten(input_shape=(8, 8, 3)), tf.keras.layers.Dense(10)])
    with pytest.raises(UserError) as raised:
        Evaluator(model, Feed(dataset, 8, AUGMENTATIONS["none"], 0), 32, World())()
    told = re.fullmatch(r"evaluation stopped after (\d+) of 360 samples: (.*) cannot be decoded; .*", str(raised.value))
    assert told[2] == name and int(told[1]) in range(0, 214, 32)  # DALI reads ahead


@pytest.mark.parametrize(("kind", "workers"), [("python", 1), ("mpirun", 2)])
def test_training_ends_and_names_it(digits, tmp_path, kind, workers):
    _, name = with_damage(digits, "train", 500, tmp_path)
    done = run(kind, workers, ROOT / "train.py", DIGITS, f"--data_dir={tmp_path}", "--model=convnet", "--epochs=2",
               f"--output_dir={tmp_path}/run")
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if "train.py: " in line]
    assert any(f"{name} cannot be decoded" in line for line in errors)
    assert "Traceback" not in done.stderr
    assert "traceback" not in done.stderr and "dali_dataset_op" not in done.stderr  # that of DALI's graph


@pytest.mark.trainings
def test_damaged_photographs_of_a_folder_are_left_out_and_named(tmp_path, monkeypatch):
    """On two workers; then nothing is decoded again, and the run is not continued with a photograph more."""
    folder = fill(tmp_path / "mine", 12)
    sound = (folder / "dog" / "0 ü.jpg").read_bytes()
    for name, content in (("text.jpg", b"404"), ("half.jpg", sound[:300]), ("empty.jpg", b"")):
        (folder / "dog" / name).write_bytes(content)
    flags = (f"--data_dir={folder}", "--model=convnet", "--image_size=16", "--epochs=2", "--validation_fraction=0.25",
             f"--output_dir={tmp_path}/run")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = run("mpirun", 2, ROOT / "train.py", *flags)
    assert first.returncode == 0, first.stderr
    lines = [line for line in first.stderr.splitlines() if DAMAGED in line]
    named = re.findall(r"dog/\w+\.jpg", "".join(lines))
    assert sorted(named) == ["dog/empty.jpg", "dog/half.jpg", "dog/text.jpg"] and "libjpeg" not in first.stderr
    about = json.loads((tmp_path / "run" / "run.json").read_text())["dataset"]
    assert sorted(about["damaged"]) == sorted(f"{folder}/{name}" for name in named)
    assert about["train_samples"] + about["validation_samples"] == 36
    states = np.frombuffer((tmp_path / "cache" / "bigbatch" / "decoded").read_bytes(), "<u8")
    assert len({*states.tolist()}) == len(states) == 36  # each sound one once
    (folder / "dog" / "half.jpg").write_bytes(sound)
    again = run("python", 1, ROOT / "train.py", *flags)
    assert again.returncode == 1 and "train_samples was 23 and is now 24; " in again.stderr, again.stderr


@pytest.mark.trainings
def test_a_folder_of_damaged_photographs_alone_is_an_error(tmp_path):
    folder = fill(tmp_path / "mine", 4)
    for path in folder.glob("*/*.jpg"):
        path.write_bytes(b"404")
    done = run("python", 1, ROOT / "train.py", f"--data_dir={folder}", "--model=convnet", "--image_size=16")
    assert done.returncode == 1 and "contains no images but " in done.stderr.splitlines()[-1]


def test_dalis_stack_trace_is_shown_on_request(digits, tmp_path, monkeypatch):
    _, name = with_damage(digits, "train", 500, tmp_path)
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "warning")
    done = run("python", 1, ROOT / "train.py", DIGITS, f"--data_dir={tmp_path}", "--model=convnet", "--epochs=2",
               f"--output_dir={tmp_path}/run")
    assert f"{name} cannot be decoded" in done.stderr and "with the following traceback" in done.stderr
