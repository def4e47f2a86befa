"""launch/stage_env: a small environment of real parts, packed, unpacked, used and removed."""
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from conftest import ROOT

from common.errors import UserError
from launch import stage_env
from launch.stage_env import SCRIPT, pack_code, pack_environment
from reporting.about import git_revision

BASE, LIBRARY = Path(sys.base_prefix), Path(sysconfig.get_path("stdlib"))  # /usr, for a distribution's Python
SHOW = """
import common.files, ctypes, json, os, sys, tiny
print(json.dumps({"prefixes": [sys.prefix, sys.base_prefix, sys.executable], "path": sys.path,
                  "modules": [m.__file__ for m in sys.modules.values() if getattr(m, "__file__", None)],
                  "mapped": [line.split()[-1] for line in open("/proc/self/maps") if "/" in line]}))
"""


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """This Python's installation, without what takes long to pack. The program still names the original's library."""
    base = tmp_path_factory.mktemp("base")
    shutil.copytree(LIBRARY, base / LIBRARY.relative_to(BASE), symlinks=True, ignore=shutil.ignore_patterns(
        "site-packages", "test", "tests", "config-*", "pkgconfig", "idlelib", "ensurepip", "lib2to3", "tkinter",
        "unittest", "asyncio", "distutils", "pydoc_data", "turtledemo", "xml", "multiprocessing"))
    for shared in (BASE / "lib").glob(f"lib{LIBRARY.name}*"):
        shutil.copy2(shared, base / "lib")
    (base / LIBRARY.relative_to(BASE) / "site-packages" / "other").mkdir(parents=True)
    (base / "bin").mkdir()
    shutil.copy2(BASE / "bin" / LIBRARY.name, base / "bin")
    return base


@pytest.fixture(scope="module")
def environment(base, tmp_path_factory) -> Path:
    """A virtual environment with one package, which Python has not compiled yet."""
    prefix = tmp_path_factory.mktemp("shared") / "venv"
    [python] = (base / "bin").iterdir()
    subprocess.run([python, "-m", "venv", "--without-pip", prefix], check=True)
    [packages] = prefix.glob("lib/python*/site-packages")
    (packages / "tiny.py").write_text("SIZE = 1\n")
    (packages / "tiny-1.dist-info").mkdir()
    (packages / "tiny-1.dist-info" / "RECORD").write_text("tiny.py,,\n")
    return prefix


