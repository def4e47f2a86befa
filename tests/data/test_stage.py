"""Staging: one copy a node, that goes on where it was broken off, on a disk that is large enough."""
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, SmallDisk

from common.errors import UserError, one_line
from data.dataset import open_dataset
from data.staging.local_copy import files, stage

FORMATS = ["tfrecord", "lmdb", "recordio", "folder"]


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", FORMATS)
def test_the_copy_is_the_dataset(in_format, tmp_path, name):
    source = in_format(name)
    staged = stage(open_dataset(source), tmp_path)
    assert staged.folder.parents[1] == tmp_path and content(staged.folder) == content(source)
    assert staged.train.samples == 1437 and staged.format == name


@pytest.fixture
def copy(in_format, tmp_path):
    return shutil.copytree(in_format("recordio"), tmp_path / "source")


def times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_what_is_there_is_not_copied_again(copy, tmp_path):
    staged = stage(open_dataset(copy), tmp_path / "disk").folder
    before = times(staged)
    (staged / "train 1.rec").unlink()
    assert stage(open_dataset(copy), tmp_path / "disk").folder == staged
    after = times(staged)
    assert {path.name for path in before if before[path] != after[path]} == {"train 1.rec"}


def test_a_file_broken_off_goes_on_where_it_stopped(copy, tmp_path):
    staged = stage(open_dataset(copy), tmp_path / "disk").folder
    content = (staged / "train 1.rec").read_bytes()
    (staged / "train 1.rec").unlink()
    # What had been copied is not copied again: the marks stay.
    marked = content[:1000] + b"?" * 1000 + content[2000:5000]
    (staged / "train 1.rec.part").write_bytes(marked)
    stage(open_dataset(copy), tmp_path / "disk")
    assert (staged / "train 1.rec").read_bytes() == marked + content[5000:]


def test_a_changed_dataset_is_copied_anew(copy, tmp_path):
    first = stage(open_dataset(copy), tmp_path / "disk").folder
    os.utime(copy / "train 0.rec", ns=(1, 1))
    assert stage(open_dataset(copy), tmp_path / "disk").folder != first


def test_several_workers_make_one_copy(copy, tmp_path):
    program = ("import sys\nfrom pathlib import Path\nfrom data.dataset import open_dataset\n"
               "from data.staging import local_copy\ncopy = local_copy._copy\n"
               "local_copy._copy = lambda *file: (print('copies', file=sys.stderr), copy(*file))\n"
               f"print(local_copy.stage(open_dataset({str(copy)!r}), Path({str(tmp_path / 'disk')!r})).folder)")
    workers = [subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE) for _ in range(3)]
    results = [worker.communicate(timeout=300) for worker in workers]
    assert len({out for out, _ in results}) == 1 and all(out for out, _ in results)
    assert sum("copies" in err for _, err in results) == 1


def test_a_copy_that_another_user_has_prepared_is_not_used(copy, tmp_path, shared_disk, as_another_user):
    own = stage(open_dataset(copy), tmp_path / "disk").folder
    for folder in (shared_disk, shared_disk / f"bigbatch-{os.getuid()}"):
        as_another_user("mkdir", "-p", "-m", "777", folder / own.name)
        as_another_user("touch", *(folder / own.name / name for name in os.listdir(copy)))
    with pytest.raises(UserError, match="is not a folder that only you can open; remove it, or choose another folder"):
        stage(open_dataset(copy), shared_disk)
    shutil.rmtree(shared_disk / f"bigbatch-{os.getuid()}")
    assert content(stage(open_dataset(copy), shared_disk).folder) == content(copy)


def test_a_disk_too_small_is_refused_before_a_byte_is_copied(copy, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(UserError, match=r"0.000 GB free, but the copy of .* still needs 0.001 GB"):
        stage(open_dataset(copy), tmp_path / "disk")
    assert not [path for path in (tmp_path / "disk").rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_a_disk_that_fills_is_named(in_format):
    """Small files take more room than their bytes."""
    source = open_dataset(in_format("folder"))
    size = sum(size for size, _ in files(source).values())
    with SmallDisk(f"size={size + 200_000}") as disk:
        with pytest.raises(OSError) as raised:
            stage(source, disk.path)
        assert one_line(raised.value).startswith(f"{disk.path}: no space left on device; make room")
        disk.remount("size=32m")
        assert content(stage(source, disk.path).folder) == content(source.folder)
