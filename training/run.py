"""A run, from settings to summary.json. The workers are fixed or, in elastic training, come and go."""
import contextlib
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from common import launcher
from common.activity import OBSERVERS, activity, startup
from common.errors import UserError, complain, plural
from common.run_folder import CHECKPOINTS, METRICS, RunFolder, has_checkpoints
from data.dataset import Dataset, labels_checksum
from distributed import elastic, processors
from distributed import world as worlds
from distributed.exchange import GradientExchange
from distributed.heartbeat import beating
from distributed.lost import lost_is_internal_error
from distributed.neighbours import Neighbours, distinct
from distributed.world import World
from hints.after import TRAINED_MODEL, Ending, on_result
from model_zoo.weights import can_be_had
from plan import output_dir
from plan.plan import Plan, allreduce_for, plan_for
from plan.settings import Run, Settings
from training import build
from training.build import DIFFERENT_FLAGS, Setup
from training.checkpoints import Checkpoints
from training.divergence import SAME_BITS, Diverged
from training.evaluate import EvaluationResult
from training.loop import follow_plan
from training.monitoring import Profile, start_observers
from training.observer import Observer, load_observers
from training.recovery import Recovery
from training.restoring import initialize
from training.state import Progress, Snapshot, State
from training.stopping import StopRequest
from training.summary import summary_json


def make_training(settings: Settings, dataset: Dataset, plan: Plan | None, stop: StopRequest,
                  observers_of: Callable[[Run, RunFolder], list[Observer]]) -> Callable[[], dict]:
    """Starts Horovod. Returns a function that trains and returns the content of summary.json.

    Call build.set_variables before any operation of TensorFlow, and so before this function.

    dataset: with its indexes on rank 0. plan: for the launched workers, or None in elastic training, where others may
    come. The number of training samples may be unknown. observers_of: creates the observers of a run on rank 0, besides
    those of --observer. The function raises UserError, and Stopped after a request to stop.
    """
    launch, launched = settings.launch, launcher.launched()
    exchange = process_sets = None
    if not launch.elastic:
        nccl = worlds.has_nccl(launch.device)
        exchange = build.make_exchange(launch, allreduce_for(launch, launched.size, launched.local_size, nccl), nccl)
        process_sets = distinct(exchange.process_sets, *(
            Neighbours(phase.neighbours, plan.workers).process_sets for phase in plan.phases
            if phase.neighbours > 1 and phase.workers == plan.workers))
    with startup.stage(f"connecting {launched.size} workers" if launched.size > 1 else "starting Horovod"):
        world = worlds.start(settings.recipe.seed, launch.is_deterministic, process_sets, launch.fusion_mb,
                             settings.run.timeline, launch.device, launch.threads)
    training = Training(settings, dataset, world, stop, exchange, observers_of)
    return elastic.restarting(training.attempt) if launch.elastic else training.attempt


