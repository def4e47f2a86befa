"""The prepare command: what goes in comes out in every format, on any number of ranks, after any stop."""
import contextlib
import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from conftest import ROOT, SmallDisk, environment, launcher, run
from PIL import Image

from common.locks import LOCK, locked, this_process
from data import formats
from data.dataset import open_dataset
from tests.rigs.pictures import (
    CONVERTED,
    REJECTED,
    awkward,
    command,
    contents,
    encode,
    fill,
    originals,
    picture,
    stored,
)

SMALL = "--shard_samples=10"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return awkward(tmp_path_factory.mktemp("source dir ü"))


@pytest.fixture(scope="module")
def prepared(source, tmp_path_factory):
    """A function from a format to what one process makes of the source; made once."""
    made = {}

    def make(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("python") / name
            assert command(f"--source={source}", f"--output={made[name]}", f"--format={name}", "--verify", SMALL) == 0
        return made[name]

    return make


@pytest.mark.parametrize("name", formats.WRITTEN)
def test_what_goes_in_comes_out(source, prepared, name):
    pairs, dataset = stored(prepared(name)), open_dataset(prepared(name))
    assert dataset.classes == ("a b", "dog", "épée") and len(dataset.train.paths) == 5
    assert [dataset.train.samples, dataset.validation.samples] == [36 + 9, 9]
    for split, folder in (("train", "train"), ("validation", "val")):
        names = originals(source / folder)
        copied = sorted(names[image] for image, _ in pairs[split] if image in names)
        assert copied == sorted(set(names.values()) - CONVERTED - {name.removeprefix("train/") for name in REJECTED})
        assert all(names[image].split("/")[0] == label for image, label in pairs[split] if image in names)
        made = [(pixels(image), label) for image, label in pairs[split] if image not in names]
        assert len(made) == (len(CONVERTED) if split == "train" else 0)
        for name in CONVERTED if made else ():
            shown = pixels((source / folder / name).read_bytes())
            error, label = min((np.abs(image - shown).mean(), label) for image, label in made)
            assert error < 4 and label == "dog", name


def pixels(content) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"), np.float64)


def test_the_rejected_are_listed(prepared):
    rows = [json.loads(line) for line in (prepared("recordio") / "rejected.jsonl").read_text().splitlines()]
    assert {row["name"] for row in rows} == REJECTED and all(row["reason"] for row in rows)


def test_samples_are_shuffled_and_the_seed_says_how(source, prepared, tmp_path):
    assert command(f"--source={source}", f"--output={tmp_path}/o", "--format=lmdb", "--verify", SMALL, "--seed=1") == 0
    one, other = stored(prepared("lmdb"))["train"], stored(tmp_path / "o")["train"]
    assert one != other and sorted(one) == sorted(other)
    names = [name for _, name in one]
    assert sum(a != b for a, b in itertools.pairwise(names)) > 15  # 3 were they in order


def test_mean_and_deviation_are_those_of_the_pixels(source, prepared):
    """45 images are fewer than are measured, so they are those of all (before a conversion, hence the tolerance)."""
    dataset = open_dataset(prepared("recordio"))
    everything = np.concatenate([pixels(image).reshape(-1, 3) for image, _ in stored(prepared("recordio"))["train"]])
    np.testing.assert_allclose(dataset.mean, everything.mean(axis=0), atol=0.05)
    np.testing.assert_allclose(dataset.std, everything.std(axis=0), atol=0.1)


@pytest.mark.parametrize(("name", "ranks"), [("recordio", 3), ("lmdb", 2), ("tfrecord", 2)])
def test_the_same_bytes_on_any_number_of_ranks(source, prepared, tmp_path, name, ranks):
    done = run("mpirun", ranks, "-m", "data.prepare", f"--source={source}", f"--output={tmp_path}/o",
               f"--format={name}", "--verify", SMALL)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "o") == contents(prepared(name))
    lines = [line for line in done.stderr.splitlines() if line.startswith("data.prepare: ")]
    *of_files, made, of_classes = lines
    assert len(of_files) == 3 and "no classes, because they have no images: 'empty'" in "".join(of_files)
    assert "45 training and 9 validation images of 3 classes in 6 files" in made
    assert "3 converted, 0 resized, 3 rejected" in made
    assert of_classes == "data.prepare: training + validation images by class: a b 12 + 3, dog 21 + 3, épée 12 + 3"


