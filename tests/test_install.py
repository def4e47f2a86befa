"""What `uv run` installs where there is no CUDA: DALI's TensorFlow plugin is compiled in such a place."""
import os
import subprocess
from pathlib import Path

from conftest import ROOT, require_tool, unshare

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


def test_the_plugin_compiles_without_cuda(tmp_path):
    uv = require_tool("uv")
    done = without_cuda(tmp_path, uv, "sync", "--locked", "--no-install-project", "--no-compile-bytecode",
                        "--reinstall-package", PLUGIN)
    assert done.returncode == 0 and f"Built {PLUGIN}" in done.stderr, done.stderr[-3000:]
    [library] = (tmp_path / "venv").glob("lib/python3.11/site-packages/nvidia/dali_tf_plugin/libdali_tf_current.so")
    needed = subprocess.run(["readelf", "--dynamic", library], text=True, capture_output=True, check=True).stdout
    assert "libtensorflow_framework" in needed and "libmpi" not in needed and "libcuda" not in needed
    done = without_cuda(tmp_path, tmp_path / "venv" / "bin" / "python", "-c", "import nvidia.dali.plugin.tf")
    assert done.returncode == 0, done.stderr[-3000:]
