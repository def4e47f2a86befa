"""Checkpoints, snapshots in memory, stops and rollbacks: when they are due, and how all workers perform them."""
import time
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from common.errors import Stopped, UserError, complain
from distributed.elastic import COMMIT_STEPS
from reporting.run_folder import SUMMARY, RunFolder
from training.build import Job
from training.checkpoints import Checkpoints
from training.divergence import Diverged
from training.state import Progress
from training.stopping import StopRequest
from training.summary import milestones, summarized_divergence


@dataclass
class Last:
    """The last checkpoint. position: in the stream, where one was last due. is_postponed: whether the one due there is
    still to be saved.
    """

    position: int
    time: float
    is_postponed: bool = False


class Recovery:
    """Decides when a checkpoint, a commit or a stop is due, and performs it on all workers.

    folder: the run's. checkpoints: on rank 0, None elsewhere. hosts: distributed.elastic's in elastic training,
    otherwise None. committed: the last snapshot kept in memory, in elastic training. A new training that may roll back
    saves its first checkpoint here.
    """

    def __init__(self, job: Job, folder: RunFolder, checkpoints: Checkpoints | None, stop: StopRequest, hosts=None):
        self._job, self._folder, self._checkpoints, self._stop, self._hosts = job, folder, checkpoints, stop, hosts
        self.committed = job.state.snapshot(job.world) if hosts else None
        self._record_save()
        stop.heeded = True
        if job.settings.run.on_divergence == "rollback" and not job.state.progress.step:
            self._save(epoch=0)

    def signals(self) -> tf.Tensor:
        """Returns this worker's signals for a step: whether it has to stop, and whether a checkpoint can be saved that
        is due by time or was postponed.
        """
        return tf.constant([self._stop.received, self._is_possible_now()], tf.float32)

    def stop_is_asked(self) -> bool:
        """Whether any worker has to stop. All workers have to call it at once."""
        return self._job.world.any(self._stop.received)[0]

    def is_due_after(self, signals) -> bool:
        """Whether `after_step` would save, commit or stop. The results of all steps have to be known before that."""
        return bool(np.any(signals)) or self._epochs_have_passed() or self._commit_is_due()

    def after_step(self, signals, before_evaluation: bool) -> None:
        """Saves, commits or stops, if due. Raises Stopped, and HostsUpdatedInterrupt after a commit.

        signals: those of Pending.settle; positive if any worker has set them. before_evaluation: whether an evaluation
        follows. If so, `after_evaluation` saves and commits.
        """
        stop, is_possible = signals
        if stop:
            self.stop()
        if not before_evaluation:
            self._save_if_due(is_possible)

    def after_evaluation(self, epoch: float, top1: float, is_target: bool) -> None:
        """Saves or commits, if due. Raises UserError if the training's last checkpoint cannot be written.

        is_target: whether training ends here.
        """
        is_last = is_target or self._job.state.progress.step == self._job.plan.steps
        self._save_if_due(is_last or self._job.world.any(self._is_possible_now())[0], epoch, top1)
        if is_last:
            self._wait("the last checkpoint could not be written; free disk space and run the same command again")

    def stop(self) -> None:
        """Saves a checkpoint, waits until it is written, and raises Stopped."""
        self._save()
        self._wait("the requested stop failed, because its checkpoint could not be written; see the line above")
        raise Stopped(f"stopped on request after step {self._job.state.progress.step} of {self._job.plan.steps}, "
                      f"with a checkpoint; continue with --output_dir={self._folder.path}")

    def roll_back(self, problem: Diverged, observers) -> None:
        """Restores the newest good checkpoint. Training then repeats the steps since that checkpoint on new data.

        It skips all samples that were read since that checkpoint, up to and including those of the diverged step.

        Raises UserError on all workers if --on_divergence is not rollback, if --max_rollbacks is reached, or if there
        is no checkpoint. Training then ends, and summary.json says where it diverged.
        """
        run, plan, state, world = self._job.settings.run, self._job.plan, self._job.state, self._job.world
        before = state.read_clock()
        with world.raise_on_all_ranks():
            newest = self._checkpoints and self._checkpoints.last_good(problem.step)
        newest = world.broadcast(newest, "newest")
        if run.on_divergence != "rollback" or before.rollbacks >= run.max_rollbacks or not newest:
            self._record_end(problem, before)
            tried = f", after {before.rollbacks} rollbacks" if before.rollbacks else ""
            raise UserError(f"{problem}{tried}; the last good checkpoint: {newest or 'none'}; try a lower "
                            "--learning_rate or a longer --warmup_epochs", on_all_ranks=True)
        with world.raise_on_all_ranks():
            snapshot = self._checkpoints and self._checkpoints.load(state.variables)
        state.broadcast(snapshot, world)
        after = state.progress
        after.rollbacks, after.reshard_step, after.seconds = before.rollbacks + 1, after.step, before.seconds
        after.skipped = plan.position(problem.step + 1) + before.skipped - plan.position(after.step)
        state.start_clock()
        self._record_save()
        if self._hosts:  # the last commit is from before the rollback, perhaps with the bad weights
            self.committed = state.snapshot(world)
        for observer in observers:
            observer.rewind(after)
        if self._checkpoints:
            complain(f"{problem}; rolled back to {newest} ({after.rollbacks} of {run.max_rollbacks}); training "
                     "continues with the samples after those that caused it")

    def _record_end(self, problem: Diverged, progress: Progress) -> None:
        if self._checkpoints:
            plan, dataset = self._job.plan, self._job.feed.dataset
            ending = summarized_divergence(problem, plan.train_samples, plan.epochs, self._job.world,
                                           len(dataset.classes), progress.seconds)
            self._folder.write(SUMMARY, ending | milestones(progress, self._job.settings.run.target_top1))
            self._folder.save()

    def _save_if_due(self, is_due: bool, epoch: float | None = None, top1: float | None = None) -> None:
        if not is_due and self._epochs_have_passed():
            is_due = not self._postpones()
        if is_due:
            self._save(epoch, top1)
        if self._commit_is_due():
            self.committed = self._job.state.snapshot(self._job.world)
            self._hosts.check_host_updates()

    def _commit_is_due(self) -> bool:
        return self._hosts is not None and self._job.state.progress.step % COMMIT_STEPS == 0

    def _save(self, epoch: float | None = None, top1: float | None = None) -> None:
        self._record_save()
        snapshot = self._job.state.snapshot(self._job.world)
        if self._checkpoints:
            epochs = self._last.position / self._job.plan.train_samples
            self._checkpoints.save(snapshot, epochs if epoch is None else epoch, top1)

    def _record_save(self) -> None:
        self._last = Last(self._position, time.monotonic())

    @property
    def _position(self) -> int:
        return self._job.plan.position(self._job.state.progress.step)

    def _postpones(self) -> bool:
        """Whether a checkpoint that is due by epochs is not saved now. All workers have to call it at once.

        While the one before is being written, it is postponed until the disk is free. If the one before was saved less
        than the least time ago, the next one by epochs is saved instead.
        """
        every, saved = self._job.settings.run.checkpoint_every, self._checkpoints
        is_too_soon = saved is not None and time.monotonic() - self._last.time < 60 * every.least_minutes
        is_too_soon, is_writing = self._job.world.any(is_too_soon, saved is not None and saved.is_writing)
        if is_too_soon or is_writing:
            self._last.position = self._position
        self._last.is_postponed |= is_writing and not is_too_soon
        return is_too_soon or is_writing

    def _wait(self, problem: str) -> None:
        """Waits until the last checkpoint is written. Raises UserError on all workers if the write failed."""
        with self._job.world.raise_on_all_ranks():
            if self._checkpoints and not self._checkpoints.wait():
                raise UserError(problem)

    def _epochs_have_passed(self) -> bool:
        plan, every = self._job.plan, self._job.settings.run.checkpoint_every
        return every.is_due(self._last.position, self._position, plan.train_samples)

    def _is_possible_now(self) -> bool:
        """Whether a checkpoint is due by time or was postponed, and the disk is free. False on ranks without a disk."""
        every, saved = self._job.settings.run.checkpoint_every, self._checkpoints
        is_due = self._last.is_postponed or every.has_passed(time.monotonic() - self._last.time)
        return saved is not None and is_due and not saved.is_writing
