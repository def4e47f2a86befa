"""Checkpoints, snapshots in memory, stops and rollbacks: when they are due, and how all workers perform them."""
import enum
import time

from common import metric
from common.activity import OBSERVERS, activity
from common.errors import Stopped, UserError, complain, plural
from common.run_folder import CHECKPOINTS, SUMMARY, RunFolder
from distributed import processors
from distributed.elastic import COMMIT_STEPS
from hints.after import OTHER_RATE, on_rate
from hints.hint import Hint
from plan.settings import Settings
from plan.values import Every
from training.build import Setup
from training.checkpoints import Checkpoints
from training.divergence import Diverged, WeightsDiffer
from training.outcomes import Outcomes
from training.restoring import best_outcomes
from training.state import Progress, Snapshot
from training.step import Signals
from training.stopping import StopRequest
from training.summary import divergence_json, milestones, of_classes
from training.weight_check import difference, not_finite


class Due(enum.Enum):
    """When a checkpoint that is due by epochs is saved."""

    NOW = enum.auto()
    LATER = enum.auto()  # as soon as the one before is written
    SKIPPED = enum.auto()  # the one before is too recent; the next one by epochs is saved instead


class CheckpointSchedule:
    """Decides when checkpoints are due: by epochs, as all ranks can tell, or by time, which only rank 0 measures."""

    def __init__(self, every: Every, train_samples: int):
        self._every = every
        self._train_samples = train_samples
        self._is_postponed = False

    def record_save(self, position: int) -> None:
        """Notes a checkpoint that is saved now. position: in the stream of samples."""
        self._position = position
        self._time = time.monotonic()
        self._is_postponed = False

    def record_unsaved(self, position: int, due: Due) -> None:
        """Notes that the checkpoint due at this position is not saved now."""
        self._position = position
        self._is_postponed |= due is Due.LATER

    @property
    def epoch(self) -> float:
        """The epoch at which a checkpoint was last due."""
        return self._position / self._train_samples

    def epochs_have_passed(self, position: int) -> bool:
        return self._every.is_due(self._position, position, self._train_samples)

    def by_epochs(self, is_writing: bool) -> Due:
        """Returns when a checkpoint due by epochs is saved. is_writing: whether the one before is being written."""
        if time.monotonic() - self._time < 60 * self._every.least_minutes:
            return Due.SKIPPED
        return Due.LATER if is_writing else Due.NOW

    def is_due_by_time(self) -> bool:
        """Whether a checkpoint is due by time, or was postponed."""
        return self._is_postponed or self._every.has_passed(time.monotonic() - self._time)


