"""Exchanges values between the workers of a node before Horovod starts, over a socket that leaves no file behind."""
import json
import os
import socket
import time

from distributed.launcher import Launched

PATIENCE = 20.0  # seconds to wait until all workers of a node have started
JOBS = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID", "HOROVOD_GLOO_RENDEZVOUS_ADDR",
        "HOROVOD_GLOO_RENDEZVOUS_PORT")  # environment variables that distinguish the jobs on a node


def gather(value, worker: Launched) -> list | None:
    """Returns the list of all local ranks' values, in rank order, on each of them; None if they cannot connect.

    value: JSON-serializable. Each local rank has to call it.
    """
    if worker.local_size == 1:
        return [value]
    job = [os.environ[name] for name in JOBS if name in os.environ]
    address = "\0" + "-".join(["bigbatch", str(os.getuid()), os.uname().nodename, *job])  # abstract: no file
    meet = _serve if worker.local_rank == 0 else _ask
    try:
        return meet(address, value, worker, time.monotonic() + PATIENCE) if job else None
    except (OSError, ValueError):
        return None


def _serve(address, value, worker, deadline):
    values, others = {0: value}, []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(worker.local_size)
        while len(values) < worker.local_size:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            other = server.accept()[0].makefile("rw")
            others.append(other)
            rank, values[rank] = json.loads(other.readline())
    everyone = [values[rank] for rank in range(worker.local_size)]
    for other in others:
        with other:
            print(json.dumps(everyone), file=other)
    return everyone


def _ask(address, value, worker, deadline):
    with socket.socket(socket.AF_UNIX) as client:
        while client.connect_ex(address):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)
        client.settimeout(max(deadline - time.monotonic(), 0.01))
        with client.makefile("rw") as stream:
            print(json.dumps([worker.local_rank, value]), file=stream, flush=True)
            return json.loads(stream.readline())
