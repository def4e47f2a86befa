"""How many cores a worker may use: those that it is bound to, but no more than its container's CPU quota is worth."""
import contextlib
import math
import os
from pathlib import Path

QUOTAS = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}  # version of control groups -> files


def cores_of_worker(workers: int) -> int:
    """Returns the number of cores of one of a node's workers, at least 1.

    A worker that is not bound has its share of all cores. All workers of a node share a quota, bound or not.
    """
    own = len(os.sched_getaffinity(0))
    return max(1, min(own // workers if own == os.cpu_count() else own, cores_of_quota(workers)))


def cores_of_quota(workers: int, groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
                   ) -> int:
    """Returns a worker's share of this process's CPU quota, rounded up, at least 1. Without a quota: all cores.

    groups, mounted: the process's control groups as Linux lists them, and their folders, of version 1, 2 or both. The
    quotas of a group's ancestors count, too. In a container, the root of the folders may be its own group, although the
    list says otherwise, and a path may begin with /.. there.
    """
    limits = []
    for line in os.fsdecode(groups.read_bytes()).splitlines() if groups.is_file() else ():
        _, controllers, path = line.split(":", 2)
        parts = [part for part in path.split("/") if part and part != ".."]
        roots = (controllers, "cpu") if "cpu" in controllers.split(",") else () if controllers else ("", "unified")
        for folder in (mounted.joinpath(root, *parts[:depth]) for root in roots for depth in range(len(parts) + 1)):
            with contextlib.suppress(OSError, ValueError):  # there is no such file, or it says `max`
                texts = [(folder / name).read_text() for name in QUOTAS[1 if controllers else 2]]
                quota, period = map(int, " ".join(texts).split())
                limits += [math.ceil(quota / period)] if quota > 0 else []  # -1: none
    return max(1, min(limits) // workers) if limits else os.cpu_count()
