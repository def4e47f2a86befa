"""MLPerf's log of a training: `--observer=examples.mlperf_log:MLPerfLog` writes it to RUN/mlperf.log.

An event is a line of JSON. MLCommons' package mlperf-logging checks the file. The package has a writer, too, but it
needs pandas and SciPy, logs through a logger that the whole process shares and names the line of code that logs. So
this file writes the lines, and the tests check them with the package.
"""
import contextlib
import json
import time
from pathlib import Path

import psutil

from common.errors import complain, plural
from common.files import as_json, write_atomically
from common.run_folder import top1_of
from training.observer import Evaluation, Observer, RunInfo, Update

PREFIX = ":::MLLOG "
TARGET_TOP1 = 0.759  # of MLPerf's ResNet-50, which its checker demands in the closed division
KINDS = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}


class MLPerfLog(Observer):
    """Writes the events. The run ends for MLPerf, and with it the log, at the evaluation that reaches 0.759.

    The events of an evaluation, and of the training before it, are written after it, with their times. A resumed run
    and a rollback remove those after their checkpoint and go on. Times are wall-clock times, so they include the time
    between two processes.
    """

    def start(self, run: RunInfo) -> None:
        """Raises ValueError for a training that MLPerf's rules do not know."""
        if len(run.plan["phases"]) > 1:
            raise ValueError("MLPerf's log has one batch size and one batch-norm span, but this training changes them, "
                             "or the image size")
        if (name := run.flags["optimizer"]) not in ("lars", "sgd"):
            raise ValueError(f"MLPerf has rules for the optimizers lars and sgd, not for {name}")
        self._path, self._trained_until = run.folder / "mlperf.log", now()
        if run.progress.step:
            self._events = read(self._path)
            self.rewind(run.progress)
        else:
            self._events, self._is_over = beginning(run, self._trained_until), False
            self._began, self._epochs = self._trained_until, 0
        with contextlib.suppress(OSError):  # a full disk, say: each evaluation tries again, and training tells of it
            self._save()

    def rewind(self, progress) -> None:
        """Removes the events after the last evaluation of this progress.

        A run_stop that followed this evaluation, or one before, stays if it was a success; otherwise the run goes on.
        """
        ends = [number for number, one in enumerate(self._events, 1) if one["key"] in ("run_start", "eval_stop")]
        end = ends[:progress.evaluations + 1][-1] if ends else 0
        after = self._events[end:end + 1] if ends else ()
        self._is_over = any(one["metadata"].get("status") == "success" for one in after)
        if len(ends) <= progress.evaluations and not self._is_over:
            complain(f"warning: {self._path} lacks the start of this run; nothing is added to it")
            self._events, self._is_over = [], True
            return
        last = self._events[end - 1]
        self._began, self._epochs = last["time_ms"], last["metadata"].get("epoch_num", 0)
        self._events = self._events[:end + self._is_over]

    def step(self, update: Update) -> None:
        self._trained_until = now()

    def evaluation(self, evaluation: Evaluation) -> None:
        if self._is_over:
            return
        epochs, top1, trained, end = evaluation.row["epoch"], top1_of(evaluation.row), self._trained_until, now()
        first = {"first_epoch_num": self._epochs + 1}
        self._events += [
            event("block_start", None, self._began, **first, epoch_count=epochs - self._epochs),
            event("block_stop", None, trained, **first),
            event("eval_start", None, trained, epoch_num=epochs),
            event("eval_accuracy", top1, end, epoch_num=epochs),
            event("eval_stop", None, end, epoch_num=epochs)]
        self._began, self._epochs = end, epochs
        if top1 >= TARGET_TOP1:
            self._stop("success")
        self._save()

    def end(self, summary: dict) -> None:
        if not self._is_over:
            self._stop("aborted")
        self._save()

    def _stop(self, status):
        self._events.append(event("run_stop", None, now(), status=status))
        self._is_over = True

    def _save(self):
        if self._events:
            write_atomically(self._path, "".join(f"{PREFIX}{as_json(one)}\n" for one in self._events))


def read(path: Path) -> list[dict]:
    """Returns the events of a log. Lines that are none, and a file that is missing, are left out."""
    events = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            events.append(json.loads(line.removeprefix(PREFIX)))
    return events


def beginning(run: RunInfo, ready: int) -> list[dict]:
    """Returns the events up to the start of the training at the time `ready`."""
    started = int(1000 * psutil.Process().create_time())
    values = submission(run) | {"cache_clear": False}  # only an administrator may drop the caches of the nodes
    return [*(event(key, value, started) for key, value in values.items()), event("init_start", None, started),
            *(event(key, value, ready) for key, value in hyperparameters(run).items()),
            event("init_stop", None, ready), event("run_start", None, ready)]


def submission(run: RunInfo) -> dict:
    """Returns what MLPerf asks of a submission, which this is not. The closed division is the one with a target."""
    workers, hosts = run.plan["workers"], len(run.hosts)
    return {"submission_benchmark": "resnet", "submission_division": "closed", "submission_status": "research",
            "submission_org": "none (not a submission)",
            "submission_platform": f"{plural(workers, 'worker')} on {plural(hosts, 'host')}"}


def hyperparameters(run: RunInfo) -> dict:
    """Returns the settings under MLPerf's names. Those that a training lacks, such as a decay, are left out.

    The decay steps do not include the warm-up if the decay counts from its end, as in MLPerf's reference.
    """
    flags, plan, dataset, [phase] = run.flags, run.plan, run.dataset, run.plan["phases"]
    name, batch = flags["optimizer"], phase["global_batch_size"]
    warmup = flags["warmup_epochs"] if flags["warmup"] != "none" else 0
    decayed = plan["epochs"] - (warmup if flags["decay_from"] == "warmup_end" else 0)
    named = {"base_learning_rate": plan["peak_learning_rate"], "momentum": plan["schedule"][0]["momentum"],
             "weight_decay": flags["weight_decay"]}
    if flags["lr_schedule"] == "poly":
        named |= {"end_learning_rate": flags["end_learning_rate"],
                  "learning_rate_decay_poly_power": flags["poly_power"],
                  "learning_rate_decay_steps": int(decayed * plan["train_samples"] / batch)}
    is_lars = name == "lars"  # whose names are not those of the other optimizers throughout
    return {"seed": flags["seed"], "train_samples": dataset.train.samples, "eval_samples": dataset.validation.samples,
            "global_batch_size": batch, "gradient_accumulation_steps": phase["accumulation_steps"],
            "model_bn_span": phase["batch_norm_span"], "opt_name": name,
            **{f"{name}_opt_{key}": value for key, value in named.items()},
            f"{'lars_' * is_lars}opt_learning_rate_warmup_epochs": warmup,
            **({"lars_epsilon": flags["lars_epsilon"]} if is_lars else {})}


def event(key: str, value, time_ms: int, **metadata) -> dict:
    """Returns an event of MLPerf's log."""
    kind = KINDS.get(key.rpartition("_")[2], "POINT_IN_TIME")
    return {"namespace": "", "time_ms": time_ms, "event_type": kind, "key": key, "value": value, "metadata": metadata}


def now() -> int:
    """Returns the time in milliseconds since 1970."""
    return int(1000 * time.time())