def test_strict_ends_every_rank_with_one_line(source, tmp_path):
    done = run("mpirun", 3, "-m", "data.prepare", f"--source={source}", f"--output={tmp_path}/o", "--format=lmdb",
               "--strict", "--verify", SMALL)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("data.prepare: ")
             and not any(word in line for word in ("subfolders", "left out", "no classes"))]
    assert len(lines) == 1 and lines[0].endswith("(--strict)") and any(name in lines[0] for name in REJECTED)
    assert not (tmp_path / "o" / "dataset.json").exists()


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    fill(folder, 100, size=(300, 220))
    return folder


@pytest.fixture(scope="module")
def undisturbed(many, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "o"
    assert command(*many_flags(many, folder)) == 0
    return folder


def many_flags(source, folder):
    return [f"--source={source}", f"--output={folder}", "--format=recordio", "--validation_fraction=0.1",
            "--shard_samples=20", "--resize_shorter=200"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_goes_on_where_it_stopped(many, undisturbed, tmp_path, ranks):
    """SIGKILL to all its processes at once, once in the middle of a shard for sure, then at random moments."""
    folder = tmp_path / "o"
    arguments = ["-m", "data.prepare", *many_flags(many, folder)]
    kept = {}
    for attempt in range(3):
        words = [*launcher("mpirun" if ranks > 1 else "python", ranks), *arguments]
        process = subprocess.Popen(words, cwd=ROOT, start_new_session=True, stderr=subprocess.PIPE,
                                   env=environment())
        deadline = time.monotonic() + 300
        while len(list(folder.glob("*.rec"))) <= len(kept) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.3) if attempt else 0)
        while not attempt and not is_in_a_shard(folder):
            assert process.poll() is None and time.monotonic() < deadline
        kill_session(process)
        if (folder / "dataset.json").exists():
            break
        for path, inode in kept.items():
            assert path.stat().st_ino == inode  # not written again
        kept = {path: path.stat().st_ino for path in folder.glob("*.rec")}
        assert kept
    assert command(*many_flags(many, folder)) == 0 or (folder / "dataset.json").exists()
    assert contents(folder) == contents(undisturbed)
    assert all(path.stat().st_ino == inode for path, inode in kept.items())


def is_in_a_shard(folder) -> bool:
    with contextlib.suppress(FileNotFoundError):  # a shard that is whole leaves its folder meanwhile
        return any(path.stat().st_size for path in folder.glob(".preparing/*/*.rec"))
    return False


def kill_session(process):
    """Kills a process and all that it has started, mpirun's ranks, too, which have sessions of their own."""
    import psutil

    if process.poll() is not None:
        return
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGKILL)
    psutil.wait_procs(family, timeout=300)
    process.communicate()


def test_an_unfinished_run_is_not_gone_on_with_in_another_way(many, tmp_path, capsys):
    folder, flags = tmp_path / "o", many_flags(many, tmp_path / "o")
    unfinished(many, folder)
    shutil.copytree(many, tmp_path / "copy")
    for change, named in ((["--resize_shorter=100"], "--resize_shorter is now 100 but was 200"),
                          (["--seed=3"], "--seed is now 3"), (["--format=lmdb"], "--format is now lmdb"),
                          ([f"--source={tmp_path}/copy"], "--source is now")):
        assert command(*flags, *change) == 1
        assert named in capsys.readouterr().err.splitlines()[-1]
    extra = many / "dog" / "one more.jpg"
    extra.write_bytes(encode(picture(1)))
    try:
        assert command(*flags) == 1 and "the images in --source have changed" in capsys.readouterr().err
    finally:
        extra.unlink()


def unfinished(source, folder):
    """A preparation that was stopped before its first shard."""
    from data.preparing import run as preparing

    def stopped(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "write_shard", stopped)
        assert command(*many_flags(source, folder)) == 130
    assert (folder / ".preparing" / "plan.json").exists()


def test_two_runs_at_once_do_not_share_a_folder(many, tmp_path, capsys):
    unfinished(many, tmp_path / "o")
    with locked(tmp_path / "o" / ".preparing" / LOCK):
        assert command(*many_flags(many, tmp_path / "o")) == 1
    assert f"another run ({this_process()}) is preparing {tmp_path}/o; wait" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["recordio", "lmdb", "tfrecord"])
