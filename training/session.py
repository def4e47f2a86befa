"""A training from the command line to the report: the run's folder, the resume, and the workers that come and go."""
import dataclasses
import fcntl
import os
import shutil
import sys
from datetime import datetime
from pathlib import Path

import horovod.tensorflow as hvd

from data.dataset import Dataset
from data.stage import stage
from optim import exchange
from reporting.progress import Progress
from reporting.report import write_report
from reporting.run_folder import RunFolder, write_grid
from training import fit, flags, workers
from training.checkpoints import Checkpoints
from training.errors import UserError, complain
from training.faults import elastic
from training.faults.heartbeat import Heartbeat
from training.faults.stopping import Stopped, StopRequest
from training.plan import make_plan


class Session:
    """What a process keeps of a training while other workers come and go; `run` is called anew each time they have."""

    def __init__(self, config, flags_text: str, dataset: Dataset, worker: workers.Worker, stop: StopRequest):
        self._config, self._flags_text, self._dataset, self._worker = config, flags_text, dataset, worker
        self._recipe = flags.recipe(config) | {"train_samples": dataset.train.samples, "classes": len(dataset.classes)}
        self._said, self._stop = dict(vars(config)), stop
        self._state, self._committed, self._folder, self._checkpoints, self._lock = None, None, None, None, None

    def train(self) -> dict:
        """Trains on the workers that there are, or with --elastic on those that are there at each time.

        Returns summary.json's content. Raises UserError; Stopped after a request to stop; HorovodInternalError where
        another worker is gone.
        """
        try:
            return elastic.run(self._run, self._commit) if self._config.elastic else self._run()
        except Stopped as stopped:
            raise Stopped(f"{stopped}; --output_dir={self._folder} goes on from there") from None

    def _run(self, commit=lambda: None) -> dict:
        with workers.lost_is_known():
            worker = workers.renumbered(self._worker)
            if self._config.elastic:
                workers.check_same_flags(self._said)
                worker = workers.rerouted(worker, self._config)
            heartbeat = Heartbeat(complain if self._config.elastic else None)
            try:
                return self._train(worker, lambda: self._at_commit(commit))
            finally:
                heartbeat.stop()
                self._hand_over()

    def _train(self, worker, commit) -> dict:
        config, observers = self._config, []
        with workers.together():
            dataset = stage(self._dataset, Path(config.stage_dir)) if config.stage_dir else self._dataset
            plan = make_plan(config, worker.size, dataset.train.samples, worker.route)
            feed = fit.make_feed(config, dataset, worker)
            if not self._state:
                model = fit.make_model(config, dataset, worker.rank)
                self._state = fit.make_state(config, model, fit.make_optimizer(config, model))
        exchange.connect(self._state.optimizer, worker.links)
        root, self._folder = self._agree_on_start()
        with workers.together():
            if worker.rank == 0:
                self._open_folder(self._folder)
                self._checkpoints = Checkpoints(self._folder / "checkpoints", self._recipe)
                snapshot = self._committed if root is not None else self._checkpoints.load(self._state.variables)
            else:
                snapshot = self._committed
        before = self._state.broadcast(snapshot, root or 0)
        self._tell_of_resume(worker, plan, before)
        if worker.route.instead and worker.rank == 0:
            complain(f"--allreduce=torus goes on in a {worker.route.allreduce}: {worker.route.why}")
        if config.elastic:
            self._commit()
        place = self._state.place
        with workers.together():
            if worker.rank == 0:
                observers = [RunFolder(self._folder, plan.as_json(), self._flags_text, place),
                             Progress(plan.epochs, plan.samples, place)]
                print(f"run: {self._folder}", file=sys.stderr)
                if config.save_augmentations:
                    save_augmentations(feed, self._folder)
        summary = fit.Fit(config, plan, feed, self._state, self._checkpoints, observers, self._stop, commit).run()
        with workers.together():
            for observer in observers:
                observer.end(summary)
            if observers:
                print(f"report: {write_report(self._folder)}", file=sys.stderr)
        return summary

    def _agree_on_start(self) -> tuple[int | None, Path]:
        """(the rank that holds the latest moment in memory, or None; the run's folder)."""
        name = f"{datetime.now():%Y%m%d-%H%M%S}-{self._config.model}-{os.getpid()}"
        folder = self._folder or Path(self._config.output_dir or Path("runs") / name).absolute()
        step = self._committed.place.step if self._committed else -1
        everyone = hvd.allgather_object((step, folder), name="start")
        latest = max(step for step, _ in everyone)
        root = [step for step, _ in everyone].index(latest) if latest >= 0 else None
        return root, everyone[root or 0][1]

    def _tell_of_resume(self, worker, plan, before: int | None):
        """A line where training goes on; and where the world has changed, a new piece of the stream is begun.

        before: the number of workers that the moment is of, or None at a training's start.
        """
        place = self._state.place
        if before not in (None, worker.size):
            if place.step > place.piece_step and not self._dataset.train.kind.ANY_ORDER and worker.rank == 0:
                complain(f"{self._dataset.format} is read file after file: with {worker.size} workers for {before}, "
                         "some samples of this epoch are read twice and some not at all")
            place.piece_step = place.step
        if before and worker.rank == 0:
            where = f", on {worker.size} workers for {before}" if before != worker.size else ""
            print(f"resumed after step {place.step} of {plan.steps}{where}", file=sys.stderr)

    def _open_folder(self, folder: Path) -> None:
        """Makes the run's folder where it is missing, and holds it against a second training. Raises UserError."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output_dir: {folder} cannot be made: {error.strerror}") from None
        if not os.access(folder, os.W_OK):
            raise UserError(f"--output_dir: {folder} cannot be written")
        self._lock = hold(folder)
        if self._config.resume == "never" and not self._committed:
            for leftover in ("checkpoints", "tensorboard"):
                shutil.rmtree(folder / leftover, ignore_errors=True)
            for leftover in ("metrics.jsonl", "times.jsonl", "trust_ratios.jsonl", "summary.json", "report.html"):
                (folder / leftover).unlink(missing_ok=True)

    def _hand_over(self) -> None:
        """Lets go of the folder, whole: the next to write it may be another worker."""
        if self._checkpoints:
            self._checkpoints.wait()
        if self._lock is not None:
            os.close(self._lock)
        self._checkpoints = self._lock = None

    def _at_commit(self, commit) -> None:
        if self._state.place.step % elastic.COMMIT_STEPS == 0:
            commit()

    def _commit(self) -> None:
        self._committed = self._state.snapshot()


def hold(folder: Path) -> int:
    """A lock on a folder, where its file system knows locks, until what is returned is closed. Raises UserError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"--output_dir: another training is writing {folder}") from None
    except OSError:
        pass
    return descriptor


def save_augmentations(feed, folder) -> None:
    with dataclasses.replace(feed, shard=0, shards=1).train(0, 1, 64, 64) as batches:
        write_grid(folder / "augmentations.png", next(batches)[0].numpy())
