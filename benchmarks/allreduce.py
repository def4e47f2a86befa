"""Compares all-reduce algorithms: ring and torus, in float32 and float16, against Open MPI's own.

    uv run --group benchmark python -m benchmarks.allreduce [--launcher=horovodrun] [--output=FILE] [--plot=here.svg]

For each number of workers on this machine and each size, all methods take turns in the same run: Allreduce through
mpi4py, which is the baseline; Horovod's ring, which over MPI is that same Allreduce; the torus of
distributed/torus.py, on the widest grid that is not a ring and on the squarest. Under horovodrun, over Gloo, the ring
is the baseline. The time of a round is that of the slowest worker. The tables show medians over the rounds, and the
median of the ratio to the baseline per round. Horovod's own hierarchical all-reduce exists only for NCCL. The torus
whose rows are the nodes does the same steps.

On one machine, a message costs next to nothing. But Horovod negotiates each collective in one of its cycles of 1 ms
(HOROVOD_CYCLE_TIME), and a torus has three collectives for each one of a ring. benchmarks.allreduce_hosts measures
several hosts. launch.scaling forecasts the times if messages have a cost.
"""
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
from absl import app
from absl import flags as absl_flags

from common.launcher import launched
from plan import grids

ROOT = Path(__file__).parents[1]
SIZES = [str(10**power) for power in range(3, 9)]
ROUNDS = (5, 41)  # minimum and maximum
GRADIENT = 4_000_000  # bytes of the largest gradient; larger sizes are split into several, as in a network
BAR = "Open MPI"
# If workers share cores, one that waits has to let the others run.
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1")
LAUNCHERS = {"mpirun": MPIRUN, "horovodrun": ("horovodrun", "--gloo")}
FLAGS = absl_flags.FlagValues()
absl_flags.DEFINE_list("workers", ["2", "4", "8", "16"], "Numbers of workers to measure.", flag_values=FLAGS)
absl_flags.DEFINE_list("sizes", SIZES, "Sizes of the float32 tensors in bytes.", flag_values=FLAGS)
absl_flags.DEFINE_enum("launcher", "mpirun", list(LAUNCHERS), "Program that starts the workers.", flag_values=FLAGS)
absl_flags.DEFINE_float("seconds", 3.0, "Approximate time per size, in seconds.", flag_values=FLAGS)
absl_flags.DEFINE_bool("worker", False, "Run as one of the workers of a launcher.", flag_values=FLAGS)
absl_flags.DEFINE_string("interface", None, "With --worker: interface whose sent bytes to count.", flag_values=FLAGS)
absl_flags.DEFINE_string("output", None, "JSON file for the results.", flag_values=FLAGS)
absl_flags.DEFINE_string("plot", None, "File for a plot of the times.", flag_values=FLAGS)


def chosen_grids(workers: int) -> list[tuple[int, int]]:
    """Returns the widest grid that is not a ring, and the squarest. A prime number has none."""
    real = [grid for grid in grids.grids(workers) if 1 not in grid]
    return [grid for grid in real if grid == real[0] or abs(grid[0] - grid[1]) == min(abs(x - y) for x, y in real)]