class Training:
    """What a training keeps when workers come and go: its state, its folder, and the last snapshot in memory.

    exchange: the gradient exchange of the launched workers, or None in elastic training, where each attempt plans one.
    """

    def __init__(self, settings: Settings, dataset: Dataset, world: World, stop: StopRequest,
                 exchange: GradientExchange | None, observers_of: Callable):
        self._settings = settings
        self._dataset = dataset
        self._world = world
        self._stop = stop
        self._exchange = exchange
        self._observers_of = observers_of
        self._state: State | None = None
        self._folder: RunFolder | None = None
        self._recovery: Recovery | None = None

    def attempt(self, hosts=None) -> dict:
        """Trains to the end of the plan on the current workers. hosts: distributed.elastic.Hosts in elastic training.

        Raises HorovodInternalError if a worker is lost, and HostsUpdatedInterrupt if other workers are to join.
        """
        world = self._world.renumbered()
        with self._interrupt_says_how_to_go_on(), contextlib.ExitStack() as held, lost_is_internal_error():
            world.agree(self._settings.flags, DIFFERENT_FLAGS)
            worlds.check_gpus(world, self._settings.launch.device_policy)
            with beating(world, ends_process=not hosts):
                setup = self._make_setup(world, self._compare_processors(world))
                root, nodes = self._agree_on_start(setup, held)
                observers = self._make_observers(world)
                checkpoints = self._resume(setup, root, held)
                recovery = Recovery(setup, self._folder, checkpoints, self._stop, hosts)
                recovery.begin()
                self._recovery = recovery
                with world.raise_on_all_ranks():
                    if world.rank == 0:
                        start_observers(setup, self._folder, nodes, observers, held)
                result = problem = None
                while result is None:
                    try:
                        if problem:
                            recovery.roll_back(problem, observers)
                        result = follow_plan(setup, recovery, observers)
                    except Diverged as divergence:
                        problem = divergence
                with activity.during(OBSERVERS):
                    return self._end(setup, observers, result)

    @contextlib.contextmanager
    def _interrupt_says_how_to_go_on(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            if not (self._folder and has_checkpoints(self._folder.path)):
                raise KeyboardInterrupt("interrupted before the first checkpoint") from None
            raise KeyboardInterrupt("interrupted; continue from the newest checkpoint with "
                                    f"--output_dir={self._folder.path}") from None

    def _compare_processors(self, world: World) -> bool:
        """Returns whether the workers have equal processors. Collective. Rank 0 names those that differ."""
        differing, launch = processors.differing(world), self._settings.launch
        if differing and world.rank == 0:
            is_repeated = launch.xla != "false" or launch.share_orthogonalization == "false"
            complain(f"the workers have different processors ({differing}){f'; {SAME_BITS}' * is_repeated}")
        return not differing

    def _make_setup(self, world: World, has_equal_processors: bool) -> Setup:
        """Builds the setup for these workers. Model, optimizer and their state are created only once."""
        settings, launch = self._settings, self._settings.launch
        self._dataset = build.share_dataset(self._dataset, world)
        dataset = build.stage_dataset(self._dataset, settings.recipe, launch, world)
        exchange = self._exchange or self._plan_exchange(world)
        with world.raise_on_all_ranks():
            plan = plan_for(settings, world.size, world.local_size, dataset.train.samples, exchange.plan,
                            has_equal_processors)
            feed = build.make_feed(settings.recipe, launch, dataset, world)
            if not self._state:
                with startup.stage("building the model"):
                    self._state = build.make_state(settings, dataset)
        weights = build.weights_of_classes(settings.recipe, self._dataset, world)
        return build.make_setup(settings, plan, world, feed, self._state, exchange, weights)

    def _plan_exchange(self, world: World) -> GradientExchange:
        """Plans the gradient exchange of the current workers. Raises UserError on all ranks."""
        launch, per_node = self._settings.launch, world.workers_per_node()
        with world.raise_on_all_ranks():
            return build.make_exchange(launch, allreduce_for(launch, world.size, per_node, nccl=False), nccl=False)

    def _make_observers(self, world: World) -> list[Observer]:
        """Creates rank 0's observers, before anything is written. Raises UserError on all ranks."""
        run, observers = self._settings.run, []
        with world.raise_on_all_ranks():
            if world.rank == 0:
                profile = [Profile(*run.profile)] if run.profile else []
                observers = [*self._observers_of(run, self._folder), *profile, *load_observers(run.observer)]
        return observers

    def _resume(self, setup: Setup, root: int | None, held: contextlib.ExitStack) -> Checkpoints | None:
        """Gives all workers the newest state. Returns the checkpoints on rank 0, which opens the run's folder.

        root: the rank that holds the newest state in memory, or None if it is on disk.
        """
        world = setup.world
        checkpoints = None
        snapshot = self._recovery and self._recovery.committed
        with world.raise_on_all_ranks():
            if world.rank == 0:
                if root is None and self._settings.has_initial_weights and not output_dir.resumes(self._settings):
                    self._initialize(setup)  # perhaps from the run that is in the folder
                checkpoints = self._open_folder(held, is_new=root is None)
                snapshot = self._read_disk(checkpoints, setup) if root is None else snapshot
        report_start(setup, setup.state.broadcast(snapshot, world, root or 0))
        return checkpoints

    def _initialize(self, setup: Setup) -> None:
        """Gives the model the weights from which a new training starts."""
        initialize(self._settings.run.init_checkpoint, setup.state.model, self._dataset.classes, setup.state.average,
                   self._settings.recipe.pretrained_weights)
        setup.state.progress.keeps_initial = True  # batch norm's statistics are those of trained weights

    def _read_disk(self, checkpoints: Checkpoints, setup: Setup) -> Snapshot | None:
        """Returns the newest checkpoint, or None at the start of a training."""
        snapshot, dataset = checkpoints.load(setup.state.variables), self._dataset
        if changed := (snapshot or setup.state).progress.take_dataset(
                labels_checksum(dataset.train), dataset.validation_content):
            raise UserError(f"{checkpoints.newest} is a checkpoint of another training: {changed} have changed; "
                            f"{output_dir.from_weights(checkpoints.newest.parents[1])}, or start over with "
                            "--resume=never")
        return snapshot

    def _agree_on_start(self, setup: Setup, held: contextlib.ExitStack) -> tuple[int | None, dict[str, int]]:
        """Returns the rank that holds the latest snapshot in memory, or None, and the number of workers on each host.

        All ranks take the folder of the snapshot.
        """
        given, world = self._settings.run.output_dir, setup.world
        folder = self._folder.path if self._folder else given and Path(given).absolute()
        committed = self._recovery and self._recovery.committed
        progress = committed.progress if committed else Progress(step=-1)
        reached = progress.rollbacks, progress.step  # a rollback leads to fewer steps, and must not be undone
        everyone = world.gather((reached, folder, socket.gethostname()), "start")
        latest = max(reached for reached, *_ in everyone)
        root = [reached for reached, *_ in everyone].index(latest) if latest >= (0, 0) else None
        folder = everyone[root or 0][1]
        if not folder:
            folder = build.on_rank_0(world, lambda: held.enter_context(output_dir.made(setup.state.model.name)))
        self._folder = RunFolder(folder)
        return root, dict(Counter(host for *_, host in everyone))

    def _open_folder(self, held: contextlib.ExitStack, is_new: bool) -> Checkpoints:
        """Creates the run's folder if it is missing, and locks it against a second training. Raises UserError.

        With --resume=never, the earlier run in it comes back if this one ends before its first update. The next
        training in the folder sees to that if this one is killed, or is elastic and goes on with other workers.

        is_new: whether no worker has a state in memory. Otherwise the folder holds this training's own checkpoints.
        """
        folder, dataset = self._folder.path, self._dataset
        held.enter_context(output_dir.locked(folder))
        if is_new:
            self._folder.restore()
        if is_new and self._settings.run.resume == "never":
            self._folder.set_aside()
            if not self._settings.launch.elastic:
                held.callback(self._folder.restore)
        recipe = self._settings.identity | {"train_samples": dataset.train.samples}
        checkpoints = Checkpoints(folder / CHECKPOINTS, recipe, self._folder.flush, dataset.classes)
        held.callback(checkpoints.wait)  # before the next attempt writes, perhaps on another worker
        return checkpoints

    def _end(self, setup: Setup, observers, result: EvaluationResult) -> dict:
        """Ends the observers. Returns the content of summary.json."""
        world, plan, progress = setup.world, setup.plan, setup.state.read_clock()
        epochs = plan.epochs if progress.step == plan.steps else plan.position(progress.step) // plan.train_samples
        summary = summary_json(result, setup.feed.dataset, epochs, plan.phases[-1].global_batch_size, world,
                               progress.samples / progress.trained_seconds, progress.seconds)
        summary |= self._recovery.milestones()
        with world.raise_on_all_ranks():
            if world.rank == 0:
                ending = Ending(self._settings, self._folder.rows(METRICS), summary, str(self._folder.path),
                                lambda: can_be_had(TRAINED_MODEL))
                summary["advice"] = [hint.sentence for hint in on_result(ending)]
            for observer in observers:
                observer.end(summary)
        return summary


def report_start(setup: Setup, workers_before: int | None) -> None:
    """Begins a new slice of the stream if the number of workers has changed, and reports where training continues.

    workers_before: number of workers of the loaded snapshot, or None at the start of a training.
    """
    progress, world, plan = setup.state.progress, setup.world, setup.plan
    where = ""
    if workers_before not in (None, world.size):
        where = f", on {plural(world.size, 'worker')} instead of {workers_before}"
        if progress.step > progress.reshard_step and plan.reads_by_file and world.rank == 0:
            complain(f"--order=file{where}: some samples of this epoch are read twice and others not at all")
        progress.begin_slice(progress.step)
    if world.rank == 0 and workers_before:
        print(f"resumed after step {progress.step} of {plan.steps}{where}", file=sys.stderr)
