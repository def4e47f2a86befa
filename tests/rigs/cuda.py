"""Enough of CUDA and NCCL to compile Horovod with NCCL on a machine that has no GPU, no driver and no toolkit.

nvcc is Debian's, headers and libraries are those of NVIDIA's wheels; they are laid out as in NVIDIA's images.
"""
import os
import re
import sys
import tempfile
from pathlib import Path

from conftest import ROOT, require_tool

from tests.rigs import container
from tests.rigs.container import call, check_output

STORE = Path("/var/tmp/bigbatch-cuda")  # kept, 7 GB: downloads are made once; it can be removed
TREE = STORE / "cuda-12.4-nccl-2.16.5"  # what is added to a machine's root
BASE, IMAGE = f"localhost/base:{TREE.name}", "localhost/bigbatch:cuda-test"
WHEELS = ("nvidia-cuda-runtime-cu12==12.4.127", "nvidia-cuda-nvcc-cu12==12.4.131",
          "nvidia-cuda-cccl-cu12==12.4.127.post1", "nvidia-nccl-cu12==2.16.5")
CUDA = "usr/local/cuda"
COPIES = {  # what Debian's package and the wheels hold: the folder where it goes
    "usr/lib/nvidia-cuda-toolkit/bin/nvcc": f"{CUDA}/bin",
    "usr/lib/nvidia-cuda-toolkit/bin/crt": f"{CUDA}/bin",
    "usr/lib/nvidia-cuda-toolkit/bin/cicc": f"{CUDA}/nvvm/bin",
    "usr/lib/nvidia-cuda-toolkit/libdevice/libdevice.10.bc": f"{CUDA}/nvvm/libdevice",
    **{f"usr/bin/{tool}": f"{CUDA}/bin" for tool in ("cudafe++", "fatbinary", "nvlink", "ptxas")},
    "nvidia/cuda_runtime/include/*": f"{CUDA}/include",
    "nvidia/cuda_nvcc/include/*": f"{CUDA}/include",
    "nvidia/cuda_cccl/include/nv": f"{CUDA}/include",
    "nvidia/cuda_runtime/lib/libcudart.so.12": f"{CUDA}/lib64",
    "nvidia/nccl/include/*.h": "usr/include",
    "nvidia/nccl/lib/libnccl.so.2": "usr/lib/x86_64-linux-gnu",
}
LINKS = {
    f"{CUDA}/lib64/libcudart.so": "libcudart.so.12",
    f"{CUDA}/lib64/libcudart_static.a": "libcudart.so.12",  # the wheels have no archive; the linker ignores the suffix
    "usr/lib/x86_64-linux-gnu/libnccl.so": "libnccl.so.2",
}
FILES = {
    f"{CUDA}/lib64/libcudadevrt.a": "!<arch>\n",  # empty: no kernel of Horovod starts another one
    f"{CUDA}/bin/nvcc.profile": """
TOP = $(_HERE_)/..
CICC_PATH = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(CICC_PATH):$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64"
""",
}


def debian_mirror() -> str:
    """The address from which this machine's apt takes Debian's packages."""
    paths = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    sources = "\n".join(path.read_text() for path in paths if path.is_file())
    return re.search(r"^(?:URIs:|deb) +(?:\[.*?\] +)?(\S+/debian/?)(?= |$)", sources, re.MULTILINE)[1]


def unpack(folder: Path) -> None:
    """Unpacks nvcc, from the Debian release that has CUDA 12.4, and NVIDIA's wheels."""
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (folder / "list").write_text(f"deb [signed-by={keys}] {debian_mirror()} trixie non-free\n")
    settings = {"Dir::State": folder, "Dir::State::status": "/dev/null", "Dir::Cache": folder / "cache",
                "Dir::Etc::SourceList": folder / "list", "Dir::Etc::SourceParts": "/dev/null",
                "APT::Sandbox::User": "root"}
    for command in (("update",), ("download", "nvidia-cuda-toolkit")):
        check_output("apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items()), *command, cwd=folder)
    [package] = folder.glob("*.deb")
    check_output("dpkg", "-x", package, folder)
    check_output("uv", "pip", "install", "--no-deps", f"--python={sys.executable}", f"--target={folder}", *WHEELS,
                 timeout=600)


def make_tree() -> None:
    for tool in ("apt-get", "dpkg", "uv"):
        require_tool(tool)
    STORE.mkdir(exist_ok=True)
    if TREE.exists():
        return
    with tempfile.TemporaryDirectory(dir=STORE) as name:
        work = Path(name)
        unpack(work)
        for source, target in COPIES.items():
            folder = work / "tree" / target
            folder.mkdir(parents=True, exist_ok=True)
            check_output("cp", "-a", *work.glob(source), folder)
        for link, target in LINKS.items():
            (work / "tree" / link).symlink_to(target)
        for file, content in FILES.items():
            (work / "tree" / file).parent.mkdir(parents=True, exist_ok=True)
            (work / "tree" / file).write_text(content)
        (work / "tree").rename(TREE)


def install(environment: Path) -> str:
    """Makes an environment by the README's command for GPUs; returns what uv says.

    uv's cache is one of its own: from the usual one, an environment for CPUs would get the Horovod that needs NCCL.
    """
    variables = {"PATH": f"{TREE}/usr/local/cuda/bin:{os.environ['PATH']}", "HOROVOD_GPU_OPERATIONS": "NCCL",
                 "HOROVOD_NCCL_INCLUDE": f"{TREE}/usr/include", "HOROVOD_NCCL_LIB": f"{TREE}/usr/lib/x86_64-linux-gnu"}
    check_output("uv", "cache", "clean", "horovod", env=os.environ | own(environment))  # 0.4 GB more a build otherwise
    done = call("uv", "sync", "--frozen", "--extra=gpu", "--reinstall-package=horovod", cwd=ROOT, timeout=1200,
                env=os.environ | variables | own(environment))
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr


def own(environment: Path) -> dict[str, str]:
    """The variables by which uv takes this environment."""
    return {"UV_PROJECT_ENVIRONMENT": str(environment), "UV_CACHE_DIR": str(STORE / "uv")}


def make_base() -> str:
    """The name of the container rig's base with CUDA and NCCL."""
    make_tree()
    if not container.is_made(BASE):
        container.add_files(BASE, container.make_base(), (TREE, "/"),
                                PATH=f"/{CUDA}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    return BASE
