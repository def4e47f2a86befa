"""What a worker's start does, and does not do; what workers exchange."""
import os
import subprocess
import tempfile
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT, environment, launcher, run, unshare

from distributed.world import LARGEST_MESSAGE, parts, set_horovods_variables

SINGLE_WORKER = """
import os
from distributed import world
before = dict(os.environ)
worker = world.start(0)
import horovod.tensorflow as hvd
left = {name for name in os.environ if name.startswith("HOROVOD_")}
print(worker.rank, worker.size, hvd.size(), hvd.mpi_enabled(), sorted(left))
"""


@pytest.mark.parametrize(("variable", "by_mpi"), [(None, False), ("SLURM_JOB_ID", True), ("PMI_RANK", True)])
def test_a_single_worker_starts_without_mpi(monkeypatch, variable, by_mpi):
    """And leaves nothing in the environment that a launcher under it would take for a world of one."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PMI", "OMPI_COMM_", "HOROVOD_"))]:
        monkeypatch.delenv(name)
    if variable:
        monkeypatch.setenv(variable, "0")
    done = run("python", 1, "-c", SINGLE_WORKER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1", "1", str(by_mpi), "[]"]


@pytest.mark.parametrize(("nccl", "timeline", "given", "expected"), [
    (True, None, {}, "1"), (False, None, {}, None), (True, "timeline.json", {}, None),
    (True, None, {"HOROVOD_TIMELINE": "DYNAMIC"}, None), (True, None, {"HOROVOD_NUM_NCCL_STREAMS": "2"}, None),
    (True, None, {"HOROVOD_ELASTIC": "1"}, None), (True, None, {"HOROVOD_ENABLE_ASYNC_COMPLETION": "0"}, "0")])
def test_where_the_host_does_not_wait_for_nccl(nccl, timeline, given, expected, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(given))
    set_horovods_variables(False, None, timeline, nccl)
    assert os.environ.get("HOROVOD_ENABLE_ASYNC_COMPLETION") == expected


@pytest.mark.parametrize(("nccl", "given", "expected"), [
    (False, {"HOROVOD_ELASTIC": "1"}, "0"), (True, {"HOROVOD_ELASTIC": "1"}, None), (False, {}, None),
    (False, {"HOROVOD_ELASTIC": "1", "HOROVOD_CACHE_CAPACITY": "8"}, "8")])
def test_where_gloo_could_take_gradients_for_bit_vectors(nccl, given, expected, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(given))
    set_horovods_variables(False, None, None, nccl)
    assert os.environ.get("HOROVOD_CACHE_CAPACITY") == expected


CONVERTED = """
import sys
from tensorflow.python.autograph.impl import api
import train
convert, converted = api._convert_actual, []
api._convert_actual = lambda function, *rest: converted.append(function) or convert(function, *rest)
code = train.main(["train.py", "--epochs=0.1", "--batch_size=64", "--micro_batch_size=16", *sys.argv[1:]])
print(len(converted), sorted({function.__qualname__ for function in converted}), file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.trainings
@pytest.mark.parametrize("workers", [1, 2])
def test_autograph_converts_nothing(workers, tmp_path):
    """It took most of a start: 1,449 functions of Horovod, Keras and ours."""
    done = run("mpirun" if workers > 1 else "python", workers, "-c", CONVERTED, "--image_size=16",
               "--batch_norm_statistics=exact", "--log_trust_ratios", "--compression=fp16", f"--output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.endswith("]")] == ["0 []"] * workers


EXCHANGED = """
import horovod.tensorflow as hvd
import numpy as np
from common.errors import UserError
from distributed import world as worlds

world = worlds.start(0)
rank, allgather = world.rank, hvd.allgather
worlds.LARGEST_MESSAGE = 1000
mine = {"rank": rank, "text": "é" * 300 * rank, "array": np.arange(rank), "nothing": None}
found = world.gather(mine, "gather")
assert [one["rank"] for one in found] == [0, 1, 2] and [len(one["text"]) for one in found] == [0, 300, 600]
assert [one["array"].tolist() for one in found] == [[], [0], [0, 1]]
rows = world.concatenate(np.full([rank, 4], rank, np.float32), "rows")  # rank 0 has none
assert rows.dtype == np.float32 and rows.tolist() == [[1.0] * 4] + [[2.0] * 4] * 2
entries = np.arange(10_000).reshape(-1, 2)
received = world.broadcast((entries, "index") if rank == 1 else None, "index", root=1)
assert received[1] == "index" and np.array_equal(received[0], entries) and received[0].flags.writeable
assert world.broadcast(None, "nothing") is None
assert world.any(rank == 2, False) == [True, False]
assert world.workers_per_node() == 3
assert world.is_equal([2 ** 63 - 1, -2 ** 63], "most") and not world.is_equal([0, rank], "ranks")

hvd.allgather = hvd.allgather_object = None  # nothing is gathered from here on
world.agree({"rate": 0.1, "sizes": (1, None)}, "flags")
world.barrier()
with world.raise_on_all_ranks():
    pass
hvd.allgather = allgather

def problem(work):
    try:
        work()
    except UserError as error:
        assert error.on_all_ranks
        return str(error)

def work():
    with world.raise_on_all_ranks():
        if rank:
            raise OSError(f"a disk of {rank}")

def mistake():
    with world.raise_on_all_ranks():
        if rank == 2:
            {}["missing"]

if rank == 2:
    try:
        mistake()
    except KeyError as error:
        told = repr(error) == "KeyError('missing')" and "rank 2: KeyError: 'missing'"
else:
    told = problem(mistake)
print(told, problem(work), problem(lambda: world.agree({"a": 1, "b": 5 + rank // 2}, "flags")),
      problem(lambda: world.agree({"a": 1.0 if rank else 1}, "flags")), sep="; ")
world.barrier()
"""


@pytest.mark.parametrize("kind", ["mpirun", "horovodrun"])
def test_what_workers_exchange(kind):
    """Objects of all sizes, in several messages; texts and values only if they have to be seen."""
    done = run(kind, 3, "-c", EXCHANGED)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line.rpartition(">:")[2] for line in done.stdout.splitlines()]
    assert said == ["rank 2: KeyError: 'missing'; a disk of 1; flags: b is 5 on rank 0 and 6 on rank 2; None"] * 3


