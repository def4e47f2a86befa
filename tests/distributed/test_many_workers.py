"""Many workers on this machine: 32 that train on four emulated hosts, and one of 1,024, whose costs are measured."""
import json
import subprocess
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from conftest import BIN, ROOT, emulated_hosts, environment, launcher, require_tool, rows, run, train, weights

from data.augmentation import AUGMENTATIONS
from data.dataset import Split
from data.feed import Feed
from data.synthetic import synthetic_dataset
from plan.grids import choose
from tests.rigs.hosts import WORKER
from tests.rigs.making import write_shards
from tests.rigs.trainings import newest_step, wait_for

SMALLEST = ("digits", "--model=convnet", "--image_size=8", "--augmentation=none", "--optimizer=sgd", "--warmup=none",
            "--learning_rate=0.02", "--batch_size=128", "--batch_norm_span=auto", "--checkpoint_every=0.5",
            "--deterministic")


@pytest.fixture(scope="module")
def hosts():
    with emulated_hosts("h1", "h2", "h3", "h4") as hosts:
        yield hosts


def launched(hosts, folder, *more) -> list[str]:
    return hosts.words("login", ROOT / "launch" / "horovodrun.sh", "--no-preflight", "-H", "h1:8,h2:8,h3:8,h4:8",
                       *SMALLEST, "--epochs=6", f"--output_dir={folder}", *more)


