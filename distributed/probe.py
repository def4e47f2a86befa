"""Probes Horovod on these workers: its build and the speed of its all-reduce."""
import os
import time

import horovod.tensorflow as hvd
import tensorflow as tf

from distributed.world import World, start

ELEMENTS = 6_553_600  # float32, 26 MB; ResNet-50's gradients have 102 MB
ROUNDS = 5


def start_for_probing(seed: int, device: str) -> World:
    """Starts Horovod with dynamic process sets, because the ranks of each host are known only later. Raises UserError.

    device: as in distributed.world.start.
    """
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    return start(seed, device=device)


def built() -> list[str]:
    """Returns the communication libraries that Horovod is built with."""
    return [name for name, there in (("NCCL", hvd.nccl_built()), ("MPI", hvd.mpi_built()), ("Gloo", hvd.gloo_built()))
            if there]


def speeds(world: World, hosts: list[list[int]]) -> list[tuple[bool, float, float]]:
    """Returns (whether a sum over all workers is right, GB/s within its host, GB/s between hosts) of each rank.

    hosts: the ranks of each host. GB/s is the bus bandwidth of all-reduces as in NCCL's tests: 2 (n - 1) / n of the
    bytes, divided by the time. It is 0 for a single rank, and between hosts for all but the first rank of a host.
    """
    rank = world.rank
    size = world.size
    firsts = [ranks[0] for ranks in hosts]
    sets = {tuple(ranks): hvd.add_process_set(ranks) for ranks in (*hosts, firsts) if 1 < len(ranks) < size}
    total = hvd.allreduce(tf.fill([ELEMENTS], float(rank + 1)), op=hvd.Sum, name="sum")
    right = bool(tf.reduce_all(total == size * (size + 1) / 2))

    def speed(ranks, name):
        if len(ranks) < 2 or rank not in ranks:
            return 0.0
        options = {"process_set": sets[tuple(ranks)]} if tuple(ranks) in sets else {}
        values, times = tf.ones([ELEMENTS]), []
        for turn in range(ROUNDS):
            began = time.perf_counter()
            hvd.allreduce(values, op=hvd.Sum, name=f"{name}.{turn}", **options).numpy()
            times.append(time.perf_counter() - began)
        return 2 * (len(ranks) - 1) / len(ranks) * 4 * ELEMENTS / min(times) / 1e9

    within = speed(next(ranks for ranks in hosts if rank in ranks), "within")
    world.barrier()
    return world.gather((right, within, speed(firsts, "between")), "speeds")
