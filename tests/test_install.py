"""What uv installs: DALI's TensorFlow plugin without CUDA, a Horovod with NCCL for one checkout, and the wheel."""
import functools
import http.server
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from pathlib import Path

import horovod
import pytest
import setuptools
from conftest import ROOT, environment, require_tool, unshare

from distributed.gpus import NCCL_BUILD

PLUGIN = "nvidia-dali-tf-plugin-cuda120"
# In a mount namespace of its own: an empty folder over each CUDA toolkit, nothing that runs over each nvcc.
HIDING = """
mount --make-rprivate /
for toolkit in /usr/local/cuda* /opt/cuda* /usr/lib/cuda; do
    if [ -d "$toolkit" ]; then mount --bind "$EMPTY" "$(realpath "$toolkit")"; fi
done
for folder in $(echo "$PATH" | tr : ' '); do
    if [ -e "$folder/nvcc" ]; then mount --bind /dev/null "$(realpath "$folder/nvcc")"; fi
done
if command -v nvcc || [ -e /usr/local/cuda/include/cuda_runtime_api.h ]; then exit 3; fi
exec "$@"
"""


def without(*starts: str) -> dict[str, str]:
    """The variables that do not begin so, and none of uv's settings. Its cache stays where it is."""
    return {name: value for name, value in os.environ.items()
            if name == "UV_CACHE_DIR" or not name.startswith(("UV_", *starts))}


def without_cuda(folder: Path, *command) -> subprocess.CompletedProcess:
    (folder / "empty").mkdir(exist_ok=True)
    return subprocess.run([*unshare("--mount"), "sh", "-c", HIDING, "sh", *command], cwd=ROOT, text=True,
                          capture_output=True, timeout=600, stdin=subprocess.DEVNULL,
                          env=without("CUDA", "CPATH") | {"EMPTY": str(folder / "empty"),
                                                           "UV_PROJECT_ENVIRONMENT": str(folder / "venv")})


@pytest.mark.plugin_build
def test_the_plugin_compiles_without_cuda(tmp_path):
    uv = require_tool("uv")
    done = without_cuda(tmp_path, uv, "sync", "--locked", "--no-install-project", "--reinstall-package", PLUGIN)
    assert done.returncode == 0 and f"Built {PLUGIN}" in done.stderr, done.stderr[-3000:]
    [library] = (tmp_path / "venv").glob("lib/python3.11/site-packages/nvidia/dali_tf_plugin/libdali_tf_current.so")
    needed = subprocess.run(["readelf", "--dynamic", library], text=True, capture_output=True, check=True).stdout
    assert "libtensorflow_framework" in needed and "libmpi" not in needed and "libcuda" not in needed
    done = without_cuda(tmp_path, tmp_path / "venv" / "bin" / "python", "-c", "import nvidia.dali.plugin.tf")
    assert done.returncode == 0, done.stderr[-3000:]


# A package that is called Horovod, and prints for what it was compiled.
STAND_IN = {
    "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
    "PKG-INFO": "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n",
    "backend.py": """
import os, zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    name, about = "horovod-0.28.1-py3-none-any.whl", "horovod-0.28.1.dist-info/"
    with zipfile.ZipFile(folder + "/" + name, "w") as wheel:
        wheel.writestr("horovod.py", "print(%r)" % os.environ.get("HOROVOD_GPU_OPERATIONS", "CPU"))
        wheel.writestr(about + "METADATA", open("PKG-INFO").read())
        wheel.writestr(about + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(about + "RECORD", "")
    return name
"""}
PROJECT = """
[project]
name = "checkout"
version = "0"
requires-python = "==3.11.*"
dependencies = ["horovod==0.28.1"]
optional-dependencies = {{ gpu = [] }}
[[tool.uv.index]]
url = "{index}"
default = true
"""


