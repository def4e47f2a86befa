"""Checks whether these hosts can train together. Prints a table with one line per host and marks what differs.

    uv run python -m launch.preflight [train.py's flags]                      this host alone
    uv run mpirun -np 16 --host h1:8,h2:8 python -m launch.preflight ...      all hosts, under any launcher

Each problem that would break a run gets a line with its fix. The exit code is 1 if there are any. The launch scripts
run this first.
"""
import contextlib
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from common import command, launcher
from common.errors import plural
from distributed import gpus
from distributed.lost import explain_horovods_errors
from launch import facts
from launch.binding import workers_per_gpu
from plan import flags
from plan.settings import Settings

LIMIT = 30.0  # seconds for everything but loading TensorFlow
GPU_LIMIT = 180.0  # seconds with GPUs: CUDA starts and compiles TensorFlow's PTX, and NCCL creates three communicators
WORKER_LIMIT = 0.5  # more seconds per worker: a shared disk serves 34,000 calls of each, the last one's at the end
DRIVER = 525  # the oldest driver for CUDA 12
COMPILING_DRIVER = 535  # the oldest that compiles CUDA 12.2's PTX: TensorFlow 2.15 has little else for newer GPUs
COMPILED = 7.5  # highest compute capability for which most of TensorFlow's kernels are compiled
SUPPORTED = 9.0  # highest compute capability
DISK = 1.0  # minimum free space in GB; a checkpoint of ResNet-50 with its momentum takes 0.2
SHARED_MEMORY = 0.25  # minimum in GB; NCCL and Open MPI use some MB per worker; a container has 0.064 by default
PINNED = 1.0  # minimum of pinnable memory in GB for RDMA; systems that were not set up for it have 0.00007 or 0.008
CLOCK = 1.0  # largest difference from rank 0's clock in seconds

COLUMNS = {
    "host": lambda f: f["host"], "workers": lambda f: f["slots"], "GPUs": lambda f: len(f["gpus"]),
    "GPU": lambda f: f["gpus"][0] if f["gpus"] else "-", "driver": lambda f: f["driver"] or "-",
    "Python": lambda f: f["python"], "TensorFlow": lambda f: f["tensorflow"],
    "Horovod": lambda f: " ".join([f["horovod"], *f.get("built", [])]), "DALI": lambda f: f["dali"],
    "bigbatch": lambda f: f["source"], "dataset": lambda f: f["dataset"],
    "InfiniBand": lambda f: f["infiniband"],
    "output": lambda f: f.get("shared", "writable") if f["output"] else "not writable",
    "disk GB": lambda f: f"{f['disk']:.0f}", "shm GB": lambda f: f"{f['shared_memory']:.1f}",
    "clock s": lambda f: f"{f['clock']:+.1f}" if "clock" in f else "-",
    "GB/s in host": lambda f: f"{f['within']:.2f}" if f.get("within") else "-",
    "GB/s between": lambda f: f"{f['between']:.2f}" if f.get("between") else "-",
}
SAME = ("workers", "GPUs", "GPU", "driver", "Python", "TensorFlow", "Horovod", "DALI", "bigbatch", "dataset",
        "InfiniBand", "output")
SYNC = "run 'uv sync' there, with --extra gpu if the host has GPUs"
CURES = {"Python": "use the same .venv", "TensorFlow": SYNC, "Horovod": SYNC, "DALI": SYNC,
         "bigbatch": "update the checkout or the image there",
         "dataset": "--data_dir must point to the same dataset", "driver": "install the same driver"}


def usual(hosts: list[dict]) -> dict[str, str]:
    """Returns the most frequent value of each column that should be the same on all hosts."""
    return {column: Counter(str(COLUMNS[column](host)) for host in hosts).most_common(1)[0][0] for column in SAME}


def table(hosts: list[dict]) -> str:
    """Formats one line per host. * marks values that differ from most others, and a clock that is off."""
    expected = usual(hosts)
    rows = []
    for host in hosts:
        row = {column: str(read(host)) for column, read in COLUMNS.items()}
        differs = {column for column in SAME if row[column] != expected[column]}
        if abs(host.get("clock", 0)) > CLOCK:
            differs.add("clock s")
        rows.append({column: f"{text}*" if column in differs else text for column, text in row.items()})
    return "\n".join(command.table(rows))


