"""Bigbatch: trains a convolutional network with large batches, on this process or on every worker it is started as.

    uv run train.py                                       the built-in digits, on one worker
    uv run horovodrun --gloo -np 2 python train.py        the same on two
    uv run train.py --flagfile=R --dry_run                the plan of a recipe, as JSON
    uv run train.py --mode=evaluate --checkpoint=RUN/checkpoints
"""
import contextlib
import gc
import json
import os
import sys
from pathlib import Path

from data.dataset import DatasetError
from data.named import open_named
from data.stage import stage
from optim.schedules import Piecewise
from reporting.run_folder import as_json
from reporting.standard_output import json_alone_on_stdout
from training import flags, workers
from training.errors import UserError, complain
from training.faults.stopping import EXIT_CODE, Stopped, StopRequest
from training.plan import Plan, make_plan

PAPERS_NODE = 4  # workers a node, where --workers plans for a cluster of which no more is known: arXiv:1811.05233's


def main(argv) -> int:
    """Runs a command line; returns the exit code: 0 done, 2 a flag is wrong, 75 stopped on request, 1 anything else."""
    workers.end_with_launcher()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's notices at start
    if {"--help", "-help", "-h", "--helpfull"} & set(argv[1:]):
        print(flags.help_text())
        return 0
    try:
        config, flags_text = flags.parse(argv)
        with json_alone_on_stdout():
            return dry_run(config) if config.dry_run else run(config, flags_text)
    except flags.UsageError as error:
        return ended(error, 2)
    except workers.AgreedError as error:
        return leave(error, 1)
    except Stopped as stopped:
        return leave(stopped, EXIT_CODE)
    except (UserError, DatasetError, OSError) as error:
        return ended(error, 1)
    except KeyboardInterrupt:
        return ended("interrupted", 130)
    except Exception as error:
        if workers.is_lost(error):
            return ended("another worker has stopped; its own message says why, unless it was killed", 1)
        raise


def ended(message, code) -> int:
    complain(message)
    return code


def leave(message, code) -> int:
    """What all workers say and do alike."""
    complain(message)
    with contextlib.suppress(Exception):  # one of them may be gone by now
        workers.leave()
    return code


def dry_run(config) -> int:
    launched = workers.launched()
    if launched.size > 1:  # a worker that is to train would wait for this one
        start(config)
    samples = config.train_samples or open_named(config.data_dir).train.samples
    local_size = config.workers_per_node or (PAPERS_NODE if config.workers else launched.local_size)
    plan = planned(config, config.workers or launched.size, local_size, samples)
    if launched.rank == 0:
        print(json.dumps(plan.as_json(), indent=1))
    return 0


def planned(config, size, local_size, samples) -> Plan:
    return make_plan(config, size, samples, workers.route(config, size, local_size))


def run(config, flags_text) -> int:
    stop = StopRequest()
    if config.mode == "train":
        stop.listen()
    dataset = open_named(config.data_dir)
    if config.mode == "train" and not config.elastic:
        launched = workers.launched()
        planned(config, launched.size, launched.local_size, dataset.train.samples)  # what is wrong shows at once
    worker = start(config)
    if config.mode == "train":
        summary = train(config, flags_text, dataset, worker, stop)
    else:
        summary = evaluate(config, dataset, worker)
    if workers.renumbered(worker).rank == 0:
        print(as_json(summary), flush=True)
    workers.leave()
    return 0


def train(config, flags_text, dataset, worker, stop) -> dict:
    from training.session import Session

    return Session(config, flags_text, dataset, worker, stop).train()


def evaluate(config, dataset, worker) -> dict:
    from training import fit

    with workers.together():
        if config.stage_dir:
            dataset = stage(dataset, Path(config.stage_dir))
        feed = fit.make_feed(config, dataset, worker)
    batch_size = Piecewise.parse(config.batch_size, int).values[-1]
    summary = fit.evaluate_checkpoint(config, dataset, feed, batch_size)
    report_evaluation(config, summary, worker)
    return summary


def start(config) -> workers.Worker:
    """Starts this worker, if all were started with the same flags."""
    if config.timeline:
        if not Path(config.timeline).absolute().parent.is_dir():
            raise UserError(f"--timeline: there is no folder for {config.timeline}")
        os.environ["HOROVOD_TIMELINE"] = str(Path(config.timeline).absolute())
    worker = workers.start(config.seed, config.deterministic, config if config.mode == "train" else None)
    if not config.elastic:  # where the others may be in the middle of a training
        workers.check_same_flags(vars(config))
    return worker


def report_evaluation(config, summary, worker) -> None:
    from reporting.progress import validation_line
    from reporting.run_folder import write_json

    with workers.together():
        if worker.rank == 0:
            print(validation_line(summary), file=sys.stderr)
            if config.output_dir:
                Path(config.output_dir).mkdir(parents=True, exist_ok=True)
                write_json(Path(config.output_dir) / "summary.json", summary)


if __name__ == "__main__":
    code = main(sys.argv)
    gc.freeze()  # Python's last collections need not walk through all of TensorFlow, which takes 0.6 s
    sys.exit(code)