def test_gathering_takes_as_many_additions_as_there_are_workers(monkeypatch):
    """Horovod's own adds up the sizes of all ranks before it, for each rank."""
    import horovod.tensorflow as hvd
    from horovod.tensorflow import functions

    from distributed.world import World

    workers, additions = 1024, []

    class Size(int):
        def __add__(self, other):
            additions.append(1)
            return Size(int(self) + int(other))

        __radd__ = __add__

    def allgather(tensor, name, process_set=None):
        own = tensor.numpy()
        is_size = own.dtype != np.uint8
        found = np.array([Size(own[0])] * workers, object) if is_size else np.tile(own, workers)
        return SimpleNamespace(numpy=lambda: found)

    monkeypatch.setattr(hvd, "allgather", allgather)
    monkeypatch.setattr(functions, "allgather", allgather)
    monkeypatch.setattr(type(functions.global_process_set), "size", lambda self: workers)
    assert World(size=workers).gather({"step": 7}, "values") == [{"step": 7}] * workers
    assert 0 < len(additions) <= 2 * workers


def test_the_parts_of_an_index_of_a_billion_records():
    """16 bytes each; MPI counts the bytes of a message in 32 bits."""
    size = 16 * 10**9 + 1
    found = parts(size, LARGEST_MESSAGE)
    assert [one.start for one in found] == [0, *(one.stop for one in found[:-1])] and found[-1].stop == size
    assert all(0 < one.stop - one.start < 2**31 for one in found)
    assert parts(0, 8) == [] and parts(8, 8) == [slice(0, 8)] and parts(9, 8) == [slice(0, 8), slice(8, 9)]


TALK = """
from distributed import world
worker = world.start(0)
for number in range(100):
    assert worker.gather((worker.rank, number), "talk") == [(0, number), (1, number)]
print(*{line.split()[-1] for line in open("/proc/self/maps") if "sm_segment" in line})
"""


def test_jobs_of_the_same_name_do_not_share_memory():
    """As in two containers that share /dev/shm and the host's name. Both mpiruns are process 2, after the shell."""
    with tempfile.TemporaryDirectory(dir="/tmp") as one, tempfile.TemporaryDirectory(dir="/tmp") as two:
        words = ["timeout", "--signal=KILL", "60", *unshare("--pid", "--fork", "--kill-child", "--mount-proc"),
                 "sh", "-c", '"$@"; exit $?', "sh", *launcher("mpirun", 2), "-c", TALK]
        jobs = [subprocess.Popen(words, env=environment() | {"TMPDIR": folder}, cwd=ROOT, text=True,
                                 stdout=subprocess.PIPE) for folder in (one, two)]
        ours, theirs = ({*job.communicate()[0].split()} for job in jobs)
    assert [job.returncode for job in jobs] == [0, 0]
    assert len(ours) == len(theirs) == 2 and not ours & theirs
    assert {*map(os.path.basename, ours)} == {*map(os.path.basename, theirs)}  # in one folder, they would be the same
    assert not any(map(os.path.exists, ours | theirs))