def problems(hosts: list[dict], data_dir: str, per_gpu: int = 1) -> list[str]:
    """Returns one line per problem that would break a run, with its fix. per_gpu: workers that may share a GPU."""
    expected = usual(hosts) if hosts else {}
    any_gpu = any(host["gpus"] for host in hosts)
    lines = []
    for host in hosts:
        gpus = len(host["gpus"])
        clock = host.get("clock", 0.0)
        checks = (
            (any_gpu and gpus * per_gpu < host["slots"], f"{gpus} GPUs for {plural(host['slots'], 'worker')}; "
             f"start {gpus * per_gpu} there, or look for missing GPUs with nvidia-smi"),
            (gpus < host.get("granted", 0), f"{gpus} GPUs, but Slurm has granted {host.get('granted')}; run nvidia-smi "
             "there"),
            (not host["output"], "the output folder is not writable; choose another --output_dir"),
            (host["disk"] < DISK, f"{host['disk']:.2f} GB free for --output_dir, less than {DISK:.0f}; free disk "
             "space"),
            (host["shared_memory"] < SHARED_MEMORY, f"{host['shared_memory']:.2f} GB free in /dev/shm, less than "
             f"{SHARED_MEMORY}; start the container with --ipc=host or --shm-size=1g; in a pod, mount an emptyDir of "
             "medium Memory"),
            (abs(clock) > CLOCK, f"the clock differs by {clock:+.1f} s from that of {hosts[0]['host']}; synchronize "
             "both with chrony or NTP"),
        )
        wrong = [*differences(host, expected, data_dir), *gpu_problems(host), *(text for bad, text in checks if bad)]
        if any_gpu and len(hosts) > 1:
            wrong += rdma_problems(host, expected["InfiniBand"])
        lines += [f"{host['host']}: {problem}" for problem in wrong]
    return lines


def differences(host: dict, expected: dict[str, str], data_dir: str) -> list[str]:
    """Returns what this host lacks, or has in another version than most. expected: as `usual` returns it."""
    lines = []
    for column, cure in CURES.items():
        value = str(COLUMNS[column](host))
        if value == "empty":
            lines.append(f"the folder {data_dir} is empty; mount the dataset there")
        elif value == "missing":
            what = f"there is no dataset in {data_dir}" if column == "dataset" else f"{column} is not installed"
            lines.append(f"{what}; {cure}")
        elif value != expected[column]:
            lines.append(f"{column} is {value}, but {expected[column]} elsewhere; {cure}")
    return lines


def rdma_problems(host: dict, usual_state: str) -> list[str]:
    """Returns what keeps NCCL from using this host's InfiniBand. usual_state: the state of most hosts' InfiniBand."""
    state = host["infiniband"]
    pinnable = host["pinnable"]
    if state == "missing":
        return ["/dev/infiniband is missing; give the container its devices (docker run --device=/dev/infiniband; with "
                "Enroot or Pyxis, MELLANOX_VISIBLE_DEVICES=all in the job's environment; with Apptainer, "
                "APPTAINER_BIND=/dev/infiniband; in Kubernetes, a device plugin's resource), or set NCCL_IB_DISABLE=1 "
                "to train over TCP"]
    if state != usual_state and state == "none":
        return ["no InfiniBand, which other hosts have; run ibstat there, or set NCCL_IB_DISABLE=1 to train over TCP"]
    if state == "usable" and pinnable is not None and pinnable < PINNED:
        return [f"a process may lock {pinnable * 1e3:g} MB of memory, too little for RDMA; set memlock to unlimited: "
                "in limits.conf, docker run --ulimit memlock=-1, or LimitMEMLOCK of Kubernetes' containerd"]
    return []


def gpu_problems(host: dict) -> list[str]:
    """Returns the problems of TensorFlow 2.15, built for CUDA 12.2, with this host's GPUs and their driver."""
    if failed := host.get("gpu_failure"):
        return [f"{failed}; {gpus.MEND}"]
    if not host["gpus"]:
        return []
    driver = host["driver"].partition(".")[0]
    capability = host["capability"]
    if capability > SUPPORTED:
        return [f"TensorFlow 2.15 does not support the GPU {host['gpus'][0]} (compute capability {capability}); the "
                f"newest that it supports are H100 and H200 ({SUPPORTED})"]
    oldest = COMPILING_DRIVER if capability > COMPILED else DRIVER
    if driver.isdecimal() and int(driver) < oldest:
        return [f"driver {host['driver']} is too old for the GPU {host['gpus'][0]}; install {oldest} or newer"]
    return []


def notes(hosts: list[dict]) -> list[str]:
    """Returns notes on what does not break a run, but limits how it can be resumed."""
    own = any(host.get("shared") == "not shared" for host in hosts)
    return ["the hosts do not share the output folder: a run can only resume on the same first host"] if own else []


