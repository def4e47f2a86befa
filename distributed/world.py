"""The world: rank, size and device of this worker, and the collectives outside the gradient exchange.

A world of one worker (`World()`) works without Horovod having started.
"""
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import horovod.tensorflow as hvd
import tensorflow as tf

from common.errors import UserError, one_line, reason
from distributed import gpus, launcher, rdma
from distributed.lost import is_lost

HOST = "/cpu:0"  # device for exchanging objects: NCCL gains nothing there, and fails if workers share a GPU


@dataclass(frozen=True)
class World:
    """This worker and its collectives. local: on this node. gpu: CUDA index or None. cores: CPU cores of this worker.

    All workers have to call a method at the same time, with the same `name`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    gpu: int | None = None
    cores: int = 1

    def gather(self, value, name: str) -> list:
        """Returns the values of all ranks, by rank. A value can be any Python object."""
        with tf.device(HOST):
            return [value] if self.size == 1 else hvd.allgather_object(value, name=name)

    def broadcast(self, value, name: str, root: int = 0):
        """Returns the value of rank root. It can be any Python object."""
        with tf.device(HOST):
            return value if self.size == 1 else hvd.broadcast_object(value, root_rank=root, name=name)

    def broadcast_variables(self, variables: Sequence[tf.Variable], root: int = 0) -> None:
        """Copies rank root's values to every worker in one graph, without the AutoGraph of hvd.broadcast_variables."""
        @tf.function(autograph=False)
        def broadcast():
            for number, variable in enumerate(variables):
                variable.assign(hvd.broadcast(variable, root, name=f"variable_{number}"))

        if self.size > 1:
            broadcast()

    def sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the sum over the workers."""
        return tensor if self.size == 1 else hvd.allreduce(tensor, op=hvd.Sum, name=name)

    def sums(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        """Returns the sum of each tensor over the workers, in float32, with one all-reduce."""
        if self.size == 1:
            return [tf.cast(t, tf.float32) for t in tensors]
        return on_one_vector(tensors, lambda flat: hvd.allreduce(flat, op=hvd.Sum, name=name))

    def any(self, *flags: bool) -> list[bool]:
        """Returns whether each flag is set on any worker."""
        return list(flags) if self.size == 1 else (self.sum(tf.constant(flags, tf.float32), "any") > 0).numpy().tolist()

    def barrier(self) -> None:
        """Waits until every rank has called it. Needed before exit, because mpirun kills all ranks when one exits."""
        self.gather(None, "barrier")  # Horovod for TensorFlow has no barrier

    @contextlib.contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Raises an error from any rank on all ranks, as UserError."""
        problem = None
        try:
            yield
        except (UserError, OSError) as error:
            problem = one_line(error)
        except tf.errors.OpError as error:
            if is_lost(error):
                raise
            problem = reason(error)
        problems = [problem for problem in self.gather(problem, "problems") if problem]
        if problems:
            raise UserError(problems[0], on_all_ranks=True)

    def agree(self, values: dict, problem: str) -> None:
        """Raises UserError on all ranks unless all have the same values. `problem` is the start of its message."""
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
        sizes = set(self.gather(self.local_size, "local sizes"))
        return sizes.pop() if len(sizes) == 1 else 1


def on_one_vector(tensors: Sequence[tf.Tensor], function: Callable) -> list[tf.Tensor]:
    """Applies a function of a vector to all tensors at once, as one float32 vector. Returns tensors of their shapes."""
    flat = function(tf.concat([tf.reshape(tf.cast(t, tf.float32), [-1]) for t in tensors], axis=0))
    parts = tf.split(flat, [t.shape.num_elements() for t in tensors])
    return [tf.reshape(part, t.shape) for part, t in zip(parts, tensors, strict=True)]


def start(seed: int, deterministic: bool = False, process_sets=None, fusion_mb: float | None = None,
          timeline: str | None = None, device: str = "auto", threads: int | None = None) -> World:
    """Starts Horovod, assigns a GPU and cores to this worker, and seeds Keras. Raises UserError.

    deterministic: run the same operations in the same order, even if they are slower. process_sets: created when
    Horovod starts. fusion_mb: size of Horovod's own buffer. timeline: file for Horovod's timeline. device: "cpu" hides
    all GPUs from TensorFlow. threads: number of threads of an operation on the CPU, on which the order of its sums
    depends. Default: one for each core of this worker.
    """
    if timeline:
        os.environ["HOROVOD_TIMELINE"] = str(Path(timeline).absolute())
    if deterministic:
        # Horovod fuses other tensors in each step. On three or more workers, this changes the order of the sums.
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
        tf.config.experimental.enable_op_determinism()
    elif fusion_mb:
        os.environ["HOROVOD_FUSION_THRESHOLD"] = str(int(fusion_mb * 2**20))
    _init(process_sets)
    expected = launcher.launched().size
    if hvd.size() != expected and launcher.ELASTIC not in os.environ:
        raise UserError(f"the launcher started {expected} workers, but Horovod sees {hvd.size()}; start them with "
                        "horovodrun --gloo or mpirun from this environment")
    gpu, cores = _own_gpu(device), _own_cores()
    tf.config.threading.set_intra_op_parallelism_threads(threads or cores)
    # Grappler reorders the terms of a sum in each process, so workers and resumed runs would differ in the last bit.
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    tf.keras.utils.set_random_seed(seed)
    return World(gpu=gpu, cores=cores).renumbered()


def _init(process_sets) -> None:
    tf.get_logger().setLevel("ERROR")
    # A thread that waits in Open MPI yields its core to threads that compute, instead of spinning.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    if not rdma.CARDS.exists():
        os.environ.setdefault("OMPI_MCA_btl", "^ofi")  # ofi looks for such a card, and sleeps for a second
    try:
        with launcher.single_process_environment() if hvd.gloo_built() else contextlib.nullcontext():
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
    return int(own.name.split(":")[-1])


def _usable_gpus(device: str) -> list:
    """Returns the GPUs that TensorFlow sees, in the order of their PCI bus IDs, as in distributed.gpus."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return [] if device == "cpu" else tf.config.list_physical_devices("GPU")


def _own_cores() -> int:
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // hvd.local_size()) if cores == os.cpu_count() else cores  # all cores: the worker is not bound


def has_nccl(device: str = "auto") -> bool:
    """Whether gradients are exchanged by NCCL, on GPUs."""
    return bool(hvd.nccl_built() and _usable_gpus(device))


def check_gpus(world: World, device: str) -> None:
    """Raises UserError on all ranks if GPUs would silently stay idle; see distributed.gpus.check."""
    gpus.check(world, device, bool(hvd.nccl_built()))
