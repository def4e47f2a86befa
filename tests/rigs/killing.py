"""Kills one of four workers in the middle of an exchange, many times; prints how the others ended, and when, as JSON.

python -m tests.rigs.killing TRIALS: workers are forks, so that TensorFlow is imported once. 0: Horovod's error.
"""
import json
import os
import random
import signal
import sys
import time

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer

from distributed import connections
from distributed.lost import is_lost
from distributed.world import set_horovods_variables

WORKERS = 4
SIZES = (65536, 432, 16, 9216, 40000, 32, 18432, 64)


def exchange(rank: int, port: int, ready: int) -> int:
    """What one worker does: it exchanges until another one is lost. Returns its exit code."""
    os.environ |= {f"HOROVOD_{name}": str(value) for name, value in {
        "RANK": rank, "SIZE": WORKERS, "LOCAL_RANK": rank, "LOCAL_SIZE": WORKERS, "CROSS_RANK": 0, "CROSS_SIZE": 1,
        "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo", "GLOO_IFACE": "lo", "HOSTNAME": "localhost", "ELASTIC": 1,
        "GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "GLOO_RENDEZVOUS_PORT": port}.items()}
    set_horovods_variables(False, None, None, nccl=False)
    os.environ.pop("HOROVOD_ELASTIC")  # this launcher is not
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    with connections.noted():
        hvd.init()
    tensors = [tf.zeros([size]) for size in SIZES]

    @tf.function
    def step():
        return [hvd.grouped_allreduce(tensors[first:first + 2], op=hvd.Sum, name=f"bucket{first}")
                for first in range(0, len(SIZES), 2)]

    try:
        with connections.watched():
            for count in range(10**6):
                step()
                if count == 5:
                    os.write(ready, b".")
    except tf.errors.OpError as error:
        hvd.shutdown()
        return 0 if is_lost(error) else 1
    return 2


def trial() -> tuple[list[int], float]:
    """Returns how the workers that were not killed ended, as os.waitstatus_to_exitcode has it, and after how long."""
    server = RendezvousServer(0)
    port = server.start()
    server.init(get_host_assignments(parse_hosts(f"localhost:{WORKERS}"), WORKERS))
    reads, writes = os.pipe()
    workers = []
    for rank in range(WORKERS):
        if not (worker := os.fork()):
            code = 3
            try:
                code = exchange(rank, port, writes)
            finally:
                os._exit(code)
        workers.append(worker)
    for _ in workers:
        os.read(reads, 1)
    time.sleep(random.random() / 5)
    victim = workers.pop(random.randrange(WORKERS))
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    codes = [os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) for worker in workers]
    seconds = time.monotonic() - killed
    server.stop()
    os.close(reads), os.close(writes)
    return codes, seconds


if __name__ == "__main__":
    print(json.dumps([trial() for _ in range(int(sys.argv[1]))]))
