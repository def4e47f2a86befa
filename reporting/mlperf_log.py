"""--mlperf_log: MLPerf's events of a training, for the compliance checker of the package mlperf-logging.

An event is a line of JSON. The package has a writer, too, but it needs pandas and SciPy, logs through a logger that the
whole process shares and names the line of code that logs. So this file writes the lines, and the tests check them with
the package.
"""
import errno
import json
import time
from pathlib import Path

import psutil

from common.errors import UserError, complain
from common.files import as_json
from reporting.observer import Evaluation, Observer, RunInfo, Update, top1_of
from reporting.run_folder import RunFolder

PREFIX = ":::MLLOG "
TARGET_TOP1 = 0.759  # of MLPerf's ResNet-50, which its checker demands in the closed division
KINDS = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}


class MLPerfLog(Observer):
    """Writes the events to a file. The run ends for MLPerf, and with it the log, at the evaluation that reaches 0.759.

    The events of an evaluation, and of the training before it, are written after it, with their times. A resumed run
    and a rollback remove those after their checkpoint and go on. Times are wall-clock times, so they include the time
    between two processes. files: keeps what cannot be written, as on a full disk.
    """

    def __init__(self, files: RunFolder, path):
        self._files, self._path = files, Path(path).absolute()

    def start(self, run: RunInfo) -> None:
        self._trained_until, self._is_over = now(), False
        if len(run.plan["phases"]) > 1:
            raise UserError("--mlperf_log: MLPerf's log has one batch size and one batch-norm span, but this training "
                            "changes them, or the image size; remove the flag")
        if (name := run.flags["optimizer"]) not in ("lars", "sgd"):
            raise UserError(f"--mlperf_log: MLPerf has rules for the optimizers lars and sgd, not for {name}; remove "
                            "the flag")
        try:
            self._log = self._files.log(self._path)
            if run.progress.step:
                self.rewind(run.progress)
            else:
                self._began, self._epochs = self._trained_until, 0
                self._log.keep(beginning(run, self._began))
            self._log.save()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise UserError(f"--mlperf_log: {self._path} cannot be written: {error.strerror}") from None

    def rewind(self, progress) -> None:
        """Removes the events after the last evaluation of this progress. Lines that cannot be read are left out.

        A run_stop that followed this evaluation, or one before, stays if it was a success; otherwise the run goes on.
        """
        lines = [line for line in self._log.lines if parsed(line)]
        events = [parsed(line) for line in lines]
        starts = [number for number, event in enumerate(events) if event["key"] in ("run_start", "eval_stop")]
        end = starts[:progress.evaluations + 1][-1] + 1 if starts else 0
        self._is_over = any(event["metadata"].get("status") == "success" for event in events[end:end + 1])
        if len(starts) <= progress.evaluations and not (self._is_over and events[starts[0]]["key"] == "run_start"):
            complain(f"warning: --mlperf_log: {self._path} lacks the start of this run; nothing is added to it")
            self._is_over = True
            return
        last = events[end - 1]
        self._began, self._epochs = last["time_ms"], last["metadata"].get("epoch_num", 0)
        self._log.keep(lines[:end + self._is_over])

    def step(self, update: Update) -> None:
        self._trained_until = now()

    def evaluation(self, evaluation: Evaluation) -> None:
        if self._is_over:
            return
        epochs, top1, trained, end = evaluation.row["epoch"], top1_of(evaluation.row), self._trained_until, now()
        first = {"first_epoch_num": self._epochs + 1}
        self._write(
            event("block_start", None, self._began, **first, epoch_count=epochs - self._epochs),
            event("block_stop", None, trained, **first),
            event("eval_start", None, trained, epoch_num=epochs),
            event("eval_accuracy", top1, end, epoch_num=epochs),
            event("eval_stop", None, end, epoch_num=epochs))
        self._began, self._epochs = end, epochs
        if top1 >= TARGET_TOP1:
            self._stop("success")

    def end(self, summary: dict) -> None:
        if not self._is_over:
            self._stop("aborted")

    def _stop(self, status):
        self._write(event("run_stop", None, now(), status=status))
        self._is_over = True

    def _write(self, *lines):
        self._log.lines.extend(lines)
        self._files.save()


def parsed(line: str) -> dict | None:
    """Returns the event in a line, or None if it is another line, or incomplete."""
    try:
        return json.loads(line.removeprefix(PREFIX)) if line.startswith(PREFIX) and line.endswith("\n") else None
    except ValueError:
        return None


def beginning(run: RunInfo, ready: int) -> list[str]:
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
            "submission_platform": f"{workers} worker{'s' * (workers > 1)} on {hosts} host{'s' * (hosts > 1)}"}


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
            "model_bn_span": plan["batch_norm_span"][0], "opt_name": name,
            **{f"{name}_opt_{key}": value for key, value in named.items()},
            f"{'lars_' * is_lars}opt_learning_rate_warmup_epochs": warmup,
            **({"lars_epsilon": flags["lars_epsilon"]} if is_lars else {})}


def event(key: str, value, time_ms: int, **metadata) -> str:
    """Returns an event as a line of MLPerf's log."""
    kind = KINDS.get(key.rpartition("_")[2], "POINT_IN_TIME")
    return PREFIX + as_json({"namespace": "", "time_ms": time_ms, "event_type": kind, "key": key, "value": value,
                             "metadata": metadata}) + "\n"


def now() -> int:
    """Returns the time in milliseconds since 1970."""
    return int(1000 * time.time())
