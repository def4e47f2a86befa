"""The world: rank, size and device of this worker, and the collectives outside the gradient exchange.

A world of one worker (`World()`) works without Horovod having started.
"""
import contextlib
import dataclasses
import hashlib
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HostsUpdatedInterrupt

from common import launcher, open_mpi
from common.activity import OTHERS, activity
from common.cores import cores_of_worker
from common.errors import Stopped, UserError, one_line, reason
from distributed import connections, gpus
from distributed.lost import is_lost

HOST = "/cpu:0"  # device for exchanging objects: NCCL gains nothing there, and fails if workers share a GPU
SPARED = 3  # GiB of a GPU that TensorFlow leaves to CUDA, NCCL and DALI, whose validation pipeline opens later
LARGEST_MESSAGE = 1 << 30  # bytes of a broadcast: MPI counts them in 32 bits


@dataclass(frozen=True)
class World:
    """This worker and its collectives: every rank must call them, in the same order and with the same `name`."""

    rank: int = 0
    size: int = 1  # number of workers
    local_rank: int = 0  # on this node
    local_size: int = 1  # number of workers on this node
    gpu: int | None = None  # CUDA index of this worker's GPU
    cores: int = 1  # CPU cores of this worker

    def gather(self, value, name: str) -> list:
        """Returns the values of all ranks, by rank. A value can be any object that pickle supports."""
        if self.size == 1:
            return [value]
        own = pickled(value)
        sizes = self.concatenate(np.array([len(own)]), f"{name}.sizes")
        data = self.concatenate(own, name)
        ends = np.cumsum(sizes)
        return [pickle.loads(data[end - size:end]) for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]

    def concatenate(self, rows: np.ndarray, name: str) -> np.ndarray:
        """Returns the rows of all ranks, by rank. Ranks may have different numbers of rows, of the same shape."""
        if self.size == 1:
            return rows
        with waiting():
            return hvd.allgather(tf.constant(rows), name=name).numpy()

    def broadcast(self, value, name: str, root: int = 0):
        """Returns the value of rank root. It can be any object that pickle supports, and larger than 2 GB."""
        if self.size == 1:
            return value
        data, is_root = pickled(value) if self.rank == root else b"", self.rank == root
        with waiting():
            size = int(hvd.broadcast(tf.constant(len(data), tf.int64), root, name=f"{name}.size"))
            data = data if is_root else np.empty(size, np.uint8)
            for part in parts(size, LARGEST_MESSAGE):
                sent = hvd.broadcast(tf.constant(data[part]), root, name=f"{name}.{part.start}")
                if not is_root:
                    data[part] = sent.numpy()
        return value if is_root else pickle.loads(data)

    def broadcast_variables(self, variables: Sequence[tf.Variable], root: int = 0) -> None:
        """Copies rank root's values to every worker in one graph, without the AutoGraph of hvd.broadcast_variables."""
        @tf.function(autograph=False)
        def broadcast():
            for number, variable in enumerate(variables):
                variable.assign(hvd.broadcast(variable, root, name=f"variable_{number}"))

        if self.size > 1:
            with activity.during(OTHERS):
                broadcast()

    def sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the sum over the workers."""
        return tensor if self.size == 1 else hvd.allreduce(tensor, op=hvd.Sum, name=name)

    def any(self, *flags: bool, name: str = "any") -> list[bool]:
        """Returns whether each flag is set on any worker."""
        if self.size == 1:
            return list(flags)
        with waiting():
            return (self.sum(tf.constant(flags, tf.float32), name) > 0).numpy().tolist()

    def is_equal(self, numbers: Sequence[int], name: str) -> bool:
        """Whether all workers have the same numbers, each of 64 bits with a sign, by one all-reduce."""
        own = np.array(numbers, np.int64)
        own = np.concatenate([own, ~own])  # their maximum is the complement of the numbers' minimum
        with waiting():
            return self.size == 1 or np.array_equal(hvd.allreduce(tf.constant(own), op=hvd.Max, name=name), own)

    def has_same(self, text: str, name: str) -> bool:
        """Whether all workers have the same text, by one all-reduce of its digest."""
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return self.is_equal([int.from_bytes(digest, "big", signed=True)], name)

    def barrier(self) -> None:
        """Waits until every rank has called it. Needed before exit, because mpirun kills all ranks when one exits."""
        self.any(False, name="barrier")  # Horovod for TensorFlow has no barrier

    @contextlib.contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Raises an error from any rank on all ranks, as UserError. Texts are exchanged only if there is one.

        A rank with an unexpected error, such as KeyError, raises that error itself, with its traceback. Three errors
        pass unchanged: Stopped, which all ranks raise, that of a lost worker, and elastic's HostsUpdatedInterrupt.
        """
        problem = bug = None
        try:
            yield
        except (Stopped, HostsUpdatedInterrupt):
            raise
        except (UserError, OSError) as error:
            problem = one_line(error)
        except Exception as error:
            if is_lost(error):
                raise
            if isinstance(error, tf.errors.OpError):
                problem = reason(error)
            else:
                problem, bug = f"rank {self.rank}: {type(error).__name__}: {one_line(error)}", error
        if self.any(problem is not None, name="is problem")[0]:
            first = next(text for text in self.gather(problem, "problems") if text is not None)
            raise bug or UserError(first, on_all_ranks=True)

    def agree(self, values: dict, problem: str) -> None:
        """Raises UserError on all ranks unless all have the same values. `problem` is the start of its message.

        Values are exchanged only if their representations differ.
        """
        if self.has_same(repr(sorted(values.items())), f"{problem}.digest"):
            return
        everyone = self.gather(values, problem)
        for rank, theirs in enumerate(everyone):
            for name, value in everyone[0].items():
                if theirs[name] != value:
                    raise UserError(f"{problem}: {name} is {value} on rank 0 and {theirs[name]} on rank {rank}",
                                    on_all_ranks=True)

    def renumbered(self) -> "World":
        """Returns the world with Horovod's current ranks and sizes, after workers have left or joined."""
        return dataclasses.replace(self, rank=hvd.rank(), size=hvd.size(), local_rank=hvd.local_rank(),
                                   local_size=hvd.local_size())

    def workers_per_node(self) -> int:
        """Returns the number of workers per node, or 1 if nodes have different numbers."""
        return self.local_size if self.is_equal([self.local_size], "local sizes") else 1


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Context manager for a collective, which blocks until all ranks arrive. Its data stays in host memory."""
    with tf.device(HOST), activity.during(OTHERS):
        yield


def pickled(value) -> np.ndarray:
    """Returns the bytes of a pickled value, uint8."""
    return np.frombuffer(pickle.dumps(value, pickle.HIGHEST_PROTOCOL), np.uint8)


def parts(size: int, largest: int) -> list[slice]:
    """Returns the slices of at most `largest` bytes that cover so many bytes."""
    return [slice(start, min(start + largest, size)) for start in range(0, size, largest)]


def start(seed: int, deterministic: bool = False, process_sets=None, fusion_mb: float | None = None,
          timeline: str | None = None, device: str = "auto", threads: int | None = None) -> World:
    """Starts Horovod, assigns a GPU and cores to this worker, and seeds Keras. Raises UserError.

    deterministic: run the same operations in the same order, even if they are slower. process_sets: created when
    Horovod starts. fusion_mb: size of Horovod's own buffer. timeline: file for Horovod's timeline. device: "cpu" hides
    all GPUs from TensorFlow. threads: number of threads of an operation on the CPU, on which the order of its sums
    depends. Default: one for each core of this worker.
    """
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    set_horovods_variables(deterministic, fusion_mb, timeline, has_nccl(device))
    _init(process_sets)
    expected = launcher.launched().size
    if hvd.size() != expected and launcher.ELASTIC not in os.environ:
        raise UserError(f"the launcher started {expected} workers, but Horovod sees {hvd.size()}; start them with "
                        "horovodrun --gloo or mpirun from this environment")
    gpu, cores = _own_gpu(device), cores_of_worker(hvd.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(threads or cores)
    # TensorFlow knows neither workers nor quotas. Where operations run side by side, oneDNN and Eigen split their sums
    # among the threads that happen to be free.
    tf.config.threading.set_inter_op_parallelism_threads(1 if deterministic else max(2, cores))
    # Grappler reorders the terms of a sum in each process, so workers and resumed runs would differ in the last bit.
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    tf.keras.utils.set_random_seed(seed)
    return World(gpu=gpu, cores=cores).renumbered()


def set_horovods_variables(deterministic: bool, fusion_mb: float | None, timeline: str | None, nccl: bool) -> None:
    """Sets the variables that Horovod reads when it starts, for `start`. nccl: see has_nccl.

    With HOROVOD_ENABLE_ASYNC_COMPLETION, the GPU waits for NCCL's kernels, and the host does not. Horovod has the host
    wait for them if there is a timeline. The tensors of a group may then be on several streams, if there are several,
    and its GPU would wait for one. Elastic training needs NCCL's errors, for which only a host that waits looks.

    Horovod's cache sends bit vectors, which Gloo cannot tell from gradients. After the loss of a worker, another one
    that expects a bit vector may receive gradients, and Gloo aborts it. Elastic training must not lose it.
    """
    if timeline:
        os.environ["HOROVOD_TIMELINE"] = str(Path(timeline).absolute())
    if deterministic:
        # Horovod fuses other tensors in each step. On three or more workers, this changes the order of the sums.
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    elif fusion_mb:
        os.environ["HOROVOD_FUSION_THRESHOLD"] = str(int(fusion_mb * 2**20))
    if nccl and not os.environ.keys() & {"HOROVOD_TIMELINE", "HOROVOD_NUM_NCCL_STREAMS", launcher.ELASTIC}:
        os.environ.setdefault("HOROVOD_ENABLE_ASYNC_COMPLETION", "1")
    if launcher.ELASTIC in os.environ and not nccl:
        os.environ.setdefault("HOROVOD_CACHE_CAPACITY", "0")


def _init(process_sets) -> None:
    tf.get_logger().setLevel("ERROR")
    try:
        with (launcher.single_process_environment() if hvd.gloo_built() else contextlib.nullcontext(),
              contextlib.nullcontext() if launcher.uses_gloo() else open_mpi.configured(), connections.noted()):
            hvd.init(process_sets=process_sets or None)
    except ValueError:
        if not process_sets:
            raise
        raise UserError("--allreduce: Horovod cannot create the process sets; start the workers with horovodrun "
                        "--gloo or mpirun from this environment") from None


def _own_gpu(device: str) -> int | None:
    """Selects the GPU of this worker's local rank, and hides the others from TensorFlow."""
    usable = _usable_gpus(device)
    own = usable[hvd.local_rank() % len(usable)] if usable else None
    tf.config.set_visible_devices([own] if own else [], "GPU")
    if not own:
        return None
    tf.config.experimental.set_memory_growth(own, True)
    listed = gpus.own(hvd.local_rank())
    if listed and listed.memory > 2 * SPARED and hvd.local_size() <= len(usable):  # TensorFlow's growth may take all
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=int((listed.memory - SPARED) * 1024))
        tf.config.set_logical_device_configuration(own, [limit])
    return int(own.name.split(":")[-1])


def _usable_gpus(device: str) -> list:
    """Returns the GPUs that TensorFlow sees, in the order of their PCI bus IDs, as in distributed.gpus."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return [] if device == "cpu" else tf.config.list_physical_devices("GPU")


def sees_gpus(device: str = "auto") -> bool:
    """Whether TensorFlow sees GPUs that it may use."""
    return bool(_usable_gpus(device))


def has_nccl(device: str = "auto") -> bool:
    """Whether gradients are exchanged by NCCL, on GPUs."""
    return bool(hvd.nccl_built()) and sees_gpus(device)


def check_gpus(world: World, device: str) -> None:
    """Raises UserError on all ranks if GPUs would silently stay idle; see distributed.gpus.check."""
    gpus.check(world, device, bool(hvd.nccl_built()))