class Recovery:
    """Decides when a checkpoint, a commit or a stop is due, and performs it on all workers.

    folder: the run's. checkpoints: on rank 0, None elsewhere. hosts: distributed.elastic.Hosts in elastic training,
    otherwise None. committed: the last snapshot kept in memory, in elastic training.
    """

    def __init__(self, setup: Setup, folder: RunFolder, checkpoints: Checkpoints | None, stop: StopRequest, hosts=None):
        self._setup = setup
        self._folder = folder
        self._checkpoints = checkpoints
        self._stop = stop
        self._hosts = hosts
        self._schedule = CheckpointSchedule(setup.settings.run.checkpoint_every, setup.plan.train_samples)
        self.committed = None

    def begin(self) -> None:
        """Takes over requests to stop, and checks the state that an attempt begins with. Collective: see `snapshot`.

        In elastic training, it keeps that state in memory. A new training that may roll back saves its first
        checkpoint. Raises UserError if the workers' states differ.
        """
        setup = self._setup
        try:
            begun = self.snapshot()
        except WeightsDiffer as problem:
            raise UserError(f"{problem}; {problem.advice}", on_all_ranks=True) from None
        except Diverged as problem:
            raise UserError(f"{problem.reason} before the first step; check how --model initializes it",
                            on_all_ranks=True) from None
        if self._hosts:
            self.committed = begun
        self._schedule.record_save(self._position)
        self._stop.start_training()
        if setup.settings.run.on_divergence == "rollback" and not setup.state.progress.step:
            self._save()

    def signals(self) -> Signals:
        """Returns this worker's signals for a step."""
        return Signals(stop=self._stop.received, can_save=self._is_possible_now())

    def stop_is_asked(self) -> bool:
        """Whether any worker has to stop. Collective: every rank must call it."""
        return self._setup.world.any(self._stop.received)[0]

    def is_due_after(self, signals: Signals) -> bool:
        """Whether `after_step` would save, commit or stop. The results of all steps have to be known before that."""
        return (any(signals) or self._schedule.epochs_have_passed(self._position)
                or self._commit_is_due())

    def after_step(self, signals: Signals, before_evaluation: bool) -> None:
        """Saves, commits or stops, if due. Raises Stopped, and HostsUpdatedInterrupt after a commit.

        signals: those that any worker has set. before_evaluation: whether an evaluation follows. If so,
        `after_evaluation` saves and commits.
        """
        if signals.stop:
            self.stop()
        if not before_evaluation:
            self._save_if_due(signals.can_save)

    def after_evaluation(self, epoch: float, top1: float, outcomes: Outcomes, is_last: bool) -> None:
        """Saves or commits, if due; also saves the best evaluation so far. Collective: every rank must call it.

        Raises UserError if the training's last checkpoint cannot be written. is_last: whether training ends here.
        """
        self._save_if_due(is_last or self._setup.world.any(self._is_possible_now())[0], (epoch, top1, outcomes))
        if is_last:
            self._wait("the last checkpoint could not be written; see the line above, and run the same command again")

    def stop(self) -> None:
        """Saves a checkpoint, waits until it is written, and raises Stopped."""
        self._save()
        self._wait("the requested stop failed, because its checkpoint could not be written; see the line above")
        self._end(f"stopped on request after step {self._setup.state.progress.step} of {self._setup.plan.steps}, with "
                  f"a checkpoint; continue with --output_dir={self._folder.path}")

    def hand_over(self, workers: int) -> None:
        """Saves a checkpoint for the next phase, which needs another number of workers, and raises Stopped.

        Raises UserError if training starts on another number than its first phase needs.
        """
        progress, schedule = self._setup.state.progress, self._setup.settings.launch.workers_schedule
        if not progress.step and not progress.rollbacks:  # which may lead to the first phase
            raise UserError(f"--workers_schedule={schedule}: training starts on {plural(workers, 'worker')}, not on "
                            f"{self._setup.world.size}", on_all_ranks=True)
        self._save()
        self._wait("the checkpoint for the next phase could not be written; see the line above")
        needed = f"the phase after step {progress.step} of {self._setup.plan.steps} needs {plural(workers, 'worker')}"
        self._end(f"{needed}; continue there with --output_dir={self._folder.path}", workers)

    def _end(self, message: str, next_workers: int | None = None) -> None:
        raise Stopped(message if self._checkpoints else "", next_workers)  # rank 0 alone says it

    def roll_back(self, problem: Diverged, observers) -> None:
        """Restores the newest good checkpoint. Training then repeats the steps since that checkpoint on new data.

        It skips all samples that were read since that checkpoint, up to and including those of the diverged step. If
        the workers' states differed, it repeats the same samples.

        Raises UserError on all workers if --on_divergence is not rollback, if --max_rollbacks is reached, if there is
        no checkpoint, or if training has not diverged, but lies below --expect. Training then ends, and summary.json
        says where.
        """
        run, plan, state, world = self._setup.settings.run, self._setup.plan, self._setup.state, self._setup.world
        before = state.read_clock()
        with world.raise_on_all_ranks():
            newest = self._checkpoints and self._checkpoints.last_good(problem.step if problem.is_of_samples else None)
        newest = world.broadcast(newest, "newest")
        can_roll_back = run.on_divergence == "rollback" and not problem.is_below_expected
        if not can_roll_back or before.rollbacks >= run.max_rollbacks or not newest:
            self._record_end(problem, before)
            tried = f", after {before.rollbacks} rollbacks" if before.rollbacks else ""
            cures = "; ".join(hint.words for hint in after_divergence(problem, self._setup.settings))
            said = f"{problem}{tried}", f"the last good checkpoint: {newest or 'none'}", cures
            raise UserError(*(said if world.rank == 0 else ()), on_all_ranks=True)
        with world.raise_on_all_ranks():
            snapshot = self._checkpoints and self._checkpoints.load(state.variables)
        state.broadcast(snapshot, world)
        after = state.progress
        unread = plan.position(problem.step + 1) + before.skipped - plan.position(after.step)
        after.add_rollback(before, unread if problem.is_of_samples else None)
        state.start_clock()
        self._schedule.record_save(self._position)
        if self._hosts:  # the last commit is from before the rollback, perhaps with the bad weights
            self.committed = self.snapshot()
        with world.raise_on_all_ranks(), activity.during(OBSERVERS):
            for observer in observers:
                observer.rewind(after)
        if self._checkpoints:
            samples = "samples after those that caused it" if problem.is_of_samples else "same samples"
            complain(f"{problem}; rolled back to {newest} ({after.rollbacks} of {run.max_rollbacks}); training "
                     f"continues with the {samples}")

    def _record_end(self, problem: Diverged, progress: Progress) -> None:
        if self._checkpoints:
            plan, dataset = self._setup.plan, self._setup.feed.dataset
            ending = divergence_json(problem, plan.train_samples, plan.epochs, self._setup.world, len(dataset.classes),
                                     progress.seconds,
                                     [hint.sentence for hint in after_divergence(problem, self._setup.settings)])
            self._folder.write(SUMMARY, ending | self.milestones())
            self._folder.save()

    def milestones(self) -> dict:
        """Returns what summary.json says of the evaluations. On other ranks than 0, it names no checkpoint."""
        progress = self._setup.state.progress
        best = self._checkpoints and self._checkpoints.of(progress.best)
        outcomes = self._checkpoints and best_outcomes(self._folder.path, progress.best)
        of_best = of_classes(outcomes, self._setup.feed.dataset) if outcomes else {}
        return milestones(progress, self._setup.settings.run.target_top1, best and f"{CHECKPOINTS}/{best.name}"
                          ) | {f"{metric.BEST}{name}": value for name, value in of_best.items()}

    def _save_if_due(self, is_asked: bool, evaluation: tuple[float, float, Outcomes] | None = None) -> None:
        """Saves if asked, or if it is due by epochs, and commits if due. Collective: every rank must call it.

        evaluation: epoch, top1 and outcomes of that just made, if any. The best one so far is saved in any case.
        """
        due = Due.NOW if is_asked else None
        if not is_asked and self._schedule.epochs_have_passed(self._position):
            answer = self._checkpoints and self._schedule.by_epochs(self._checkpoints.is_writing)
            due = self._setup.world.broadcast(answer, "due")
        if due is Due.NOW:
            self._save(evaluation)
        elif due:
            self._schedule.record_unsaved(self._position, due)
        if due is not Due.NOW and evaluation and self._setup.state.progress.best["epoch"] == evaluation[0]:
            snapshot = self.snapshot()
            if self._checkpoints:
                self._checkpoints.save_best(snapshot, *evaluation)
        if self._commit_is_due():
            self.committed = self.snapshot()
            self._hosts.check_host_updates()

    def _commit_is_due(self) -> bool:
        return self._hosts is not None and self._setup.state.progress.step % COMMIT_STEPS == 0

    def _save(self, evaluation: tuple[float, float, Outcomes] | None = None) -> None:
        self._schedule.record_save(self._position)
        snapshot = self.snapshot()
        if self._checkpoints:
            self._checkpoints.save(snapshot, *(evaluation or (self._schedule.epoch,)))

    def snapshot(self) -> Snapshot:
        """Returns a snapshot of the state. Collective: every rank must call it.

        Raises WeightsDiffer on all of them unless all have the same state, and Diverged if it is not finite.
        """
        world, plan = self._setup.world, self._setup.plan
        snapshot = self._setup.state.snapshot(world)
        step, epoch = snapshot.progress.step, self._position / plan.train_samples
        if not world.is_equal([*snapshot.checksums.values()], "checksums"):
            raise WeightsDiffer(difference(world, snapshot.tensors), step, epoch, processors.differing(world))
        if broken := not_finite(snapshot.tensors):
            raise Diverged(f"{broken} is infinite or NaN", max(0, step - 1), epoch, plan.learning_rate(epoch))
        return snapshot

    @property
    def _position(self) -> int:
        return self._setup.plan.position(self._setup.state.progress.step)

    def _wait(self, problem: str) -> None:
        """Waits until the last checkpoint is written. Raises UserError on all workers if the write failed."""
        with self._setup.world.raise_on_all_ranks(), activity.during("writing a checkpoint"):
            if self._checkpoints and not self._checkpoints.wait():
                raise UserError(problem)

    def _is_possible_now(self) -> bool:
        """Whether a checkpoint is due by time or was postponed, and none is being written. False on other ranks than 0.
        """
        saved = self._checkpoints
        return saved is not None and not saved.is_writing and self._schedule.is_due_by_time()


def after_divergence(problem: Diverged, settings: Settings) -> list[Hint]:
    """Returns what to try after a divergence: its own cure, and the recipe's learning rate if that is far lower."""
    return [Hint("advice", problem.advice), *(on_rate(settings, OTHER_RATE) if problem.is_of_samples else ())]
