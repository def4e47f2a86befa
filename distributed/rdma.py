"""RDMA network cards: whether NCCL would use InfiniBand on this host, and whether it can.

This module needs neither TensorFlow nor NCCL. A container sees the cards of its host in /sys, but not their devices.
"""
import os
import resource
from pathlib import Path

from common.open_mpi import CARDS

DEVICES = Path("/dev/infiniband")
IPC_LOCK = 14  # the number of the capability CAP_IPC_LOCK: a process that has it may pin any amount of memory


def infiniband() -> str:
    """Returns "usable", "missing" if InfiniBand is expected here but has no device, or "none".

    It is expected if a card is linked to InfiniBand, or if NCCL's variables ask for it. NCCL_IB_DISABLE=1 means "none".
    """
    linked = any(path.read_text().strip() == "InfiniBand" for path in CARDS.glob("*/ports/*/link_layer"))
    asked = os.environ.get("NCCL_NET") == "IB" or "NCCL_IB_HCA" in os.environ
    if os.environ.get("NCCL_IB_DISABLE") == "1" or not (linked or asked):
        return "none"
    return "usable" if any(DEVICES.glob("uverbs*")) else "missing"


def pinnable() -> float | None:
    """Returns how much memory a process may pin, in GB (10^9 bytes), or None if it is unlimited."""
    capabilities = Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0]
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = limit == resource.RLIM_INFINITY or int(capabilities, 16) >> IPC_LOCK & 1
    return None if unlimited else limit / 1e9
