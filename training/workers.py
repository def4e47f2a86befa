"""The workers: who they are, which device each has, and how they agree, so that an error on one ends all alike."""
import ctypes
import os
import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from data.dataset import DatasetError
from optim.route import NCCL, PROCESS_SETS, RING, Route, choose
from training.errors import UserError

RANKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
SIZES = ("BIGBATCH_WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE")  # the first: what launch/ was asked for
LOCAL_RANKS = ("HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
LOCAL_SIZES = ("HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
PR_SET_PDEATHSIG = 1  # prctl(2)
# Beginnings of what a launcher leaves in its workers' environment, whichever launcher it is.
LAUNCHERS = ("BIGBATCH_WORLD_SIZE", "FLUX_", "HOROVOD_RANK", "MPI_", "OMPI_COMM_", "PALS_", "PMI", "SLURM_")
# What tells Horovod that there is one worker; MPI takes a second to find that out.
ALONE = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"} | {
    f"HOROVOD_{scope}{name}": number for scope in ("", "LOCAL_", "CROSS_")
    for name, number in (("RANK", "0"), ("SIZE", "1"))}
RDMA = Path("/sys/class/infiniband")  # the machine's network cards for remote memory access, RoCE's and EFA's, too
ELASTIC = "HOROVOD_ELASTIC"  # set by horovodrun where workers may come and go


class AgreedError(UserError):
    """An error that every worker raises at the same point."""


@dataclass(frozen=True)
class Worker:
    """This process among the others. gpu: the number of its GPU as DALI counts, or None. cores: those it may use.

    route: of gradients; links: a torus's steps (optim.torus), or None without one.
    """

    rank: int
    size: int
    gpu: int | None
    cores: int
    route: Route = RING
    links: object = None


@dataclass(frozen=True)
class Launched:
    """This process among the others as its launcher has set it, before Horovod is loaded. local: on this node."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def launched() -> Launched:
    """The only worker, where there is no launcher."""
    def read(names, default):
        return int(next((os.environ[name] for name in names if name in os.environ), default))

    return Launched(read(RANKS, 0), read(SIZES, 1), read(LOCAL_RANKS, 0), read(LOCAL_SIZES, 1))


def end_with_launcher() -> None:
    """From now on this process is killed when the one that has started it ends, if that is a launcher's.

    horovodrun otherwise leaves workers on other hosts running when it is stopped, or when one of them fails.
    """
    if any(name in os.environ for name in RANKS):
        end_with_parent(signal.SIGKILL)


def end_with_parent(number: signal.Signals) -> None:
    """From now on this process gets the signal when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def route(config, size: int, local_size: int, nccl: bool | None = None) -> Route:
    """The way of gradients between so many workers, `local_size` on each node. Raises UserError."""
    try:
        return choose(config.allreduce, config.torus_grid, size, local_size, config.elastic, nccl)
    except ValueError as error:
        raise UserError(str(error)) from None


def start(seed: int, deterministic: bool = False, exchange=None) -> Worker:
    """Starts Horovod, gives this worker its GPU and its share of the cores, seeds Keras.

    deterministic: the same operations in the same order, whatever they cost. exchange: the flags of one that gradients
    are exchanged by; None where there will be no gradients.
    """
    if exchange and exchange.allreduce == "torus" and exchange.torus_grid == "auto" and not exchange.elastic:
        _check_nodes()
    import horovod.tensorflow.keras as hvd
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    if deterministic:
        # What is exchanged as one tensor differs from step to step, and with it, on three workers and more, the order
        # of each sum.
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
        tf.config.experimental.enable_op_determinism()
    elif exchange and exchange.fusion_mb:
        os.environ["HOROVOD_FUSION_THRESHOLD"] = str(int(exchange.fusion_mb * 2**20))
    # A thread that waits in Open MPI leaves its core to those that compute there, instead of spinning.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    if not RDMA.exists():
        os.environ.setdefault("OMPI_MCA_btl", "^ofi")  # looks for such a card, and sleeps for a second
    expected = launched()
    links, way = None, RING
    if exchange and not exchange.elastic:
        nccl = _has_nccl()
        way = route(exchange, expected.size, expected.local_size, nccl)
        links = _open(way, nccl)
    else:
        _init()
    if hvd.size() != expected.size and ELASTIC not in os.environ:
        raise UserError(f"the launcher started {expected.size} workers, but Horovod sees {hvd.size()}; start them with "
                        "horovodrun --gloo or mpirun from this environment")
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        gpus = [gpus[hvd.local_rank() % len(gpus)]]
        tf.config.set_visible_devices(gpus, "GPU")
        tf.config.experimental.set_memory_growth(gpus[0], True)
    cores = len(os.sched_getaffinity(0))
    if cores == os.cpu_count():  # not bound to cores of its own: share
        cores = max(1, cores // hvd.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(cores)
    # Grappler orders the terms of a sum anew in each process: workers and resumed runs would differ in the last bit.
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    tf.keras.utils.set_random_seed(seed)
    return Worker(hvd.rank(), hvd.size(), int(gpus[0].name.split(":")[-1]) if gpus else None, cores, way, links)


def _has_nccl() -> bool:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    return bool(hvd.nccl_built() and tf.config.list_physical_devices("GPU"))


def _open(way: Route, nccl: bool):
    """Starts Horovod for a route; returns the torus's links, or None without one. Raises UserError."""
    from optim.torus import ProcessSets

    if way.by == NCCL:
        os.environ["HOROVOD_TORUS_ALLREDUCE"] = "1"
    links = ProcessSets(*way.grid, rings=nccl) if way.by == PROCESS_SETS else None
    try:
        _init(process_sets=links.process_sets if links else None)
    except ValueError:
        if not links:
            raise
        raise UserError("--allreduce=torus: Horovod cannot make the process sets; start the workers with horovodrun "
                        "--gloo or mpirun from this environment") from None
    return links


def _init(process_sets=None) -> None:
    """hvd.init, on Gloo where nothing in the environment speaks of other workers."""
    import horovod.tensorflow as hvd

    alone = hvd.gloo_built() and not any(name.startswith(LAUNCHERS) for name in os.environ)
    added = ALONE.keys() - os.environ.keys() if alone else ()  # a child's launcher must not find them
    os.environ.update({name: ALONE[name] for name in added})
    try:
        hvd.init(process_sets=process_sets)
    finally:
        for name in added:
            del os.environ[name]


def _check_nodes() -> None:
    """Raises UserError, on one worker at least, where nodes have different numbers of workers.

    Each would choose a grid for its own node, and Horovod, which has to be told of process sets before workers can
    speak to each other, ends without a word on why. (Under mpirun nothing tells the number of nodes: 1 + 2 + 3 workers
    go unnoticed.)
    """
    world = launched()
    nodes = int(os.environ.get("HOROVOD_CROSS_SIZE", world.size // world.local_size))
    if world.local_size * nodes != world.size:
        raise UserError("--torus_grid=auto is for nodes with the same number of workers each; name a grid, such as "
                        "--torus_grid=4x2")


def renumbered(worker: Worker) -> Worker:
    """The worker as Horovod numbers it now, after some have left or come."""
    import horovod.tensorflow as hvd

    return replace(worker, rank=hvd.rank(), size=hvd.size())


def rerouted(worker: Worker, config) -> Worker:
    """The worker with the route for those that are there now, the same on all of them. Raises UserError."""
    import horovod.tensorflow as hvd

    from optim.torus import AllToAll

    sizes = set(hvd.allgather_object(hvd.local_size(), name="local sizes"))
    way = route(config, worker.size, sizes.pop() if len(sizes) == 1 else 1)
    return replace(worker, route=way, links=AllToAll(*way.grid) if way.allreduce == "torus" else None)


def dali_device(flag: str, worker: Worker) -> str:
    """ "cpu" or "gpu" for --dali_device. Raises UserError for a GPU that is not there."""
    if flag == "gpu" and worker.gpu is None:
        raise UserError("--dali_device=gpu: TensorFlow sees no GPU here; use --dali_device=cpu or auto")
    return flag if flag != "auto" else "cpu" if worker.gpu is None else "gpu"


@contextmanager
def together():
    """What one worker cannot do in this block fails on all of them, with the same message."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    problem = None
    try:
        yield
    except (UserError, DatasetError, OSError) as error:
        problem = str(error)
    except tf.errors.OpError as error:
        if is_lost(error):
            raise
        problem = reason(error)
    problems = [problem for problem in hvd.allgather_object(problem, name="problems") if problem]
    if problems:
        raise AgreedError(problems[0])


def check_same_flags(flags: dict) -> None:
    """Raises AgreedError on every worker unless all were started with the same flags."""
    import horovod.tensorflow as hvd

    everyone = hvd.allgather_object(flags, name="command line")
    for rank, other in enumerate(everyone):
        differing = [name for name in flags if other[name] != everyone[0][name]]
        if differing:
            name = differing[0]
            raise AgreedError(f"the workers were started with different flags: --{name} is {everyone[0][name]} on "
                              f"rank 0 and {other[name]} on rank {rank}")


def check_same_weights(variables) -> None:
    """Raises AgreedError on every worker unless all hold the same bits in every variable."""
    import hashlib

    import horovod.tensorflow as hvd

    digests = hvd.allgather_object([hashlib.sha256(v.numpy().tobytes()).hexdigest() for v in variables], name="weights")
    for rank, other in enumerate(digests):
        differing = [v.name for v, a, b in zip(variables, digests[0], other, strict=True) if a != b]
        if differing:
            raise AgreedError(f"the weights of rank {rank} differ from rank 0's in {len(differing)} variables, the "
                              f"first {differing[0]}: this is a bug in the exchange of gradients")


def any_of_them(flag: bool) -> bool:
    """Whether the flag is set on any worker; all have to ask at once."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    return (hvd.size() > 1 and bool(hvd.allreduce(tf.constant(float(flag)), op=hvd.Sum, name="any") > 0)) or flag


def is_lost(error) -> bool:
    """Whether it is Horovod's error where another worker is no longer there.

    TensorFlow names the node that failed, which need not tell that it is Horovod's, and where it was made, which does.
    """
    if "horovod" not in sys.modules:
        return False
    from horovod.common.exceptions import HorovodInternalError

    return isinstance(error, HorovodInternalError) or ("dali" not in str(error).lower() and any(
        sign in str(error) for sign in ("Horovod", "/horovod/tensorflow/")))


@contextmanager
def lost_is_known():
    """Raises HorovodInternalError wherever Horovod cannot reach another worker, as TensorFlow has it raise others."""
    import tensorflow as tf
    from horovod.common.exceptions import HorovodInternalError

    try:
        yield
    except tf.errors.OpError as error:
        if is_lost(error):
            raise HorovodInternalError(str(error)) from None
        raise


def reason(error) -> str:
    """The line of a TensorFlow error that says what happened: its own or DALI's."""
    where = ("Graph execution error", "Detected at node", "File ", "[[")  # in the graph and in Python
    lines = [line.strip() for line in str(error).splitlines() if "Critical error" not in line]
    lines = [line for line in lines if line and not line.startswith(where)] or [type(error).__name__]
    telling = ("rror in", "ssert", "No space left", "outside the valid range")
    return next((line for line in lines if any(word in line for word in telling)), lines[0])[:300]


def input_reason(error, batches, read: int) -> str:
    """`reason`; where DALI failed, the damaged record's name. batches: data.feed.Batches; read: samples so far."""
    if "dali" not in str(error).lower():
        return reason(error)
    name = batches.blame(read)
    return f"{name} cannot be decoded; `data.prepare --verify` lists all such" if name else reason(error)


def leave() -> None:
    """Waits for the others: mpirun ends every worker as soon as one has left."""
    import horovod.tensorflow as hvd

    hvd.allgather_object(None, name="leave")  # a barrier, which Horovod for TensorFlow lacks
