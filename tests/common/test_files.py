"""Folders in places where other users write, too."""
import errno
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ROOT

from common import files
from common.errors import UserError
from common.files import hold, is_held, is_on_network, locked, private_folder, remove_unheld, scratch_folder

SCRATCH = """
import sys, time
from common.files import scratch_folder
with scratch_folder(sys.argv[1]) as folder:
    (folder / "index").write_text("x")
    print(folder, flush=True)
    time.sleep(60)
"""


def test_a_private_folder_is_ours_alone(shared_disk):
    folder = private_folder(shared_disk / "new")
    assert folder.parent == shared_disk / "new" and stat.S_IMODE(folder.stat().st_mode) & 0o777 == 0o700
    (folder / "kept").touch()
    assert private_folder(shared_disk / "new") == folder and (folder / "kept").exists()


@pytest.mark.parametrize("take", [lambda folder: folder.touch(), lambda folder: folder.symlink_to("/root"),
                                  lambda folder: (folder.mkdir(), folder.chmod(0o720)),
                                  lambda folder: (folder.mkdir(), folder.chmod(0o704))])
def test_a_name_that_is_taken_is_refused(shared_disk, take):
    take(shared_disk / f"bigbatch-{os.getuid()}")
    with pytest.raises(UserError, match="is not a folder that only you can open; remove it, or choose another folder"):
        private_folder(shared_disk)


def test_another_users_folder_is_refused(shared_disk, as_another_user):
    as_another_user("mkdir", "-m", "700", shared_disk / f"bigbatch-{os.getuid()}")
    with pytest.raises(UserError, match="is not a folder that only you can open"):
        private_folder(shared_disk)


@pytest.fixture
def killed():
    """A function that kills a process inside its scratch folder there, which stays behind."""
    def kill(place) -> Path:
        with subprocess.Popen([sys.executable, "-c", SCRATCH, place], cwd=ROOT, text=True,
                              stdout=subprocess.PIPE) as process:
            left = Path(process.stdout.readline().strip())
            process.send_signal(signal.SIGKILL)
        assert (left / "index").exists()
        return left

    return kill


def test_the_next_process_removes_the_scratch_folders_of_killed_ones(shared_disk, killed):
    left = killed(shared_disk)
    with scratch_folder(shared_disk) as folder:
        assert list(shared_disk.iterdir()) == [folder] != [left] and stat.S_IMODE(folder.stat().st_mode) == 0o700
        with scratch_folder(shared_disk) as second:  # the first one is in use
            assert {*shared_disk.iterdir()} == {folder, second}
    assert list(shared_disk.iterdir()) == []


def test_two_that_remove_the_same_folder_leave_nothing(shared_disk, killed, monkeypatch):
    """Another process removes it when this one has seen it and is about to lock it."""
    killed(shared_disk)
    monkeypatch.setattr(files, "_is_own_folder", lambda left: shutil.rmtree(left) or True)
    with scratch_folder(shared_disk) as folder:
        assert list(shared_disk.iterdir()) == [folder]


def test_who_waits_for_a_folder_that_is_removed_holds_the_one_that_replaces_it(tmp_path):
    folder = tmp_path / "window"
    folder.mkdir()
    with ThreadPoolExecutor(1) as pool:
        with locked(folder):
            waiting = pool.submit(hold, folder)
            time.sleep(0.2)
            folder.rmdir()
            folder.mkdir()  # by the first of those that wait
        descriptor = waiting.result()
    assert os.path.samestat(os.fstat(descriptor), folder.stat()) and is_held(folder)
    os.close(descriptor)
    assert not is_held(folder)


def test_processes_that_make_scratch_folders_at_once_leave_each_other_theirs(shared_disk):
    """None sees another's that was made, but is not yet held, as one that a killed process left."""
    use = ("import sys; from common.files import scratch_folder\n"
           "for _ in range(400):\n"
           "    with scratch_folder(sys.argv[1]) as folder:\n"
           "        (folder / 'index').write_text('x'), (folder / 'index').read_text()")
    processes = [subprocess.Popen([sys.executable, "-c", use, shared_disk], cwd=ROOT) for _ in range(8)]
    assert [process.wait() for process in processes] == [0] * 8 and not list(shared_disk.iterdir())


def test_a_folder_that_replaces_the_one_to_remove_is_left_alone(tmp_path, monkeypatch):
    """It is removed, made again and held by others between this process's open and its lock."""
    folder = tmp_path / "window"
    folder.mkdir()
    held = []

    def flock(descriptor, operation):
        monkeypatch.undo()
        shutil.rmtree(folder)
        held.append(hold(folder))
        fcntl.flock(descriptor, operation)

    monkeypatch.setattr(files.fcntl, "flock", flock)
    remove_unheld(folder)
    assert is_held(folder)
    os.close(held.pop())
    remove_unheld(folder)
    assert not folder.exists()


def test_without_locks_no_folder_is_taken_for_one_that_was_left(shared_disk, killed, monkeypatch):
    left = killed(shared_disk)

    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with scratch_folder(shared_disk) as folder, scratch_folder(shared_disk) as second:
        assert {*shared_disk.iterdir()} == {left, folder, second}
    assert list(shared_disk.iterdir()) == [left]


def test_what_is_not_ours_is_left_alone(shared_disk, as_another_user):
    as_another_user("mkdir", shared_disk / "bigbatch-scratch-1")
    as_another_user("mkfifo", shared_disk / "bigbatch-scratch-2")
    as_another_user("ln", "-s", ROOT, shared_disk / "bigbatch-scratch-3")
    with scratch_folder(shared_disk):
        pass
    assert len(list(shared_disk.iterdir())) == 3


@pytest.mark.parametrize(("path", "expected"), [
    ("/data/imagenet/train.tfrecord", True), ("/data/local/train.tfrecord", False), ("/home/me/my set/a.jpg", True),
    ("/scratch/a", True), ("/mnt/bucket/a", True), ("/mnt/usb/a", False), ("/etc/hosts", False),
    ("/mnt/Größe/a", True), (b"/mnt/\xff/a", True)])
def test_a_network_file_system_is_recognized(path, expected, tmp_path):
    """By the innermost mount, in the kernel's form: a space in a name is \\040."""
    mounts = (("/", "ext4"), ("/data", "nfs4"), ("/data/local", "xfs"), (r"/home/me/my\040set", "cifs"),
              ("/scratch", "lustre"), ("/mnt/bucket", "fuse.s3fs"), ("/mnt/usb", "fuseblk"), ("/mnt/Größe", "nfs"),
              (os.fsdecode(b"/mnt/\xff"), "nfs"))
    lines = [f"{number} 20 0:{number} / {place} rw,relatime shared:1 - {kind} source rw"
             for number, (place, kind) in enumerate(mounts)]
    (tmp_path / "mountinfo").write_bytes(os.fsencode("\n".join(lines) + "\n"))
    assert is_on_network(os.fsdecode(path), tmp_path / "mountinfo") == expected
