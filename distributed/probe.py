"""What Horovod can do between these workers: what it is built with, and how fast it sums."""
import os
import time

import horovod.tensorflow as hvd
import tensorflow as tf

from distributed.world import World, check_gpus, start

ELEMENTS = 6_553_600  # float32, 26 MB: the gradients of ResNet-50 are 102
ROUNDS = 5


def start_for_probing(seed: int, device: str, devices: str) -> World:
    """Starts Horovod so that process sets can be made later, of workers that are known only then. Raises UserError.

    device: as distributed.world.start takes it; devices: as distributed.gpus.check.
    """
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    world = start(seed, device=device)
    check_gpus(world, devices)
    return world


def built() -> list[str]:
    """What Horovod can exchange with here."""
    return [name for name, there in (("NCCL", hvd.nccl_built()), ("MPI", hvd.mpi_built()), ("Gloo", hvd.gloo_built()))
            if there]


def speeds(world: World, hosts: list[list[int]]) -> list[tuple[bool, float, float]]:
    """For each rank: whether a sum over all workers was right; GB/s of all-reduces within its host and between hosts.

    hosts: the ranks of each. GB/s as NCCL's tests count the bus, 2 (n - 1) / n of the bytes over the time; 0 where
    there is one rank alone.
    """
    rank, size, firsts = world.rank, world.size, [ranks[0] for ranks in hosts]
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