def report(hosts: list[dict], wrong: list[str], stream) -> int:
    """Prints the table and a success to `stream`, problems and notes to standard error; returns the exit code."""
    if hosts:
        print(table(hosts), file=stream)
    for line in wrong:
        print(f"preflight: {line}", file=sys.stderr)
    for line in notes(hosts):
        print(f"preflight: note: {line}", file=sys.stderr)
    if not wrong:
        print("all checks passed", file=stream)
    sys.stderr.flush()
    return 1 if wrong else 0


def examine(settings: Settings) -> tuple[list[dict], list[str]]:
    """Starts Horovod and tests its all-reduce. Returns (the facts of every host, the problems) on every worker.

    All workers have to call it at once.
    """
    from distributed import probe
    from distributed.world import check_gpus

    device = settings.launch.device
    world = probe.start_for_probing(settings.recipe.seed, device)
    check_gpus(world, settings.launch.device_policy)
    data_dir = settings.recipe.data_dir
    output_dir = settings.run.output_dir
    mine = None
    if world.local_rank == 0:
        mine = facts.gather(data_dir, output_dir, device) | {"slots": world.local_size, "built": probe.built()}
    everyone = world.gather((world.rank, mine, os.uname().nodename, gpus.visible(device)), "facts")
    clocks = clock_offsets(world)
    shared = seen_by_all(world, Path(output_dir or "runs").absolute())
    names = [name for _, _, name, _ in everyone]
    speeds = probe.speeds(world, [[rank for rank, other in enumerate(names) if other == name]
                                  for name in dict.fromkeys(names)])
    # Each task of a Slurm job may see only one GPU, so the GPUs of a host are those of all its workers.
    by_host = {name: {gpu.uuid: gpu for _, _, other, visible in everyone if other == name for gpu in visible}
               for name in dict.fromkeys(names)}
    hosts = [host | facts.of_gpus([*by_host[name].values()]) | {
        "clock": clocks[rank], "shared": "shared" if shared[rank] else "not shared",
        "within": speeds[rank][1], "between": speeds[rank][2]} for rank, host, name, _ in everyone if host]
    wrong = problems(hosts, data_dir, workers_per_gpu())
    if failed := [str(rank) for rank, (right, *_) in enumerate(speeds) if not right]:
        wrong.append(f"the sum over all workers is wrong on rank {', '.join(failed)}; check the network cards of its "
                     "host, and NCCL with NCCL_DEBUG=INFO")
    return hosts, wrong


def clock_offsets(world) -> list[float]:
    """Returns the difference of each rank's clock from rank 0's in seconds.

    It is the smallest of three, because a rank that reads its clock late makes the difference larger.
    """
    rounds = [world.gather(time.time(), f"clocks {number}") for number in range(3)]
    return [min((now[rank] - now[0] for now in rounds), key=abs) for rank in range(world.size)]


def seen_by_all(world, folder: Path) -> list[bool]:
    """Returns for each rank whether it sees in this folder what rank 0 has just written there."""
    made = not folder.exists()
    mark = None
    if world.rank == 0:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            mark = Path(tempfile.mkdtemp(prefix=".preflight-", dir=folder))
    mark = world.broadcast(mark, "mark")
    seen = world.gather(bool(mark and mark.exists()), "seen")
    if mark and world.rank == 0:
        mark.rmdir()
        if made and not any(folder.iterdir()):
            folder.rmdir()
    return seen


@command.program("preflight", __doc__)
@explain_horovods_errors()
def main(argv) -> int:
    """Runs a command line; returns the exit code."""
    settings = flags.parse(argv)
    from distributed.world import World  # imported before the timer starts: Horovod takes seconds to load

    limit = time_limit(launcher.launched().size, bool(gpus.visible(settings.launch.device)))
    watch = threading.Timer(limit, _end, [limit])
    watch.daemon = True
    watch.start()
    hosts, wrong = examine(settings)
    if launcher.launched().rank == 0:
        report(hosts, wrong, sys.stdout)
        sys.stdout.flush()
    World().renumbered().barrier()
    watch.cancel()
    return int(bool(wrong))


def time_limit(workers: int, has_gpus: bool) -> float:
    """Returns the seconds that the workers have for everything but loading TensorFlow."""
    return (GPU_LIMIT if has_gpus else LIMIT) + WORKER_LIMIT * workers


def _end(limit: float):
    print(f"preflight: the workers have not connected within {limit:.0f} s; if they start slowly from a shared disk, "
          "install the environment on local disks or use --no-preflight; else check for a firewall, and select the "
          "network interface that they share (horovodrun --network-interfaces, NCCL_SOCKET_IFNAME)",
          file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
