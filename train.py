"""Bigbatch: trains a convolutional network with large batches, on this process or on every worker it is started as.

    uv run train.py                                       the built-in digits, on one worker
    uv run horovodrun --gloo -np 2 python train.py        the same on two
    uv run train.py --flagfile=R --dry_run                the plan of a recipe, as JSON
    uv run train.py --mode=evaluate --checkpoint=RUN/checkpoints
"""
import dataclasses
import json
import os
import sys
from datetime import datetime
from pathlib import Path

from data.dataset import DatasetError
from data.named import open_named
from data.stage import stage
from optim.schedules import Piecewise
from reporting.run_folder import as_json
from reporting.standard_output import json_alone_on_stdout
from training import flags, workers
from training.errors import UserError
from training.plan import make_plan


def main(argv) -> int:
    """Runs a command line; returns the exit code: 0 done, 2 a flag is wrong, 1 anything else is."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow's notices at start
    if {"--help", "-help", "-h", "--helpfull"} & set(argv[1:]):
        print(flags.help_text())
        return 0
    try:
        config, flags_text = flags.parse(argv)
        with json_alone_on_stdout():
            return dry_run(config) if config.dry_run else run(config, flags_text)
    except flags.UsageError as error:
        return complain(error, 2)
    except workers.AgreedError as error:
        complain(error, 1)
        workers.leave()
        return 1
    except (UserError, DatasetError, OSError) as error:
        return complain(error, 1)
    except KeyboardInterrupt:
        return complain("interrupted", 130)


def complain(error, code) -> int:
    print(f"train.py: {error}", file=sys.stderr, flush=True)
    return code


def dry_run(config) -> int:
    rank, size = workers.launched()
    if size > 1:  # a worker that is to train would wait for this one
        start(config)
    samples = config.train_samples or open_named(config.data_dir).train.samples
    plan = make_plan(config, config.workers or size, samples)
    if rank == 0:
        print(json.dumps(plan.as_json(), indent=1))
    return 0


def run(config, flags_text) -> int:
    dataset = open_named(config.data_dir)
    plan = make_plan(config, workers.launched()[1], dataset.train.samples) if config.mode == "train" else None
    worker = start(config)
    from training import fit

    with workers.together():
        if config.stage_dir:
            dataset = stage(dataset, Path(config.stage_dir))
        feed = fit.make_feed(config, dataset, worker)
    if plan:
        summary = train(config, flags_text, dataset, plan, feed, worker)
    else:
        batch_size = Piecewise.parse(config.batch_size, int).values[-1]
        summary = fit.evaluate_checkpoint(config, dataset, feed, batch_size)
        report_evaluation(config, summary, worker)
    if worker.rank == 0:
        print(as_json(summary), flush=True)
    workers.leave()
    return 0


def start(config) -> workers.Worker:
    """Starts this worker, if all were started with the same flags."""
    worker = workers.start(config.seed)
    workers.check_same_flags(vars(config))
    return worker


def train(config, flags_text, dataset, plan, feed, worker) -> dict:
    from reporting.progress import Progress
    from reporting.report import write_report
    from reporting.run_folder import RunFolder
    from training import fit

    with workers.together():
        model = fit.make_model(config, dataset, worker.rank)
        optimizer = fit.make_optimizer(config, model)
    folder, observers = None, []
    with workers.together():
        if worker.rank == 0:
            folder = new_run_folder(config)
            samples = sum(interval.steps * interval.phase.global_batch_size for interval in plan.intervals())
            observers = [RunFolder(folder, plan.as_json(), flags_text), Progress(plan.epochs, samples)]
            print(f"run: {folder}", file=sys.stderr)
            if config.save_augmentations:
                save_augmentations(feed, folder)
    summary = fit.Fit(config, plan, feed, model, optimizer).run(folder and folder / "checkpoints", observers)
    with workers.together():
        for observer in observers:
            observer.end(summary)
        if folder:
            print(f"report: {write_report(folder)}", file=sys.stderr)
    return summary


def save_augmentations(feed, folder) -> None:
    from reporting.run_folder import write_grid

    with dataclasses.replace(feed, shard=0, shards=1).train(0, 1, 64, 64) as batches:
        write_grid(folder / "augmentations.png", next(batches)[0].numpy())


def report_evaluation(config, summary, worker) -> None:
    from reporting.progress import validation_line
    from reporting.run_folder import write_json

    with workers.together():
        if worker.rank == 0:
            print(validation_line(summary), file=sys.stderr)
            if config.output_dir:
                Path(config.output_dir).mkdir(parents=True, exist_ok=True)
                write_json(Path(config.output_dir) / "summary.json", summary)


def new_run_folder(config) -> Path:
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{config.model}-{os.getpid()}"
    folder = Path(config.output_dir or Path("runs") / name).absolute()
    try:
        if any((folder / "checkpoints").glob("*")):
            raise UserError(f"--output_dir: {folder} holds a run already; choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output_dir: {folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"--output_dir: {folder} cannot be written")
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv))