@pytest.fixture
def index(tmp_path):
    """The address of a package index that has the stand-in's source."""
    folder = tmp_path / "index" / "horovod"
    source = tmp_path / "horovod-0.28.1"
    for path in (folder, source):
        path.mkdir(parents=True)
    for name, content in STAND_IN.items():
        (source / name).write_text(content)
    with tarfile.open(folder / "horovod-0.28.1.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_horovod_with_nccl_stays_in_its_checkout(index, tmp_path):
    """With our command, and again after the command that filled the cache for every checkout."""
    require_tool("uv")

    def shell(checkout: str, command: str) -> str:
        folder = tmp_path / checkout
        folder.mkdir(exist_ok=True)
        (folder / "pyproject.toml").write_text(PROJECT.format(index=index))
        done = subprocess.run(["bash", "-euc", command], cwd=folder, text=True, capture_output=True, timeout=300,
                              env=without("VIRTUAL_ENV") | {"UV_CACHE_DIR": str(tmp_path / "cache"),
                                                          "UV_PYTHON": sys.executable})
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    compiled_with = "uv run python -c 'import horovod'"
    assert NCCL_BUILD in (ROOT / "docs" / "gpu.md").read_text().splitlines()
    shell("gpu", NCCL_BUILD)
    assert [shell(name, compiled_with) for name in ("gpu", "other", "gpu")] == ["NCCL", "CPU", "NCCL"]
    shell("careless", NCCL_BUILD.replace(" --no-cache", ""))
    assert [shell(name, compiled_with) for name in ("harmed", "other", "gpu")] == ["NCCL", "CPU", "NCCL"]
    shell("harmed", "uv sync --reinstall-package horovod")
    assert [shell(name, compiled_with) for name in ("harmed", "new")] == ["CPU", "CPU"]


@pytest.fixture(scope="module")
def without_nccl(tmp_path_factory):
    """The environment of programs that find a Horovod whose library needs an NCCL that is not there."""
    folder = tmp_path_factory.mktemp("horovod")
    shutil.copytree(Path(horovod.__file__).parent, folder / "horovod", copy_function=os.symlink)
    [library] = (folder / "horovod" / "tensorflow").glob("mpi_lib*.so")
    library.unlink()
    nccl, compile_it = folder / "libnccl.so.2", [require_tool("g++"), "-shared", "-x", "c++", "/dev/null", "-x", "none"]
    subprocess.run([*compile_it, "-Wl,-soname,libnccl.so.2", "-o", nccl], check=True)
    subprocess.run([*compile_it, "-Wl,--no-as-needed", nccl, "-o", library], check=True)
    nccl.unlink()
    return environment() | {"PYTHONPATH": f"{folder}:{ROOT}"}


def test_a_horovod_whose_nccl_is_missing_is_one_line(without_nccl, tmp_path):
    done = subprocess.run([sys.executable, ROOT / "train.py", f"--output_dir={tmp_path}"], text=True, timeout=300,
                          capture_output=True, env=without_nccl)
    [line] = [line for line in done.stderr.splitlines() if "loading TensorFlow" not in line]
    assert done.returncode == 1 and "libnccl.so.2, which is missing" in line, done.stderr
    assert "'uv sync --reinstall-package horovod'" in line and f"'{NCCL_BUILD}'" in line


def test_a_server_of_forks_that_dies_ends_the_run_with_its_log(without_nccl, tmp_path):
    done = subprocess.run([sys.executable, "-m", "pytest", "-n1", "-pno:cacheprovider",
                           f"--basetemp={tmp_path / 'made'}", "tests/test_damaged_input.py", "-kprocess"], cwd=ROOT,
                          text=True, capture_output=True, timeout=300, env=without_nccl)
    assert done.returncode and "4 failed" not in done.stdout and "passed" not in done.stdout, done.stdout
    stopped = done.stdout[done.stdout.index("Interrupted: the server of forks"):]
    assert "libnccl.so.2: cannot open shared object file" in stopped


# A project with two folders that are called as rooms are.
NUMBERS = "import numpy as np\nimages, labels = np.eye(6, dtype=np.float32), np.arange(6) % 3\n"
RATE = "RATE = 0.5\n"
OWN_FOLDERS = {"data/__init__.py": "", "data/numbers.py": NUMBERS, "optim/__init__.py": RATE}
THERE = "from bigbatch.optim.lars import LARS\nfrom data.numbers import images, labels\nfrom optim import RATE\n"
IN_THE_CHECKOUT = f"from optim.lars import LARS\n{NUMBERS}{RATE}"
# Trains with LARS, saves the model as the first argument, and loads it and those that the other arguments name.
FIT = """
import sys
import tensorflow as tf
model = tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=(6,))])
model.compile(LARS(RATE, trust_coefficient=0.1, exclude=("bias",)),
              tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(images, labels, batch_size=6, epochs=50, verbose=0)
for suffix in (".keras", ".h5"):
    model.save(sys.argv[1] + suffix)
    for name in sys.argv[1:]:
        loaded = tf.keras.models.load_model(name + suffix)
        assert type(loaded.optimizer) is LARS and int(loaded.optimizer.iterations) == 50, type(loaded.optimizer)
        assert loaded.optimizer.get_config() == model.optimizer.get_config()
        loaded.fit(images, labels, batch_size=6, epochs=1, verbose=0)
        assert loaded.evaluate(images, labels, verbose=0)[1] == 1
print(*sorted({"common", "plan", "training", "horovod", "nvidia"} & {*sys.modules}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """What `uv build` makes of the files that git knows, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    listed = subprocess.check_output(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                                     text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "copy" / name)
    uv("build", "--offline", "--no-build-isolation", f"--python={sys.executable}", cwd=folder / "copy")
    [found] = (folder / "copy" / "dist").glob("*.whl")
    return found


def uv(*words, **options) -> None:
    done = subprocess.run([require_tool("uv"), *map(str, words)], text=True, capture_output=True, timeout=300,
                          env=without(), **options)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_wheel_has_one_name_and_needs_tensorflow_alone(wheel):
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
        [about] = [opened.read(name).decode() for name in opened.namelist() if name.endswith("/METADATA")]
    assert names == {f"bigbatch/optim/{path.name}" for path in (ROOT / "optim").glob("*.py")}
    required = [line for line in about.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert required == ["Requires-Dist: tensorflow==2.15.1"]


@pytest.mark.trainings
def test_a_project_with_folders_of_the_same_names_trains_with_lars(wheel, tmp_path, monkeypatch):
    """The wheel is installed where all is but the app. The project and the checkout load each other's models.

    uv finds what the wheel needs in the copies: it follows no link, and its cache may be empty.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    [packages] = (tmp_path / "venv").glob("lib/python*/site-packages")
    for path in Path(setuptools.__file__).parents[1].iterdir():
        if "bigbatch" not in path.name and not (packages / path.name).exists():
            (shutil.copytree if path.suffix == ".dist-info" else os.symlink)(path, packages / path.name)
    python = tmp_path / "venv" / "bin" / "python"
    uv("pip", "install", "--offline", f"--python={python}", wheel)
    for name, content in (OWN_FOLDERS | {"fit.py": THERE + FIT}).items():
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / name).write_text(content)

    def in_the_checkout(*names: str) -> None:
        monkeypatch.setattr(sys, "argv", ["fit.py", *names])
        exec(IN_THE_CHECKOUT + FIT, {})

    monkeypatch.chdir(tmp_path)
    in_the_checkout("ours")
    done = subprocess.run([python, "project/fit.py", "theirs", "ours"], text=True, capture_output=True, timeout=300,
                          env={"PATH": os.environ["PATH"], "TF_CPP_MIN_LOG_LEVEL": "3"})
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr[-3000:]
    in_the_checkout("again", "theirs")


def test_a_checkout_below_another_workspace_has_its_own_environment(tmp_path):
    (tmp_path / "checkout").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "checkout")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\nversion = "0"\nrequires-python = ">=3.11"\n'
                                             '[tool.uv.workspace]\nmembers = ["*"]\n')
    uv("run", "--no-sync", "--offline", f"--python={sys.executable}", "python", "-c", "", cwd=tmp_path / "checkout")
    assert (tmp_path / "checkout" / ".venv").is_dir() and not (tmp_path / ".venv").exists()


def test_a_clone_has_the_same_bytes_where_git_writes_windows_line_ends(tmp_path):
    clone = ["git", "-C", tmp_path / "clone"]
    subprocess.run(["git", "clone", "--quiet", "--config=core.autocrlf=true", ROOT, clone[-1]], check=True)
    files = [line.partition("\t") for line in
             subprocess.check_output([*clone, "ls-tree", "-r", "HEAD"], text=True).splitlines()]
    found = subprocess.check_output([*clone, "hash-object", "--no-filters", "--stdin-paths"], text=True,
                                    input="\n".join(name for _, _, name in files))
    assert found.split() == [kept.split()[-1] for kept, _, _ in files]


def test_readmes_first_command_works_however_pip_is_set(wheel, tmp_path):
    """With the words that README puts before it."""
    readme = (ROOT / "README.md").read_text()
    [words] = re.findall(r"`(PIP_[^`]*)`", readme)
    assert "\npip install --target .uv uv && " in readme
    require_tool("pip")
    done = subprocess.run(f"{words} pip install --target .uv --no-index --no-deps {shlex.quote(str(wheel))}",
                          shell=True, cwd=tmp_path, text=True, capture_output=True, timeout=300,
                          env=os.environ | {"PIP_USER": "1", "PIP_REQUIRE_VIRTUALENV": "1"})
    assert done.returncode == 0 and (tmp_path / ".uv" / "bigbatch").is_dir(), done.stderr