def connect() -> dict:
    """Starts Horovod with a torus on each of the chosen grids. Returns grid -> its process sets."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from distributed.torus import ProcessSets

    tf.get_logger().setLevel("ERROR")
    process_sets = {grid: ProcessSets(*grid) for grid in chosen_grids(launched().size)}
    hvd.init(process_sets=[process_set for sets in process_sets.values() for process_set in sets.process_sets])
    return process_sets


def methods(size: int, process_sets: dict) -> dict:
    """Returns name -> a function that sums `size` bytes of float32 over all workers. process_sets: from connect."""
    import horovod.tensorflow as hvd
    import tensorflow as tf
    from mpi4py import MPI

    from distributed.exchange import COMPRESSIONS, FUSION_MB, buckets, bytes_of

    values = np.ones(size // 4, np.float32)
    result = np.empty_like(values)
    gradients = [tf.constant(part) for part in np.array_split(values, -(-size // GRADIENT))]

    def bar():
        MPI.COMM_WORLD.Allreduce(values, result)
        return [result]

    made = {BAR: bar} if MPI.COMM_WORLD.size == hvd.size() else {}
    for compression_name, compression in COMPRESSIONS.items():
        def ring(compression=compression, name=f"ring_{size}_{compression_name}"):
            return [hvd.allreduce(gradient, op=hvd.Sum, compression=compression, name=f"{name}_{number}")
                    for number, gradient in enumerate(gradients)]

        suffix = "" if compression_name == "none" else f", {compression_name}"
        made[f"ring{suffix}"] = tf.function(ring, autograph=False)
        for grid, sets in process_sets.items():
            def torus(sets=sets, compression=compression, name=f"torus_{size}_{compression_name}_{grid}"):
                sizes = [*map(bytes_of, gradients)]
                return [total for bucket in buckets(sizes, FUSION_MB * 2**20) for total in sets.sum(
                    [gradients[number] for number in bucket], compression, f"{name}_{bucket[0]}")]

            made[f"torus {grid[0]}x{grid[1]}{suffix}"] = tf.function(torus, autograph=False)
    return made


def measure(sizes: list[int], seconds: float, interface: str | None) -> list[dict]:
    """Returns rows, the same on all workers: workers, bytes, method, milliseconds, ratio, sent.

    sent: bytes sent by the busiest host.
    """
    import horovod.tensorflow as hvd
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    process_sets = connect()
    rows = []
    for size in sizes:
        calls = methods(size, process_sets)
        for name, call in calls.items():  # the first call also compiles
            if any(np.any(np.asarray(tensor) != hvd.size()) for tensor in call()):
                raise SystemExit(f"benchmarks.allreduce: {name} returns a wrong sum")
        once = sum(timed(call) for call in calls.values())
        times, bar = {name: [] for name in calls}, next(iter(calls))
        sent = dict.fromkeys(calls, 0)
        for _ in range(int(np.clip(seconds / once, *ROUNDS))):
            for name, call in calls.items():
                before = left(interface)
                times[name].append(timed(call))
                sent[name] += left(interface) - before
        for name, own in times.items():
            ratio = statistics.median(time / bar for time, bar in zip(own, times[bar], strict=True))
            rows.append({"workers": hvd.size(), "bytes": size, "method": name, "ratio": ratio,
                         "milliseconds": 1e3 * statistics.median(own)})
            if interface:
                rows[-1]["sent"] = most(sent[name] / len(own))
    return rows


def timed(call) -> float:
    """Returns the seconds that the slowest worker takes."""
    most(0.0)
    began = time.perf_counter()
    call()
    return most(time.perf_counter() - began)


def most(value: float) -> float:
    """Returns the largest value of all workers. It is also a barrier."""
    import horovod.tensorflow as hvd
    import tensorflow as tf
    from mpi4py import MPI

    if MPI.COMM_WORLD.size > 1:
        MPI.COMM_WORLD.Barrier()
        return MPI.COMM_WORLD.allreduce(value, op=MPI.MAX)
    return float(hvd.allreduce(tf.constant(value, tf.float64), op=hvd.Max, name="most"))


def left(interface: str | None) -> int:
    """Returns the number of bytes that this host has sent through an interface."""
    return psutil.net_io_counters(pernic=True)[interface].bytes_sent if interface else 0


def worker_command(*arguments: str) -> list[str]:
    """Returns the command of one worker."""
    return [sys.executable, "-m", "benchmarks.allreduce", "--worker", *arguments]


def start(workers: int) -> list[dict]:
    """Measures with a number of workers on this machine. Returns their rows."""
    launcher, *words = LAUNCHERS[FLAGS.launcher]
    done = subprocess.run(
        [Path(sys.executable).with_name(launcher), *words, "-np", str(workers),
         *worker_command(f"--sizes={','.join(FLAGS.sizes)}", f"--seconds={FLAGS.seconds}")],
        cwd=ROOT, env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(next(line for line in done.stdout.splitlines() if "[{" in line).removeprefix("[0]<stdout>:"))


def table(rows: list[dict]) -> str:
    lines = [f"{'workers':>7}  {'bytes':>11}  {'method':<16}  {'ms':>9}  {'x baseline':>10}"]
    for row in rows:
        sent = f"  {row['sent']:>13,.0f} bytes sent" if "sent" in row else ""
        lines.append(f"{row['workers']:>7}  {row['bytes']:>11,}  {row['method']:<16}  {row['milliseconds']:>9.3f}  "
                     f"{row['ratio']:>10.2f}{sent}")
    return "\n".join(lines)


def fastest(rows: list[dict]) -> str:
    """Returns the fastest method for each number of workers and each size, without the baseline."""
    lines = []
    for workers in dict.fromkeys(row["workers"] for row in rows):
        best = {}
        for row in rows:
            if row["workers"] == workers and row["method"] != BAR:
                best[row["bytes"]] = min(best.get(row["bytes"], row), row, key=lambda row: row["milliseconds"])
        sizes = "; ".join(f"{size:,} bytes {row['method']}" for size, row in best.items())
        lines.append(f"{workers} workers: {sizes}")
    return "\n".join(lines)


def plot(rows: list[dict], path: str) -> None:
    from matplotlib.figure import Figure

    worlds = list(dict.fromkeys(row["workers"] for row in rows))
    figure = Figure(figsize=(5 * len(worlds), 4), layout="constrained")
    for axes, workers in zip(figure.subplots(1, len(worlds), squeeze=False)[0], worlds, strict=True):
        here = [row for row in rows if row["workers"] == workers]
        for name in dict.fromkeys(row["method"] for row in here):
            points = [(row["bytes"], row["milliseconds"]) for row in here if row["method"] == name]
            axes.loglog(*zip(*points, strict=True), marker=".", label=name)
        axes.set(title=f"{workers} workers", xlabel="bytes", ylabel="milliseconds")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path)


def main(argv) -> None:
    FLAGS(argv)
    if FLAGS.worker:
        import horovod.tensorflow as hvd

        rows = measure([int(size) for size in FLAGS.sizes], FLAGS.seconds, FLAGS.interface)
        if hvd.rank() == 0:
            print(json.dumps(rows), flush=True)
        return
    rows = [row for workers in FLAGS.workers for row in start(int(workers))]
    print(table(rows))
    print(fastest(rows))
    if FLAGS.output:
        Path(FLAGS.output).write_text(json.dumps(rows))
    if FLAGS.plot:
        plot(rows, FLAGS.plot)


if __name__ == "__main__":
    app.run(lambda argv: main(sys.argv), argv=sys.argv[:1])
