"""The built-in dataset: the same bytes each time, made once by several workers, and by the prepare command."""
import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, require_tool, run

from common.errors import UserError
from data.named import built_in
from data.preparing.run import write_built_in
from tests.rigs import lacking


def content(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_the_bytes_are_reproducible(digits, tmp_path):
    write_built_in("digits", tmp_path)
    assert content(tmp_path) == content(digits)


@pytest.mark.trainings
def test_several_workers_at_once_make_one_dataset(digits, tmp_path):
    """Also where the file system has no permissions to change."""
    program = "from data.named import built_in; print(built_in('digits'))"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "LACKS": "chmod:1",
                                "LD_PRELOAD": str(lacking.library(tmp_path, require_tool("g++")))}
    workers = [subprocess.Popen([sys.executable, "-c", program], env=environment, text=True, stdout=subprocess.PIPE)
               for _ in range(3)]
    folders = {worker.communicate(timeout=300)[0].strip() for worker in workers}
    assert [worker.returncode for worker in workers] == [0, 0, 0]
    assert folders == {str(tmp_path / "bigbatch" / digits.name)}
    assert list((tmp_path / "bigbatch").iterdir()) == [tmp_path / "bigbatch" / digits.name]
    assert content(tmp_path / "bigbatch" / digits.name) == content(digits)


@pytest.mark.parametrize(("home", "cause"), [("/proc/nobody", "No such file"), ("/dev/null", "Not a directory")])
def test_without_a_home_a_line_says_what_to_set(home, cause, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", home)
    with pytest.raises(UserError, match=f"{home}.*: {cause}.*; set XDG_CACHE_HOME to one that can be written"):
        built_in("digits")


def test_the_split_is_every_fifth_of_scikit_learns_digits(digits):
    from sklearn.datasets import load_digits

    import data.dataset as dataset

    described = json.loads((digits / "dataset.json").read_text())
    assert described["train"]["samples"] == 1437 and described["validation"]["samples"] == 360
    assert described["classes"] == list("0123456789")
    opened = dataset.open_dataset(digits)
    labels = load_digits().target
    records = [record_label(opened.validation.paths[0], offset, size) for offset, size in opened.validation.entries[0]]
    np.testing.assert_array_equal(records, labels[::5])


def record_label(path, offset, size):
    import tensorflow as tf

    with open(path, "rb") as file:
        file.seek(offset + 12)
        example = tf.train.Example.FromString(file.read(size - 16))
    return example.features.feature["image/class/label"].int64_list.value[0]


def test_the_prepare_command(tmp_path):
    done = run("python", 1, "-m", "data.prepare", "--source=digits", f"--output={tmp_path}/a b")
    assert done.returncode == 0 and "1,437 training and 360 validation images of 10 classes" in done.stderr
    described = json.loads((tmp_path / "a b" / "dataset.json").read_text())
    assert described["train"]["samples"] == 1437 and described["format"] == "tfrecord"
    again = run("python", 1, "-m", "data.prepare", "--source=digits", f"--output={tmp_path}/a b")
    assert again.returncode == 1 and len(again.stderr.splitlines()) == 1
    assert "already contains a prepared dataset" in again.stderr
    missing = run("python", 1, "-m", "data.prepare", "--source=nothing", f"--output={tmp_path}/x")
    assert missing.returncode == 1 and missing.stderr == "data.prepare: --source: there is no folder nothing\n"