@pytest.fixture(scope="module")
def archives(environment, base, tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("archives")
    return [pack_environment(environment, base, folder), pack_code(ROOT, folder)]


def copy_of(disk: Path, job="7") -> Path:
    return disk / f"bigbatch-{os.getuid()}" / f"environment-{job}"


@pytest.fixture
def stage(tmp_path):
    """A function that starts to unpack for a job on a local disk, by default tmp_path."""
    running = []

    def start(archives, job="7", disk=tmp_path) -> subprocess.Popen:
        running.append(subprocess.Popen(
            ["bash", SCRIPT, copy_of(disk, job), *archives], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True))
        return running[-1]

    yield start
    for process in running:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()
        process.stderr.close()


def ready(process) -> bool:
    return process.stdout.readline() == "ready\n"


def shown(copy: Path) -> dict:
    """What a Python of a copy has loaded, started as by a launcher."""
    done = subprocess.run([copy / "python", "-c", SHOW], text=True, capture_output=True, timeout=60,
                          env=os.environ | {"PYTHONPATH": f"{ROOT}:/own"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_python_runs_from_the_copy_alone(archives, stage, tmp_path, environment, base):
    process, copy = stage(archives), copy_of(tmp_path)
    assert ready(process)
    assert not list(copy.glob("base/lib/python*/site-packages"))
    found = shown(copy)
    assert all(name.startswith(f"{copy}/") for name in [*found["prefixes"], *found["modules"]])
    assert any("libpython" in name or "bin/python" in name for name in found["mapped"])
    elsewhere = (f"{LIBRARY}/", f"{BASE}/lib/libpython", f"{base}/", f"{environment}/", f"{ROOT}/")
    assert not any(name.startswith(elsewhere) for name in found["mapped"])
    assert found["path"][0] == f"{copy}/code" and found["path"][1] == "/own" and str(ROOT) not in found["path"]
    assert git_revision(copy / "code") == git_revision(ROOT) and copy.stat().st_mode & 0o77 == 0
    process.stdin.close()
    assert process.wait(60) == 0 and list(copy.parent.iterdir()) == []


def test_a_python_of_the_distribution_is_not_copied(environment, base, stage, tmp_path, monkeypatch):
    """It is on every node, in /usr; here, in the folder of `base`."""
    monkeypatch.setattr(stage_env, "SYSTEM", base)
    archives = [pack_environment(environment, base, tmp_path), pack_code(ROOT, tmp_path)]
    copy = copy_of(tmp_path)
    assert ready(stage(archives)) and not (copy / "base").exists()
    found = shown(copy)
    assert found["prefixes"] == [f"{copy}/venv", str(base), f"{copy}/venv/bin/python"]
    assert not any(name.startswith((f"{environment}/", f"{ROOT}/")) for name in found["modules"] + found["mapped"])


def test_an_archive_is_made_again_only_after_a_change(environment, base, archives):
    folder, [record] = archives[0].parent, environment.glob("lib/python*/site-packages/*.dist-info/RECORD")
    times = [path.stat().st_mtime_ns for path in archives]
    again = [pack_environment(environment, base, folder), pack_code(ROOT, folder)]
    assert again == archives and [path.stat().st_mtime_ns for path in again] == times
    before = record.read_text()
    record.write_text(f"{before}other.py,,\n")
    changed = pack_environment(environment, base, folder)
    record.write_text(before)
    assert changed not in archives and changed.is_file() and not list(folder.glob("part-*"))


def test_without_zstd_gzip_packs(stage, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    for tool in ("gzip", "git"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(tmp_path / "bin"))
        archive = pack_code(ROOT, tmp_path)
    assert archive.name.endswith(".tar.gz") and ready(stage([archive]))
    code = copy_of(tmp_path) / "code"
    assert (code / "train.py").read_bytes() == (ROOT / "train.py").read_bytes()


def test_a_killed_unpack_is_made_good(archives, stage, tmp_path):
    copy, process = copy_of(tmp_path), stage(archives)
    wait_for((copy / "base").exists)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.communicate()[0] == "" and copy.is_dir() and not (copy / "python").exists()
    assert ready(stage(archives))
    assert shown(copy)["prefixes"][0] == f"{copy}/venv"


def test_what_another_user_has_prepared_is_not_used(archives, shared_disk, stage, as_another_user):
    own = copy_of(shared_disk).parent
    names = [f"bigbatch-archive-{os.getuid()}-{archives[0].name}", f"bigbatch-environment-{os.getuid()}-7"]
    as_another_user("touch", *(shared_disk / name for name in names))
    for prepare in (["mkdir", "-m", "777"], ["ln", "-s", "/tmp"], ["touch"]):
        as_another_user(*prepare, own)
        process = stage(archives, disk=shared_disk)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, len(err.splitlines())) == (1, "", 1) and "give --stage-env another disk" in err
        assert f"{own} is not a folder that only you can open; remove it" in err
        as_another_user(*(["rmdir"] if own.is_dir() and not own.is_symlink() else ["rm"]), own)
    assert ready(stage(archives, disk=shared_disk)) and shown(copy_of(shared_disk))


def test_another_user_cannot_change_what_is_unpacked(archives, shared_disk, stage, as_another_user, monkeypatch):
    """As soon as tar starts, he overwrites all files of the disk that he can, among them one of the archive's name."""
    tools, other = shared_disk / "bin", shared_disk / "other"
    prepared = shared_disk / f"bigbatch-archive-{os.getuid()}-{archives[1].name}"
    tools.mkdir()
    other.write_text("other")
    as_another_user("touch", prepared)
    overwrite = f"setpriv --reuid=65534 --clear-groups find {shared_disk} -type f -writable -exec cp {other} {{}} ';'"
    (tools / "tar").write_text(f'#!/bin/sh\n{overwrite} 2>&-\nexec {shutil.which("tar")} "$@"\n')
    (tools / "tar").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    assert ready(stage(archives[1:], disk=shared_disk)) and prepared.read_text() == "other"
    assert (copy_of(shared_disk) / "code" / "train.py").read_bytes() == (ROOT / "train.py").read_bytes()


def test_a_damaged_archive_is_one_line_and_is_not_used(archives, stage, tmp_path):
    damaged = tmp_path / archives[0].name
    shutil.copy(archives[0], damaged)
    with open(damaged, "r+b") as file:
        file.seek(1000)
        file.write(b"damaged")
    for path, message in ((damaged, "if it is damaged, delete it and start again"),
                          (tmp_path / "gone", "No such file")):
        process = stage([path])
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, len(err.splitlines())) == (1, "", 1) and message in err
        assert f"{path} cannot be unpacked" in err
        assert list(copy_of(tmp_path).parent.iterdir()) == []


def test_each_job_has_its_own_copy_and_what_is_left_is_removed(archives, stage, tmp_path):
    left = copy_of(tmp_path, "5") / "venv"
    left.mkdir(parents=True)
    left.parents[1].chmod(0o700)
    first = stage(archives, "7")
    assert ready(first) and not left.exists()
    second = stage(archives, "8_1")
    assert ready(second)
    second.stdin.close()
    assert second.wait(60) == 0
    assert list(copy_of(tmp_path).parent.iterdir()) == [copy_of(tmp_path)] and shown(copy_of(tmp_path))


def test_on_a_signal_the_copy_stays_until_its_processes_have_ended(archives, stage, tmp_path):
    copy, process = copy_of(tmp_path), stage(archives)
    assert ready(process)
    with subprocess.Popen([copy / "python", "-c", "print(flush=True); input(); import decimal"], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        worker.stdout.readline()
        process.send_signal(signal.SIGUSR1)  # for workers
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None and copy.is_dir()
        worker.communicate("\n")
        assert worker.returncode == 0
    assert process.wait(60) == 143 and not copy.exists()


def test_what_cannot_be_staged_is_one_line(archives, tmp_path):
    with pytest.raises(UserError, match="not a virtual environment; run 'uv sync'"):
        pack_environment(tmp_path, BASE, tmp_path)
    done = subprocess.run(["bash", SCRIPT, copy_of(Path("/proc")), *archives], text=True,
                          capture_output=True, timeout=60)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "no folder can be made in /proc; give --stage-env a local disk" in done.stderr