def test_a_full_disk_and_room_made(source, prepared, capsys, name):
    total = sum(path.stat().st_size for path in prepared(name).rglob("*") if path.is_file())
    with SmallDisk(f"size={total * 2 // 3}") as disk:
        folder = disk.path / "o"
        flags = [f"--source={source}", f"--output={folder}", f"--format={name}", "--verify", SMALL]
        assert command(*flags) == 1
        lines = capsys.readouterr().err.splitlines()
        assert lines[-1].startswith(f"data.prepare: {folder}") and "Traceback" not in "".join(lines)
        assert ": no space left on device; make room" in lines[-1]
        kept = {path: path.stat().st_ino for path in folder.glob(f"*{formats.get(name).SUFFIX}")}
        assert kept and not (folder / "dataset.json").exists()
        disk.remount(f"size={total * 4}")
        assert command(*flags) == 0
        assert contents(folder) == contents(prepared(name))
        assert all(path.stat().st_ino == inode for path, inode in kept.items())


def test_files_that_the_user_may_not_read_are_rejected(tmp_path):
    """As a user without rights, in a process of its own: root may read everything."""
    fill(tmp_path / "source", 3)
    (tmp_path / "source" / "dog" / "0 ü.jpg").chmod(0)
    program = ("import os, sys; from data import images; from data.preparing import shards\n"
               "from data.sources.source import files\n"
               "os.setgid(65534); os.setuid(65534)\n"
               "try: shards._stored(files(sys.argv[1], ['dog/0 ü.jpg'], [0]), 0, images.Rules(), False)\n"
               "except images.Rejected as error: print(error)")
    if os.getuid():
        program = program.replace("os.setgid(65534); os.setuid(65534)", "")
    for parent in [tmp_path, *tmp_path.parents][:3]:
        parent.chmod(0o755)
    done = run("python", 1, "-c", program, tmp_path / "source")
    assert done.stdout.strip() == "cannot be read: Permission denied", done.stderr


def test_nothing_is_begun_for_wrong_flags(source, tmp_path, capsys):
    for flags in (["--source=digits", "--resize_shorter=5"], [f"--source={source}", "--format=cards"],
                  [f"--source={source}", "--validation_fraction=1.5"], [], ["--source=digits", "--adopt"],
                  [f"--source={source}", "--classes=x"],
                  [f"--source={source}", "stray"]):
        assert command(f"--output={tmp_path}/o", *flags) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "o").exists()


def test_every_rank_exits_2_and_one_speaks(tmp_path):
    done = run("mpirun", 2, "-m", "data.prepare", f"--output={tmp_path}/o", "--source=digits", "--format=cards")
    assert done.returncode == 2
    assert [line[:14] for line in done.stderr.splitlines() if "cards" in line] == ["data.prepare: "]


def test_tensorflow_is_left_alone_where_it_is_not_needed(tmp_path):
    fill(tmp_path / "s", 4)
    program = ("import sys; from data import prepare\n"
               f"assert prepare.main(['', '--source={tmp_path}/s', '--validation_fraction=.3',\n"
               f"                     '--output={tmp_path}/o', '--format=lmdb']) == 0\n"
               "assert prepare.main(['', '--help']) == 0\n"
               "print([name for name in ('tensorflow', 'mpi4py', 'nvidia.dali') if name in sys.modules])")
    done = run("python", 1, "-c", program, cold=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_run_killed_at_its_last_step_is_done(source, tmp_path, capsys):
    flags = (f"--source={source}", f"--output={tmp_path}/o", "--format=recordio")
    assert command(*flags) == 0
    finished = contents(tmp_path / "o")
    (tmp_path / "o" / ".preparing" / "claims").mkdir(parents=True)
    assert command(*flags) == 1 and "already contains a prepared dataset" in capsys.readouterr().err
    assert contents(tmp_path / "o") == finished and not (tmp_path / "o" / ".preparing").exists()


def test_a_folder_with_something_in_it_is_left_alone(source, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert command(f"--source={source}", f"--output={tmp_path}", "--format=lmdb") == 1
    assert "is not empty" in capsys.readouterr().err and contents(tmp_path).keys() == {"notes.txt"}
