"""What the tests share: real processes under the real launchers, and datasets cut from the digits."""
import atexit
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.rigs import namespaces, trainings, warm
from tests.rigs.hosts import Hosts

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
ROOT = Path(__file__).parents[1]
TRAIN = ROOT / "train.py"
DIGITS = f"--flagfile={ROOT}/recipes/digits.flags"  # where --data_dir is given, which else means images.flags
# Of a training of which no more than its course matters: its network and images are as small as they can be.
TINY = ("--model=convnet", "--image_size=8", "--augmentation=none", "--optimizer=sgd", "--learning_rate=0.02",
        "--warmup=none")
BIN = Path(sys.executable).parent
# What train.py says of --output_dir=/proc/nowhere. Root may write to /proc, but nobody can create a folder there.
IN_PROC = "--output_dir: " + ("/proc is not a writable folder" if os.geteuid() else "/proc/nowhere cannot be created")
PRETEND_GPU = os.environ.get("BIGBATCH_PRETEND_GPU") == "1"  # test_gpu.py's tests run on the CPU
TIERS = ("trainings", "launchers", "docs")  # which the default tests leave to .ci/run
DEEP = ("resnet34", "resnet101", "resnet152", "resnet101_v1", "resnet152_v1")  # networks with more of what others have
LONGEST = ("test_slurm.py", "test_train.py", "test_docs.py", "test_horovodrun.py", "test_kubernetes.py",
           "test_resume.py", "test_elastic.py", "test_exchange.py", "test_torus.py", "test_models.py",
           "test_applications.py", "test_first_gpu_hour.py", "test_same_bits.py", "test_xla.py",
           "test_heartbeat.py", "test_batch_norm_span.py", "test_step.py", "test_feed.py", "test_evaluate.py",
           "test_test_images.py", "test_batch_norm.py")


def require_tool(*names: str) -> str:
    """The path of the first of these programs that is installed. Skips without one, fails where CI demands all."""
    for name in names:
        if found := shutil.which(name):
            return found
    skip(f"needs {' or '.join(names)}, which is not installed")


def require_fonts() -> None:
    """Skips without the fonts of benchmarks/glyphs.py; fails where CI demands all."""
    if not importlib.util.find_spec("font_roboto"):
        skip("needs fonts, which `uv run --group benchmark` installs")


def require_fashion() -> None:
    """Skips without Fashion-MNIST; fails where CI demands all."""
    from common.errors import UserError
    from data import sources

    try:
        sources.built_in("fashion")
    except UserError as error:
        skip(str(error))


def skip(needed: str):
    """Fails where CI demands all."""
    pytest.fail(needed) if os.environ.get("BIGBATCH_REQUIRE_ALL") else pytest.skip(needed)


def unshare(*options: str, every_user: bool = False) -> list[str]:
    """The start of an unshare command with these options. Skips where this user may not make namespaces."""
    require_tool("unshare")
    try:
        return [*namespaces.unshare(every_user), *options]
    except OSError as error:
        skip(str(error))


def emulated_hosts(*names: str, cold: bool = False) -> Hosts:
    """Hosts on which the scripts in launch/ start forks, or Python as it is."""
    require_tool("sshd", "/usr/sbin/sshd")
    require_tool("ip")
    unshare(every_user=True)
    return Hosts(*names, python=None if cold else warm_python())


class SmallDisk:
    """Context: a tmpfs in a mount namespace of its own. path: where this user's processes find it.

    options: of mount, such as size=1m.
    """

    def __init__(self, options: str):
        self._shell = subprocess.Popen([*unshare("--mount"), "sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       text=True)
        self._mount("-t", "tmpfs", "-o", options, "tmpfs")
        self.path = Path(f"/proc/{self._shell.pid}/root/mnt")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._shell.communicate()

    def remount(self, options: str) -> None:
        self._mount("-t", "tmpfs", "-o", f"remount,{options}", "tmpfs")  # without a type, only root may

    def _mount(self, *words):
        print("mount", *words, "/mnt && echo mounted || echo failed", file=self._shell.stdin, flush=True)
        assert self._shell.stdout.readline() == "mounted\n"


def pytest_itemcollected(item):
    """Tests of a file that share what a fixture made run in one of pytest's processes, the others in any."""
    if any(found[-1].scope == "module" for found in item._fixtureinfo.name2fixturedefs.values()):
        item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(ROOT))))


