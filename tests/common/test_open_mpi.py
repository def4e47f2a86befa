"""What keeps MPI from starting is named before it starts: components that Open MPI or this host lacks."""
import os
import subprocess

import pytest
from conftest import BIN, ROOT, run

from common import open_mpi
from common.errors import UsageError

STARTS = """
import sys
from common import command, open_mpi
with command.shell("worker") as ending, open_mpi.configured():
    from mpi4py import MPI
sys.exit(ending.code or MPI.COMM_WORLD.size != 2)
"""
NAMED = "worker: MPI does not start with {}: this Open MPI, or this host's network, lacks what that needs; {}"


@pytest.fixture
def started(tmp_path):
    """A function: what two workers under mpirun say of MPI with these variables and these lines of the user's file."""
    def start(*lines: str, **variables: str) -> list[str]:
        (tmp_path / ".openmpi").mkdir(exist_ok=True)
        (tmp_path / ".openmpi" / "mca-params.conf").write_text("\n".join(lines))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("OMPI_")}
        words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", BIN / "python", "-c", STARTS]
        done = subprocess.run(words, cwd=ROOT, text=True, capture_output=True, timeout=300, stdin=subprocess.DEVNULL,
                              env=kept | {"HOME": str(tmp_path), "PATH": f"{BIN}:{os.environ['PATH']}"} | variables)
        said = [line for line in done.stderr.splitlines() if line.startswith("worker: ")]
        assert (done.returncode == 0) == (not said), done.stderr
        return said

    return start


def test_variables_that_mpi_cannot_start_with_are_named(started):
    """yalla and openib were parts of earlier Open MPIs. A part may be left out, and others have an effect here."""
    assert started(OMPI_MCA_btl="openib,self", OMPI_MCA_pml="ob1", OMPI_MCA_coll="^hcoll") == [
        NAMED.format("OMPI_MCA_btl=openib,self", "unset OMPI_MCA_btl")]
    assert started(OMPI_MCA_btl="openib,self", OMPI_MCA_pml="yalla") == [NAMED.format(
        "OMPI_MCA_btl=openib,self and OMPI_MCA_pml=yalla", "unset OMPI_MCA_btl and unset OMPI_MCA_pml")]
    assert started(OMPI_MCA_btl="^openib", OMPI_MCA_pml="ob1") == []


def test_a_file_that_open_mpi_reads_is_named(started, tmp_path):
    """A variable takes precedence over it."""
    file = tmp_path / ".openmpi" / "mca-params.conf"
    assert started("# my settings", " pml =  yalla ", "btl_tcp_if_exclude = lo") == [
        NAMED.format("OMPI_MCA_pml=yalla", f"remove it from {file}")]
    assert started("pml = yalla", OMPI_MCA_pml="ob1") == []


def test_what_mpi_starts_with_is_not_tried(monkeypatch):
    """Most hosts select nothing, or leave out the part that looks for a network card."""
    for name in open_mpi.SELECTIONS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(open_mpi.BTL, open_mpi.WITHOUT_OFI)
    monkeypatch.setenv("HOME", "/nowhere")
    assert open_mpi.selected() == {}


@pytest.mark.parametrize("words", [["launch.preflight"], ["data.prepare", "--source=digits", "--output={}"]])
def test_programs_end_with_the_line(words, tmp_path, monkeypatch):
    monkeypatch.setenv("OMPI_MCA_pml", "yalla")
    done = run("mpirun", 2, "-m", *(word.format(tmp_path / "data") for word in words))
    said = [line for line in done.stderr.splitlines() if "MPI does not start with OMPI_MCA_pml=yalla: " in line]
    assert done.returncode == 1 and len(said) == 1 and "Traceback" not in done.stderr, done.stderr


def test_a_rank_that_fails_alone_ends_when_mpi_has_started_in_all(tmp_path):
    """mpirun would otherwise kill the other one before it has arrived, or in MPI_Init, where mpirun may hang."""
    program = f"""
import os, pathlib, sys, time
from common import command, open_mpi
from common.errors import UsageError
with command.shell("worker") as ending:
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        with open_mpi.ended_together():
            raise UsageError("what is wrong", "what to do")
    time.sleep(3)
    pathlib.Path({str(tmp_path / "arrived")!r}).touch()
    from mpi4py import MPI
    MPI.COMM_WORLD.Barrier()
sys.exit(ending.code)
"""
    done = run("mpirun", 2, "-c", program, timeout=300)
    assert done.returncode == UsageError.exit_code and (tmp_path / "arrived").exists()
    assert [line for line in done.stderr.splitlines() if line.startswith("worker: ")] == [
        "worker: what is wrong", "worker: what to do"]
