"""What uv installs: DALI's TensorFlow plugin without CUDA, and a Horovod with NCCL for one checkout alone."""
import functools
import http.server
import os
import shutil
import subprocess
import sys
import tarfile
import threading
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


def without_cuda(folder: Path, *command) -> subprocess.CompletedProcess:
    (folder / "empty").mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "CPATH", "UV_"))}
    return subprocess.run([*unshare("--mount"), "sh", "-c", HIDING, "sh", *command], cwd=ROOT, text=True,
                          capture_output=True, timeout=600, stdin=subprocess.DEVNULL,
                          env=kept | {"EMPTY": str(folder / "empty"), "UV_PROJECT_ENVIRONMENT": str(folder / "venv")})


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
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "VIRTUAL_ENV"))}

    def shell(checkout: str, command: str) -> str:
        folder = tmp_path / checkout
        folder.mkdir(exist_ok=True)
        (folder / "pyproject.toml").write_text(PROJECT.format(index=index))
        done = subprocess.run(["bash", "-euc", command], cwd=folder, text=True, capture_output=True, timeout=300,
                              env=kept | {"UV_CACHE_DIR": str(tmp_path / "cache"), "UV_PYTHON": sys.executable})
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
                           f"--basetemp={tmp_path / 'made'}", "tests/test_bad_input.py", "-kprocess"], cwd=ROOT,
                          text=True, capture_output=True, timeout=300, env=without_nccl)
    assert done.returncode and "4 failed" not in done.stdout and "passed" not in done.stdout, done.stdout
    stopped = done.stdout[done.stdout.index("Interrupted: the server of forks"):]
    assert "libnccl.so.2: cannot open shared object file" in stopped


@pytest.fixture(scope="module")
def pip(tmp_path_factory):
    """Runs pip in an environment without TensorFlow, on a copy of the checkout, without a network."""
    pytest.importorskip("ensurepip")  # in Debian, a package of its own
    folder = tmp_path_factory.mktemp("pip")
    listed = subprocess.check_output(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT,
                                     text=True)
    for name in filter(None, listed.split("\0")):
        if not name.startswith(("tests/", "docs/")) and (ROOT / name).is_file():
            (folder / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "copy" / name)
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    (folder / "path").mkdir()
    (folder / "path" / "setuptools").symlink_to(Path(setuptools.__file__).parent)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}

    def run(*words) -> subprocess.CompletedProcess:
        command = [folder / "venv" / "bin" / "pip", "install", "--no-index", "--no-build-isolation", *words]
        return subprocess.run(command, cwd=folder / "copy", text=True, capture_output=True, timeout=300,
                              env=kept | {"PYTHONPATH": str(folder / "path")})

    return run


@pytest.mark.parametrize("words", [["."], ["--editable", "."]])
def test_pip_names_the_command_that_works(pip, words):
    done = pip(*words)
    assert done.returncode and "pip install --target .uv uv && .uv/bin/uv sync" in done.stderr, done.stderr[-3000:]
    assert "Traceback" not in done.stderr and "horovod" not in done.stdout.lower()


def test_pip_installs_lars_alone(pip, tmp_path):
    done = pip("--no-deps", "--target", tmp_path, ".")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "optim" / "lars.py").read_text() == (ROOT / "optim" / "lars.py").read_text()