def pytest_collection_modifyitems(items):
    """Files that take minutes come first, so that all of pytest's processes end at about the same time."""
    for item in items:
        if len(found := [tier for tier in TIERS if item.get_closest_marker(tier)]) > 1:
            raise pytest.UsageError(f"{item.nodeid} is marked as {' and '.join(found)}; a test has one tier")
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_sessionstart():
    """Removes what killed mpiruns have left: one that gets the number of such a process fails to start."""
    for folder in Path(tempfile.gettempdir()).glob("ompi.*"):
        process = folder.name.removeprefix("ompi.")
        if process.isdecimal() and not psutil.pid_exists(int(process)):
            shutil.rmtree(folder, ignore_errors=True)


def pytest_configure(config):
    # A program that may not save its bytecode compiles TensorFlow's Python for 7 s, at each cold start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if uv := os.environ.get("UV"):  # the program that has started this run
        os.environ["PATH"] += f"{os.pathsep}{os.path.dirname(uv)}"
    try:
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "bigbatch").mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # the home is missing or cannot be written
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="cache-")
        atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
    for name in ("no_proxy", "NO_PROXY"):  # a proxy does not lead to the servers of tests, which are on this machine
        os.environ[name] = f"{os.environ.get(name, '')},127.0.0.1,localhost"
    if config.option.markexpr != "gpu" or PRETEND_GPU:  # the tests for CPUs are the same on a machine with a GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_runtest_setup(item):
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not shutil.which("nvidia-smi")
    pretended = PRETEND_GPU and item.path.name == "test_gpu.py"
    if item.get_closest_marker("gpu") and hidden and not pretended:
        pytest.skip("needs an NVIDIA GPU and -m gpu")  # the one skip that CI allows: it has none