@pytest.mark.campaign
def test_32_workers_on_four_hosts_train_are_killed_and_resume(hosts):
    """To the bit, in a torus; the evaluation counts each of the 353 samples once, as one worker does."""
    words = launched(hosts, "killed", "--allreduce=torus")
    process = subprocess.Popen(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               stdin=subprocess.DEVNULL)
    folder = hosts.top / "h1" / "killed"
    wait_for(lambda: newest_step(folder) >= 20, process)
    hosts.run("h3", "pkill", "-KILL", "-o", "-f", WORKER).check_returncode()
    _, error = process.communicate(timeout=300)
    assert process.returncode == 1 and "was killed" in error, error[-2000:]
    deadline = time.monotonic() + 300  # forks do not end with their launcher, but when they miss the killed one
    while hosts.trainers():
        assert time.monotonic() < deadline, hosts.trainers()
        time.sleep(0.2)
    done = subprocess.run(words, text=True, capture_output=True, timeout=900, stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and "resumed after step" in done.stderr, done.stderr[-2000:]
    summary, plan = json.loads(done.stdout), json.loads((folder / "plan.json").read_text())
    assert summary["world_size"] == 32 and plan["exchange"]["grid"] == list(choose(32, 8))
    done = subprocess.run(launched(hosts, "whole", "--allreduce=torus"), text=True, capture_output=True, timeout=900,
                          stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr[-2000:]
    whole = hosts.top / "h1" / "whole"
    ours, theirs = weights(folder), weights(whole)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    assert [row["val_loss"] for row in rows(folder)] == [row["val_loss"] for row in rows(whole)]
    alone = train("--mode=evaluate", f"--checkpoint={folder}/checkpoints").stdout
    names = ("val_top1_count", "val_top5_count", "val_samples")
    assert [json.loads(alone)[name] for name in names] == [summary[name] for name in names]


def counted(folder: Path, workers: int, data_dir) -> list[dict]:
    """Numbers of file system calls that each worker of a short training makes on the dataset's files."""
    script = folder / "traced.sh"
    script.write_text('#!/bin/sh\nexec strace -f --seccomp-bpf -qq -e trace=%file '
                      f'-o {folder}/calls.$OMPI_COMM_WORLD_RANK "$@"\n')
    script.chmod(0o755)
    *mpirun, _ = launcher("mpirun", workers, cold=True)
    done = subprocess.run([*mpirun, script, BIN / "python", ROOT / "train.py", *SMALLEST[1:], "--epochs=1",
                           f"--batch_size={4 * workers}", f"--data_dir={data_dir}", f"--output_dir={folder}/run"],
                          env=environment(), cwd=ROOT, text=True, capture_output=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return [sum(str(data_dir) in line for line in open(f"{folder}/calls.{rank}")) for rank in range(workers)]


@pytest.mark.campaign
def test_calls_of_a_worker_do_not_grow_with_shards_times_workers(digit_records, tmp_path):
    """Rank 0 reads the indexes; the others open what they read, a file at each of 22 updates, and dataset.json."""
    require_tool("strace")
    found = {}
    for shards in (8, 64):
        data = tmp_path / f"data{shards}"
        data.mkdir()
        cuts = [1437 * number // shards for number in range(shards + 1)]
        write_shards("tfrecord", digit_records, data, {"train": cuts, "validation": (0, 353)})
        (tmp_path / str(shards)).mkdir()
        found[shards] = counted(tmp_path / str(shards), 16, data)
    few, many = (np.array(one) for one in found.values())
    print(found)
    assert many[0] >= 2 * 64 > few[0]  # rank 0 looks at each shard and its index
    assert many[1:].max() < 64 and many[1:].max() - few[1:].max() < 20, found


def prepared(workers: int, rank: int):
    """What a worker reads of one step of 64 samples each, and the largest memory on the way, in MB."""
    train = Split("tfrecord", tuple(Path(str(number)) for number in range(1024)), (1251,) * 1024)
    dataset = synthetic_dataset("synthetic:1281024")
    feed = Feed(type(dataset)(**vars(dataset) | {"train": train}), 224, AUGMENTATIONS["crop_flip"], 0, rank, workers)
    tracemalloc.start()
    found = feed.prepare([(0, 10)], 64 * workers, 64)
    most = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return found, most


def test_one_of_1024_workers_prepares_no_more_than_one_of_8():
    """Ten steps of the same micro-batch; what is left over is one epoch's permutation."""
    small, little = prepared(8, 3)
    large, much = prepared(1024, 777)
    assert len(large.samples) == len(small.samples) == 640 and large.numbers.shape == small.numbers.shape
    assert much < 2 * little and much < 120
    parts = np.concatenate([prepared(1024, rank)[0].samples for rank in (0, 1, 511, 1023)])
    assert len(set(parts.tolist())) == 4 * 640


BEATS = """
import json, resource, socket, sys, threading, time
from distributed import heartbeat
from distributed.world import World

class Alone(World):
    def broadcast(self, value, name, root=0):
        return value

ended, workers = [], int(sys.argv[1])
beat = heartbeat.Heartbeat(Alone(size=workers), ended.append)
port = beat._meeting.port
word = {"host": "h", "pid": 1, "step": 9, "does": "computing", "seconds": 0.5}
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    thread, began = beat._thread.native_id, time.monotonic()
    for second in range(5):
        for rank in range(1, workers):
            signed = heartbeat.signed(beat._meeting.key, json.dumps(word | {"rank": rank}).encode())
            sender.sendto(signed, ("127.0.0.1", port))
            if rank % 64 == 0:
                time.sleep(0.01)
        time.sleep(max(0, began + second + 1 - time.monotonic()))
    with open(f"/proc/self/task/{thread}/stat") as stat:
        ticks = sum(map(int, stat.read().rpartition(")")[2].split()[11:13]))
    print(json.dumps([len(beat._heard), ticks / 100 / 5, ended]))
beat.stop()
"""


def test_the_heartbeat_of_1024_workers_takes_rank_0_little():
    """Rank 0 hears all of them, and answers."""
    done = run("python", 1, "-c", BEATS, 1024)
    assert done.returncode == 0, done.stderr[-2000:]
    heard, seconds, ended = json.loads(done.stdout)
    assert heard == 1023 and ended == []
    assert seconds < 0.5  # of a core; docs/cluster.md has the figure
