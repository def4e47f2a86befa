"""Workers on different processors: they are named, and Muon's work is then done once and shared."""
import json
import subprocess

import pytest
from conftest import BIN, DIGITS, ROOT, TINY, environment, run

COMPARED = """
import os
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
from distributed import processors, world as worlds
from common import processor
world = worlds.start(0)
print("equal:", processors.differing(world), flush=True)
for kind in ("name", "instructions", "variable"):
    name, instructions = ("EPYC" if kind == "name" and rank == 2 else "Xeon",
                          {"avx2", *["avx512f"] * (kind == "instructions" and rank == 0)})
    processor.name, processor.instructions = lambda: name, lambda: instructions
    os.environ.update({"ONEDNN_MAX_CPU_ISA": "AVX2"} if kind == "variable" and rank == 1 else {})
    print(f"{kind}:", processors.differing(world), flush=True)
world.barrier()
"""


def test_processors_that_differ_in_anything_are_named():
    done = run("mpirun", 3, "-c", COMPARED)
    assert done.returncode == 0, done.stderr
    said = {kind: {line.partition(": ")[2] for line in done.stdout.splitlines() if line.startswith(f"{kind}: ")}
            for kind in ("equal", "name", "instructions", "variable")}
    assert {kind: len(texts) for kind, texts in said.items()} == dict.fromkeys(said, 1)  # the same on each rank
    assert said["equal"] == {"None"}
    host, threads = said["name"].copy().pop().partition(": ")[0], said["name"].copy().pop().rpartition(" ")[2]
    assert threads.startswith("threads=")
    for kind, one, other in (("name", "Xeon avx2", "EPYC avx2"), ("instructions", "Xeon avx2 avx512f", "Xeon avx2"),
                             ("variable", "Xeon avx2", "Xeon avx2 ONEDNN_MAX_CPU_ISA=AVX2")):
        assert said[kind] == {f"{host}: {one} {threads}; {host}: {other} {threads}"}


OLDER = f"""
import os, runpy, sys
if os.environ["HOROVOD_RANK"] == "0":
    os.environ["ONEDNN_MAX_CPU_ISA"] = "SSE41"  # sums without fused multiply-add
sys.argv[0] = "{ROOT / 'train.py'}"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.trainings
@pytest.mark.parametrize("shares", ["auto", "false"])
def test_muon_on_hosts_with_different_processors(shares, tmp_path):
    """Two names of this machine are two hosts, of which the first has an older processor for oneDNN."""
    (tmp_path / "older_train.py").write_text(OLDER)
    done = subprocess.run(
        [BIN / "python", "-m", "distributed.gloo", "--gloo", "-np", "2", "-H", "localhost:1,127.0.0.1:1",
         BIN / "python", tmp_path / "older_train.py", DIGITS, *TINY, "--optimizer=muon", "--epochs=1",
         "--checkpoint_every=0.3", f"--share_orthogonalization={shares}", f"--output_dir={tmp_path / 'run'}"],
        cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=900, stdin=subprocess.DEVNULL)
    [said] = [line for line in done.stderr.splitlines() if "the workers have different processors" in line
              and "test the mem" not in line]
    assert " ONEDNN_MAX_CPU_ISA=SSE41 threads=" in said
    if shares == "auto":
        assert done.returncode == 0 and "need equal processors" not in said, done.stderr
        assert json.loads((tmp_path / "run" / "plan.json").read_text())["shares_orthogonalization"]
    else:
        lines = [line for line in done.stderr.splitlines() if "differ from each other" in line]
        assert done.returncode == 1 and lines, done.stderr
        assert said.endswith("; with --xla or --share_orthogonalization=false, equal weights need equal processors")
        [cure] = [line for line in done.stderr.splitlines() if "if they are equal, test the mem" in line]
        assert "the workers have different processors (" in cure
