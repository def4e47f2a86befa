"""Probes for the steps of launch.first_hour that no other command covers.

    python -m launch.first_hour_probe placement FLAGS              runs a training step with TensorFlow's placement log
    python -m launch.first_hour_probe update --rounds=N FLAGS      times a training step and the update alone, in turn
    python -m launch.first_hour_probe stop FOLDER WORKERS FLAGS    stops a training run with SIGUSR1, and resumes it

FLAGS are train.py's; --batch_size is the micro-batch size.
"""
import json
import os
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path

from common import command
from common.errors import ExitCode, UserError
from data.named import open_named
from training import flags

MARK = "first_hour: the step begins"
CALLS = 5  # per candidate and round


def training_step(arguments, log_placement: bool = False):
    """Returns (settings, dataset, a function that runs a training step on a resident batch) for train.py's flags."""
    settings = flags.parse(["first_hour_probe", *arguments])
    import tensorflow as tf

    from data.synthetic import SyntheticFeed
    from experiments import stage_times
    from training.run import start_and_check_flags

    tf.debugging.set_log_device_placement(log_placement)
    start_and_check_flags(settings)
    recipe = settings.recipe
    dataset, batch = open_named(recipe.data_dir), recipe.batch_size.values[0]
    step, _ = stage_times.make_step(recipe, dataset, settings.launch.xla == "true")
    with SyntheticFeed(dataset, recipe.final_image_size, recipe.seed).train(0, 1, batch, batch) as batches:
        return settings, dataset, lambda: step(batches)


def placement(arguments) -> None:
    """Runs a training step while TensorFlow logs the placement of operations on standard error."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"  # the placement log has the lowest level
    *_, step = training_step(arguments, log_placement=True)
    print(MARK, file=sys.stderr, flush=True)
    step()


def update(arguments) -> None:
    """Prints milliseconds and the update's share of the step: medians over rounds that run all candidates in turn."""
    [rounds] = [int(word.partition("=")[2]) for word in arguments if word.startswith("--rounds=")]
    settings, dataset, step = training_step([word for word in arguments if not word.startswith("--rounds=")])
    import tensorflow as tf

    from benchmarks.optimizer_step import updates
    from optim.lars import LARS
    from training import build

    shapes = [variable.shape for variable in build.make_model(settings.recipe, dataset).trainable_variables]
    keras = tf.keras.optimizers.SGD(1e-3, 0.9, jit_compile=False)
    calls = {"step": step, "LARS": updates(shapes, LARS(1e-3, 0.9, weight_decay=5e-5)), "SGD": updates(shapes, keras)}
    times = {name: [] for name in calls}
    for number in range(1 + rounds):  # the first round compiles, and does not count
        for name, call in calls.items():
            tf.test.experimental.sync_devices()
            begun = time.perf_counter()
            for _ in range(CALLS):
                call()
            tf.test.experimental.sync_devices()
            if number:
                times[name].append((time.perf_counter() - begun) / CALLS * 1e3)
    fractions = {name: statistics.median(part / total for part, total in zip(times[name], times["step"], strict=True))
              for name in ("LARS", "SGD")}
    print(json.dumps({
        "training step, ms": statistics.median(times["step"]), "LARS's update, ms": statistics.median(times["LARS"]),
        "share of the step": f"{fractions['LARS']:.1%}", "Keras's SGD, ms": statistics.median(times["SGD"]),
        "its share": f"{fractions['SGD']:.1%}"}))


def stop(arguments) -> None:
    """Prints the exit codes of the stopped and the resumed run, and their differences from an undisturbed run."""
    from benchmarks import faults

    folder, workers, *words = Path(arguments[0]), int(arguments[1]), *arguments[2:]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    undisturbed, disturbed = folder / "undisturbed", folder / "stopped"
    if code := faults.start(undisturbed, workers, words).wait():
        raise UserError(f"the undisturbed training exited with {code}: {tail(undisturbed)}")
    launcher = faults.start(disturbed, workers, words)
    faults.wait_for(lambda: faults.newest_step(disturbed) >= 2, launcher)
    faults.trainers(launcher)[-1].send_signal(signal.SIGUSR1)
    stopped = launcher.wait()
    if stopped != ExitCode.STOPPED:
        raise UserError(f"the training exited with {stopped} on SIGUSR1, not {ExitCode.STOPPED:d}: {tail(disturbed)}")
    if resumed := faults.start(disturbed, workers, words).wait():
        raise UserError(f"the resumed training exited with {resumed}: {tail(disturbed)}")
    print(json.dumps({"stopped": stopped, "resumed": resumed, "differ": faults.differences(undisturbed, disturbed)}))


def tail(folder: Path) -> str:
    """Returns the last line of a run's log."""
    return Path(f"{folder}.log").read_text(errors="replace").strip().rpartition("\n")[2][:300]


def main(argv) -> int:
    """Runs a command line; returns the exit code."""
    with command.shell("first_hour_probe") as ending:
        {"placement": placement, "update": update, "stop": stop}[argv[1]](argv[2:])
    return ending.code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