@functools.cache
def forks() -> Path:
    """The folder of this session's server of forks (rigs/warm.py)."""
    folder = Path(tempfile.mkdtemp(prefix="forks-", dir="/tmp"))  # a short name, for its socket
    warm.start(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def pytest_runtest_teardown(item):
    """Ends the run where no further program could start."""
    for folder, server in warm.SERVERS.items():
        if server.poll() is not None:
            item.session.shouldfail = warm.last_words(folder)


@functools.cache
def built(name: str, classes: int = 1000, image_size: int | None = None):
    """A model that tests only look at, built once. image_size: by default the model's own."""
    import model_zoo

    return model_zoo.create_model(name, classes, image_size or model_zoo.MODELS[name].image_size)


def warm_python() -> str:
    return str(forks() / "python")


def scripts_environment() -> dict[str, str]:
    """What the scripts in launch/ find. Their Pythons are forks; os.environ leaves them as they are."""
    return os.environ | {"BIGBATCH_PYTHON": warm_python(), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


def launcher(kind: str, workers: int, cold: bool = False) -> list[str]:
    """The words that start a Python program on so many workers: forks (rigs/warm.py) under the launcher.

    cold: Python and horovodrun as they are.
    """
    python = str(BIN / "python") if cold else warm_python()
    if kind == "python":
        return [python]
    if kind == "horovodrun":
        horovodrun = [str(BIN / "horovodrun")] if cold else [str(BIN / "python"), "-m", "distributed.gloo"]
        return [*horovodrun, "--gloo", "-np", str(workers), python]
    return [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-np", str(workers), python]


def environment() -> dict[str, str]:
    """What programs find that tests start. OMPI_MCA_btl: as common.open_mpi sets it, which explains it."""
    return os.environ | {"OMPI_MCA_btl": "^ofi", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
                         "PYTHONPATH": str(ROOT)}


def run(kind: str, workers: int, *arguments, timeout: float = 900, cwd=ROOT, cold: bool = False
        ) -> subprocess.CompletedProcess:
    return subprocess.run([*launcher(kind, workers, cold), *map(str, arguments)], cwd=cwd, env=environment(), text=True,
                          capture_output=True, timeout=timeout, stdin=subprocess.DEVNULL)


def start(folder: Path, workers: int, flags, program: Path = TRAIN) -> subprocess.Popen:
    """train.py under mpirun, writing to FOLDER.log; `trainers` finds its workers."""
    return trainings.start(folder, workers, flags, warm_python(), program)


def trainers(launcher: subprocess.Popen) -> list[psutil.Process]:
    """The processes of train.py under mpirun, by rank; not those that stand for them."""
    return [worker_of(process) for process in trainings.trainers(launcher) if (forks() / str(process.pid)).exists()]


def worker_of(process: psutil.Process) -> psutil.Process:
    """The fork that a process stands for."""
    return psutil.Process(warm.child(forks(), process.pid))


def train(*flags, kind: str = "python", workers: int = 1, program: Path = TRAIN, **options
          ) -> subprocess.CompletedProcess:
    """A finished train.py, asserted to have exited with 0. program: train.py, or bn_train.py, which has bn_convnet."""
    done = run(kind, workers, program, *flags, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="module")
def train_once(tmp_path_factory):
    """`train`, but a training of these flags is made once; returns its folder."""
    made = {}

    def make(*flags, kind: str = "python", workers: int = 1, program: Path = TRAIN) -> Path:
        key = flags, kind, workers
        if key not in made:
            made[key] = tmp_path_factory.mktemp("run")
            train(*flags, f"--output_dir={made[key]}", kind=kind, workers=workers, program=program)
        return made[key]

    return make


def printed_json(done: subprocess.CompletedProcess):
    """The one line of JSON that train.py printed on standard output, without horovodrun's prefix."""
    lines = [line.removeprefix("[0]<stdout>:") for line in done.stdout.splitlines() if line.strip()]
    assert len(lines) == 1, done.stdout
    return json.loads(lines[0])


def unwrapped(page: str) -> str:
    """The text of a page of the repository, without its line breaks."""
    return " ".join((ROOT / page).read_text().split())


def rows(folder, name: str = "metrics.jsonl") -> list[dict]:
    """The rows of a run's log."""
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


@pytest.fixture
def shared_disk():
    """A folder where every user can write."""
    folder = Path(tempfile.mkdtemp(prefix="shared-", dir="/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def as_another_user():
    """A function that runs a command as another user. Skips if this one is not root."""
    if os.getuid():
        pytest.skip("only root can start processes of another user")

    def run(*words):
        subprocess.run(list(map(str, words)), user=65534, group=65534, extra_groups=[], check=True, timeout=300)

    return run


def weights(folder) -> dict:
    """Every variable of a run's newest checkpoint, by its name in it, as TensorFlow finds it."""
    import tensorflow as tf

    path = tf.train.latest_checkpoint(str(Path(folder) / "checkpoints"))
    return {name: tf.train.load_variable(path, name) for name, _ in tf.train.list_variables(path)
            if name != "description"}


@pytest.fixture(scope="session")
def digits() -> Path:
    """The built-in dataset's folder."""
    from data.named import built_in

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
    from data.dataset import open_dataset
    from tests.rigs.making import CUTS

    opened = open_dataset(digits)
    return {name: list(split.kind.records(split.paths[0], split.entries[0], np.arange(CUTS[name][-1])))
            for name, split in (("train", opened.train), ("validation", opened.validation))}


@pytest.fixture(scope="session")
def in_format(digit_records, tmp_path_factory):
    """A function from a format's name to a dataset of the digits in it."""
    from tests.rigs.making import write_class_folders, write_shards

    made = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            (write_class_folders if name == "folder" else write_shards)(name, digit_records, made[name])
        return made[name]

    return make
