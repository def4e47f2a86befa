"""The image, built where there is no Docker engine and no image registry: Debian's tools stand in, as root.

buildah builds it on a base of mmdebstrap's, and podman's service runs it, which as Docker's does belongs to root and is
used by anybody whom its socket lets in.
"""
import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from conftest import ROOT, require_tool

STORE = Path("/var/tmp/bigbatch-container")  # kept, so that only the first build is a long one; it can be removed
BASE, IMAGE = "localhost/base:bookworm", "localhost/bigbatch:test"
STORAGE = ("--storage-driver", "overlay", "--root", STORE / "store", "--runroot", STORE / "run")
BUILDAH = ("buildah", *STORAGE)
CERTIFICATES = "/etc/ssl/certs/host.crt"


def call(*command, timeout=300, **options) -> subprocess.CompletedProcess:
    return subprocess.run([str(word) for word in command], text=True, capture_output=True, timeout=timeout,
                          stdin=subprocess.DEVNULL, **options)


def check_output(*command, **options) -> str:
    """What a command printed that must succeed."""
    done = call(*command, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.strip()


def make_base() -> str:
    """The name of Debian's bookworm with this machine's certificates: pip and uv inside trust whom it trusts."""
    if not is_made(BASE):
        archive = STORE / "base.tar"
        step("mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", "--include=ca-certificates", "bookworm",
             archive, "/etc/apt/sources.list.d/debian.sources")
        add_files(BASE, "scratch", (archive, "/"), ("/etc/ssl/certs/ca-certificates.crt", CERTIFICATES),
                  SSL_CERT_FILE=CERTIFICATES, PIP_CERT=CERTIFICATES)
        archive.unlink()
    return BASE


def is_made(image: str) -> bool:
    return call(*BUILDAH, "inspect", "--type=image", image).returncode == 0


def add_files(image: str, base: str, *files: tuple, **environment: str) -> None:
    """Makes an image of a base, of files, an archive's or a folder's content (each with its target), and variables."""
    container = step(*BUILDAH, "from", base)
    for source, target in files:
        step(*BUILDAH, "add", container, source, target)
    step(*BUILDAH, "config", *(f"--env={name}={value}" for name, value in environment.items()), container)
    step(*BUILDAH, "commit", "--rm", container, image)


def build(image: str, base: str) -> None:
    """The image of this checkout. Minutes when the dependencies have changed, seconds otherwise."""
    # --format docker: buildah's own, OCI's, would drop a SHELL or HEALTHCHECK without a word
    step(*BUILDAH, "bud", "--format=docker", "--isolation=chroot", "--network=host", "--layers",
         f"--build-arg=BASE_IMAGE={base}", f"--tag={image}", ROOT)


def step(*command) -> str:
    return check_output(*command, timeout=1800, env=os.environ | {"TMPDIR": str(STORE / "tmp")})


def podman_service(folder: Path):
    """Yields the program while the service runs. What this machine's root may not raise, a limit, stays as it is."""
    socket, script = folder / "socket", folder / "engine"
    service = subprocess.Popen([*map(str, ("podman", *STORAGE, "--runtime=runc", "--cgroup-manager=cgroupfs")),
                                "system", "service", "--time=0", f"unix://{socket}"], stderr=subprocess.DEVNULL)
    limits = {name: ":".join(map(str, resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))))
              for name in ("memlock", "nofile")}
    script.write_text(f"""#!/bin/sh
if [ "$1" = run ]; then
    shift
    for word; do
        shift
        [ "$word" != memlock=-1 ] || word=memlock={limits["memlock"]}
        set -- "$@" "$word"
    done
    set -- run --network=none --ulimit=nofile={limits["nofile"]} --ulimit=nproc=32768:32768 "$@"
fi
exec podman --remote --url unix://{socket} "$@"
""")
    script.chmod(0o755)
    try:
        deadline = time.monotonic() + 300
        while not socket.exists():
            assert service.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        socket.chmod(0o666)
        yield script
    finally:
        service.terminate()
        service.wait(300)


def engine(image=IMAGE, make_base=make_base):
    """Builds the image; yields the path of a program that any user may call as docker.sh calls docker."""
    for tool in ("mmdebstrap", "buildah", "podman", "runc"):
        require_tool(tool)
    if os.geteuid():
        pytest.skip("needs root")
    (STORE / "tmp").mkdir(parents=True, exist_ok=True)
    STORE.chmod(0o755)
    build(image, make_base())
    with tempfile.TemporaryDirectory(dir=STORE) as folder:
        Path(folder).chmod(0o755)
        yield from podman_service(Path(folder))
