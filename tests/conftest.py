"""What the tests share: real processes under the real launchers, and datasets cut from the digits."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


def require_tool(*names: str) -> str:
    """The path of the first of these programs that is installed. Skips without one, fails where CI demands all."""
    for name in names:
        if found := shutil.which(name):
            return found
    message = f"needs {' or '.join(names)}, which is not installed"
    pytest.fail(message) if os.environ.get("BIGBATCH_REQUIRE_ALL") else pytest.skip(message)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not shutil.which("nvidia-smi"):
        pytest.skip("needs an NVIDIA GPU")  # the one skip that CI allows: it has none


def launcher(kind: str, workers: int) -> list[str]:
    """The words that start a Python program on so many workers."""
    python = str(BIN / "python")
    if kind == "alone":
        return [python]
    if kind == "horovodrun":
        return [str(BIN / "horovodrun"), "--gloo", "-np", str(workers), python]
    return [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-np", str(workers), python]


def run(kind: str, workers: int, *arguments, timeout: float = 300, cwd=ROOT) -> subprocess.CompletedProcess:
    environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return subprocess.run([*launcher(kind, workers), *map(str, arguments)], cwd=cwd, env=environment, text=True,
                          capture_output=True, timeout=timeout, stdin=subprocess.DEVNULL)


def train(*flags, kind: str = "alone", workers: int = 1, **options) -> subprocess.CompletedProcess:
    """A finished train.py, asserted to have exited with 0."""
    done = run(kind, workers, ROOT / "train.py", *flags, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def printed_json(done: subprocess.CompletedProcess):
    """The one line of JSON that train.py printed on standard output, without horovodrun's prefix."""
    lines = [line.removeprefix("[0]<stdout>:") for line in done.stdout.splitlines() if line.strip()]
    assert len(lines) == 1, done.stdout
    return json.loads(lines[0])


def rows(folder) -> list[dict]:
    """A run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def weights(folder) -> dict:
    """Every variable of a run's newest checkpoint, by its name in it, as TensorFlow finds it."""
    import tensorflow as tf

    path = tf.train.latest_checkpoint(str(Path(folder) / "checkpoints"))
    return {name: tf.train.load_variable(path, name) for name, _ in tf.train.list_variables(path)
            if name != "description"}


@pytest.fixture(scope="session")
def digits() -> Path:
    """The built-in dataset's folder."""
    from data.prepare import built_in

    return built_in("digits")


@pytest.fixture(scope="session")
def odd_digits(digits, tmp_path_factory) -> Path:
    """The digits in three training files and with 353 validation images, a prime number."""
    from data.formats import tfrecord

    folder = tmp_path_factory.mktemp("odd-digits")
    described = json.loads((digits / "dataset.json").read_text())
    for split, counts in (("train", (500, 400, 537)), ("validation", (353,))):
        source = digits / described[split]["files"][0]["path"]
        index, files, start = tfrecord.read_index(source), [], 0
        for number, count in enumerate(counts):
            path = folder / f"{split} {number}.tfrecord"  # a name with a space
            with open(source, "rb") as file:
                file.seek(index[start][0])
                path.write_bytes(file.read(int(index[start:start + count, 1].sum())))
            tfrecord.write_index(tfrecord.index_path(path), tfrecord.scan(path))
            files.append({"path": path.name, "samples": count})
            start += count
        described[split] = {"samples": sum(counts), "files": files}
    (folder / "dataset.json").write_text(json.dumps(described))
    return folder


@pytest.fixture(scope="session")
def digit_records(digits) -> dict[str, list[tuple[bytes, int]]]:
    """split -> (JPEG, label) pairs of the built-in digits."""
    from making import CUTS

    from data.dataset import open_dataset

    opened = open_dataset(digits)
    return {name: list(split.kind.records(split.paths[0], split.entries[0], np.arange(CUTS[name][-1])))
            for name, split in (("train", opened.train), ("validation", opened.validation))}


@pytest.fixture(scope="session")
def in_format(digit_records, tmp_path_factory):
    """A function from a format's name to a dataset of the digits in it."""
    from making import write_class_folders, write_shards

    made = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            (write_class_folders if name == "folder" else write_shards)(name, digit_records, made[name])
        return made[name]

    return make
