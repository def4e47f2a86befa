"""Measures the time that a training takes to start and to end: `uv run python -m benchmarks.start [--rounds=5]`.

It trains one update, evaluates and writes the report. It times the whole process from command to exit, relative to a
bare `import tensorflow`. Each round times the import, then all cases in turn. The output shows the median ratios. For
one worker, another run of each model in each round times the stages from inside the process.
"""
import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
ENVIRONMENT = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
                            "TF_CPP_MIN_LOG_LEVEL": "3"}
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", "python")
GLOO = ("horovodrun", "--gloo", "-np", "2", "python")
CASES = {  # name -> (the words before train.py, model)
    "convnet": (("python",), "convnet"),
    "ResNet-20": (("python",), "resnet20"),
    "convnet, 2 workers, mpirun": (MPIRUN, "convnet"),
    "convnet, 2 workers, distributed.gloo": (("python", "-m", "distributed.gloo", *GLOO[1:]), "convnet"),
    "convnet, 2 workers, horovodrun": (GLOO, "convnet"),
}
STAGES = ("imports", "flags and data", "Horovod", "model", "tracing", "first step", "evaluation", "report", "the rest")


def seconds(*command) -> float:
    """Runs a command and returns the seconds from its start to its exit."""
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return time.perf_counter() - began


def training(words, model: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return seconds(*words, "train.py", *flags(model), f"--output_dir={folder}")


def flags(model: str) -> tuple[str, str]:
    return f"--model={model}", "--epochs=0.08"


def stages(model: str) -> dict[str, float]:
    """Returns the seconds of each stage. `the rest` includes the start and the end of Python."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/stages.json"
        total = seconds("python", "-m", "benchmarks.start", "--inside", path, *flags(model),
                        f"--output_dir={folder}/run")
        timed = json.loads(Path(path).read_text())
    return timed | {"the rest": total - sum(timed.values())}


def inside(path: str, arguments: list[str]) -> int:
    """Runs train.py in this process and times its stages."""
    timed = dict.fromkeys(STAGES[:-1], 0.0)

    def timing(stage, function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                timed[stage] += time.perf_counter() - began

        return call

    def imports():
        import horovod.tensorflow.keras  # noqa: F401
        import nvidia.dali.plugin.tf  # noqa: F401

    timing("imports", imports)()
    import train
    from distributed import world
    from plan import flags
    from reporting import report_writer
    from training import build, evaluate

    def make_train_step(*args, **kwargs):
        made = original(*args, **kwargs)

        def step(*inputs):
            if not timed["tracing"]:
                timing("tracing", made.get_concrete_function)(*inputs)
                return timing("first step", made)(*inputs)
            return made(*inputs)

        return step

    original, build.make_train_step = build.make_train_step, make_train_step
    for stage, owner, name in (
            ("flags and data", flags, "parse"), ("flags and data", train, "open_on_each_rank"),
            ("Horovod", world, "start"), ("model", build, "make_model"), ("model", build, "make_optimizer"),
            ("evaluation", evaluate.Evaluator, "__call__"), ("report", report_writer.ReportWriter, "close")):
        setattr(owner, name, timing(stage, getattr(owner, name)))
    code = train.main(["train.py", *arguments])
    Path(path).write_text(json.dumps(timed))
    return code


def main(argv) -> int:
    if argv[1:2] == ["--inside"]:
        return inside(argv[2], argv[3:])
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args(argv[1:]).rounds
    bars, ratios, parts = [], {name: [] for name in CASES}, {model: [] for _, model in CASES.values()}
    for number in range(1 + rounds):  # the first round only warms the page cache
        bar = seconds("python", "-c", "import tensorflow")
        relative = {name: training(words, model) / bar for name, (words, model) in CASES.items()}
        timed = {model: stages(model) for model in parts}
        if number:
            bars.append(bar)
            for name, ratio in relative.items():
                ratios[name].append(ratio)
            for model, timings in timed.items():
                parts[model].append({stage: seconds / bar for stage, seconds in timings.items()})
    print(f"import tensorflow: {statistics.median(bars):.2f} s; from command to exit, relative to it:")
    for name, own in ratios.items():
        print(f"  {name:34s}{statistics.median(own):6.2f}  ({min(own):.2f} to {max(own):.2f})")
    print("by stage, one worker:" + "".join(f"{model:>12s}" for model in parts))
    for stage in STAGES:
        print(f"  {stage:19s}" + "".join(
            f"{statistics.median(stages[stage] for stages in runs):12.2f}" for runs in parts.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
