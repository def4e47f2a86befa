"""The processors of the workers. The same work has the same bits on equal processors only.

oneDNN and XLA choose their kernels by the instructions of the processor, and with AVX2, oneDNN's sums also depend on
the number of threads.
"""
import os
import socket

import tensorflow as tf

from common import processor
from common.errors import listed
from distributed import gpus
from distributed.world import World

INSTRUCTIONS = ("avx", "fma", "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve")
CHOOSING = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "TF_ENABLE_ONEDNN_OPTS")  # variables that choose the kernels
MOST_NAMED = 4  # hosts with the same processor, and different processors, in a message


def described(world: World) -> str:
    """Returns what the bits of this worker's results depend on: its GPU, or its processor and how that is used."""
    if world.gpu is not None:
        return getattr(gpus.own(world.local_rank), "name", "a GPU")
    known, threads = processor.instructions(), tf.config.threading.get_intra_op_parallelism_threads()
    return " ".join([processor.name(), *(word for word in INSTRUCTIONS if word in known),
                     *(f"{word}={os.environ[word]}" for word in CHOOSING if word in os.environ), f"threads={threads}"])


def differing(world: World) -> str | None:
    """Returns the hosts and their processors if the workers have different ones, otherwise None.

    Collective: every rank must call it. Names are exchanged only if they differ.
    """
    own = described(world)
    if world.has_same(own, "processors are the same"):
        return None
    hosts = {}
    for host, theirs in world.gather((socket.gethostname(), own), "processors"):
        hosts.setdefault(theirs, {})[host] = None
    return listed([f"{listed([*found], MOST_NAMED, what='hosts')}: {theirs}" for theirs, found in hosts.items()],
                  MOST_NAMED, "; ", "processors")
