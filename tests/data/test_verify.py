"""`--verify` of a prepared dataset: it names every record that is damaged, and no other."""
import re
import shutil

import numpy as np
import pytest
from conftest import run

from data.dataset import open_dataset
from tests.rigs.pictures import command, fill

FORMATS = ("tfrecord", "lmdb", "recordio")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    fill(folder / "source", 8)
    for name in FORMATS:
        assert command(f"--source={folder}/source", "--validation_fraction=0.25", f"--output={folder}/{name}",
                       f"--format={name}", "--shard_samples=5") == 0
    return folder


@pytest.fixture
def copy(prepared, tmp_path):
    return lambda name: shutil.copytree(prepared / name, tmp_path / name)


def harm(folder, record) -> str:
    """Changes a byte in the picture of a record of the second training shard: it decodes, but shows another thing."""
    split = open_dataset(folder).train
    path = split.paths[1]
    image = bytes(next(iter(split.kind.records(path, split.entries[1], np.array([record]))))[0])
    file = path / "data.mdb" if path.is_dir() else path
    content = bytearray(file.read_bytes())
    offset = content.index(image)
    content[offset + len(image) - 12] ^= 0x15
    file.write_bytes(content)
    return f"{path.name}, record {record}"


@pytest.mark.parametrize("name", FORMATS)
def test_each_damaged_record_is_named(copy, capsys, name):
    folder = copy(name)
    assert command("--verify", f"--output={folder}") == 0
    assert capsys.readouterr().err.splitlines() == [
        f"data.prepare: {folder}: 15 training and 9 validation images of 3 classes are intact"]
    expected = [harm(folder, record) for record in (0, 3)]
    assert command("--verify", f"--output={folder}") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and lines[-1].endswith("2 of 24 records cannot be used")
    for line, record in zip(lines, expected, strict=False):
        assert line.startswith(f"data.prepare: {folder}: {record}: ") and "checksum" in line


def test_tfrecords_own_checksums_serve_where_none_were_kept(copy, capsys):
    folder = copy("tfrecord")
    expected = harm(folder, 2)
    for path in folder.glob("*.crc32"):
        path.unlink()
    assert command("--verify", f"--output={folder}") == 1
    told = capsys.readouterr().err.splitlines()[0]
    assert re.search(rf"{expected}: (cat|dog|ant)/.*\.jpg: its checksum differs", told), told


def test_without_checksums_what_does_not_decode_is_named(copy, capsys):
    folder = copy("recordio")
    split = open_dataset(folder).train
    image = bytes(next(iter(split.kind.records(split.paths[1], split.entries[1], np.array([4]))))[0])
    content = split.paths[1].read_bytes()
    split.paths[1].write_bytes(content.replace(image, b"no" + image[2:]))
    for path in folder.glob("*.crc32"):
        path.unlink()
    assert command("--verify", f"--output={folder}") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and f"{split.paths[1].name}, record 4: not an image" in lines[0]


@pytest.mark.parametrize("name", ["recordio", "tfrecord"])
def test_a_record_that_is_none_does_not_hide_the_next(copy, capsys, name):
    """The framing of record 1 is destroyed, and the picture of record 3."""
    folder = copy(name)
    split = open_dataset(folder).train
    expected = harm(folder, 3)
    content, entry = bytearray(split.paths[1].read_bytes()), split.entries[1][1]
    start = int(entry[0]) + (12 if name == "tfrecord" else 0)
    content[start:start + 4] = b"\xff\xff\xff\xff"
    split.paths[1].write_bytes(content)
    assert command("--verify", f"--output={folder}") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and ", record 1: " in lines[0] and expected in lines[1]


def test_checksums_of_another_file(copy, capsys):
    folder = copy("recordio")
    kept = next(folder.glob("train-00001*.crc32"))
    kept.write_text("".join(kept.read_text().splitlines(keepends=True)[:-1]))
    assert command("--verify", f"--output={folder}") == 1
    assert "has 4 checksums for 5 records" in capsys.readouterr().err


def test_a_folder_of_images_in_place(tmp_path, capsys):
    fill(tmp_path / "train", 3)
    fill(tmp_path / "val", 2, first=1000)
    assert command("--verify", f"--output={tmp_path}") == 0
    bad = tmp_path / "val" / "dog" / "0 ü.jpg"
    bad.write_bytes(bad.read_bytes()[:-60])
    assert command("--verify", f"--output={tmp_path}") == 1
    assert str(bad) in capsys.readouterr().err and command("--verify", f"--output={tmp_path}/none") == 1


def test_ranks_share_it_and_agree(copy):
    folder = copy("lmdb")
    expected = harm(folder, 1)
    done = run("mpirun", 2, "-m", "data.prepare", "--verify", f"--output={folder}")
    lines = [line for line in done.stderr.splitlines() if line.startswith("data.prepare: ")]
    assert done.returncode == 1 and len(lines) == 2 and expected in lines[0] and "1 of 24" in lines[1]
