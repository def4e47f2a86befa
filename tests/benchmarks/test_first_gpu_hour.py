"""benchmarks/first_gpu_hour.sh: its commands on CPUs, one that fails, and those that it runs on GPUs."""
import json
import os
import shlex
import signal
import subprocess
import time

import psutil
import pytest
from conftest import BIN, ROOT

from common import flags
from experiments import benchmark

SCRIPT = ROOT / "benchmarks" / "first_gpu_hour.sh"
# Runs instead of Python, mpirun and nvidia-smi: writes its command line, and does nothing.
RECORDS = """#!/bin/sh
echo "${HOROVOD_ENABLE_ASYNC_COMPLETION-1} ${0##*/} $*" >>"${0%/*}/commands"
case "$*" in *--count) echo $GPUS ;; esac
"""


def launch(*arguments, **variables):
    return subprocess.run([SCRIPT, *map(str, arguments)], text=True, capture_output=True, timeout=1800,
                          stdin=subprocess.DEVNULL, env=os.environ | variables)


def stand_ins(folder, program: str = RECORDS) -> dict[str, str]:
    """The variables with which the script runs this program instead of those that need a GPU."""
    for name in ("python", "mpirun", "nvidia-smi"):
        (folder / name).write_text(program)
        (folder / name).chmod(0o755)
    return {"BIGBATCH_PYTHON": str(folder / "python")}


@pytest.mark.launchers
def test_each_kind_runs_on_cpus_and_what_fails_stops_nothing_else(tmp_path):
    """There is no dataset, which is an error of the preflight and of decoding."""
    done = launch("--pretend", tmp_path, "/nowhere")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"first_gpu_hour.sh: these failed: preflight decode-cpu; see NAME.log in {tmp_path}")
    assert all("no folder /nowhere" in (tmp_path / f"{name}.log").read_text() for name in ("preflight", "decode-cpu"))
    assert "1 passed" in (tmp_path / "tests.txt").read_text()
    assert "bigbatch LARS, weight decay" in (tmp_path / "optimizer_step.txt").read_text()
    [*alone, exchanged] = [json.loads((tmp_path / f"{name}.json").read_text())["rows"][0] for name in (
        "speed-float32-32-xla-false", "transposing", "exchange-2-ring-fp16")]
    assert all(row["images_per_second"] > 0 and row["workers"] == 1 for row in alone)
    spans = [json.loads((tmp_path / f"span-16-micro-{size}.json").read_text())["rows"][0] for size in (16, 32)]
    assert [(row["micro_batch_size"], row["accumulation_steps"]) for row in spans] == [(16, 2), (32, 1)]
    kernels = json.loads((tmp_path / "kernels.json").read_text())["kernels"]
    filters, inputs = (next(kernels[name]["calls"] for name in kernels if f"Conv2DBackprop{of}" in name)
                       for of in ("Filter", "Input"))
    assert 3 * inputs == 2 * filters > 0  # of three layers; nobody needs the gradient of the images
    done = subprocess.run([BIN / "python", "-m", "benchmarks.fastest", tmp_path], cwd=ROOT, text=True,
                          capture_output=True, timeout=300)
    assert "--micro_batch_size=32\n--xla=false\n" in done.stdout, done.stderr
    assert exchanged["workers"] == 2 and exchanged["compression"] == "fp16" and exchanged["images_per_second"] > 0
    assert all(path.read_text().startswith("$ '") for path in tmp_path.glob("*.log"))


@pytest.mark.parametrize("gpus", [1, 8])
def test_the_commands_for_gpus_have_flags_that_their_programs_take(tmp_path, gpus):
    """The hour itself is only pretended here: what is left out then has to be right, too."""
    out = tmp_path / "out"
    done = launch(out, "DATA", GPUS=str(gpus), **stand_ins(tmp_path))
    assert done.returncode == 0, done.stderr
    steps, waits, decoding, spans = [], [], [], []
    for line in (tmp_path / "commands").read_text().splitlines():
        words = shlex.split(line)
        if "experiments.benchmark" in words:
            values = flags.read(benchmark.all_flags(), words[words.index("experiments.benchmark"):])
            assert values.model == "resnet50" and values.json and values.seconds >= 1
            if values.global_batch_size:
                workers = int(words[words.index("-np") + 1])
                if values.batch_norm_span:
                    spans.append((values.batch_norm_span, values.micro_batch_size, *values.global_batch_size))
                    continue
                assert [*values.global_batch_size] == [str(workers * values.micro_batch_size)]
                waits.append(words[0] == "0")
                steps.append((values.persistent_batch_norm, workers, values.precision, values.micro_batch_size,
                              values.xla, values.allreduce, values.compression))
            else:
                assert values.data_dir == "DATA"
                decoding.append((values.dali_device, values.hw_decoder_load))
    speed = [(True, 1, precision, size, xla, "ring", "none") for precision in ("mixed_float16", "float32",
             "mixed_bfloat16") for size in (64, 128, 256) for xla in ("false", "true", "auto")]
    usual = ("mixed_float16", 256, "false")
    exchange = [(True, 1, *usual, "ring", "none"), *((True, 8, *usual, *how) for how in (
        ("ring", "none"), ("torus", "none"), ("ring", "fp16"), ("ring", "none")))]
    assert steps == [*speed, (False, 1, *usual, "ring", "none"), *(exchange if gpus > 1 else [])]
    assert waits == [*[False] * (len(steps) - 1), gpus > 1]
    assert decoding == [("cpu", 0.65), ("gpu", 0), ("gpu", 0.65), ("gpu", 0.9)]
    assert spans == [("32", 32, "256"), ("32", 256, "256")]
    assert len([*out.glob("*.json")]) == len(steps) + len(decoding) + len(spans) + len(["kernels"])


def test_sizes_and_precisions_are_chosen(tmp_path):
    out = tmp_path / "out"
    assert launch(out, GPUS="1", SIZES="16 32", PRECISIONS="float32", **stand_ins(tmp_path)).returncode == 0
    assert {path.stem for path in out.glob("speed-*.json")} == {
        f"speed-float32-{size}-xla-{xla}" for size in (16, 32) for xla in ("false", "true", "auto")}
    assert "'--micro_batch_size=32' '--precision=float32'" in (out / "transposing.log").read_text()


def test_a_stop_ends_the_command_and_the_script(tmp_path):
    """By SIGTERM: a shell cannot trap a SIGINT that was ignored when it started, as in the background of another."""
    variables = stand_ins(tmp_path, '#!/bin/sh\n[ "$1" = -L ] || exec sleep 600\n')
    (tmp_path / "python").write_text("#!/bin/sh\necho 1\n")
    with subprocess.Popen([SCRIPT, tmp_path / "out"], env=os.environ | variables) as process:
        deadline = time.monotonic() + 300
        while "sleep" not in {one.name() for one in psutil.Process(process.pid).children(recursive=True)}:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        under_way = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 130 and not psutil.wait_procs(under_way, timeout=300)[1]


@pytest.mark.parametrize(("arguments", "code", "message"), [
    ((), 1, "nvidia-smi lists no GPU here; --pretend tries the script on CPUs"),
    (("--pretnd",), 2, "use: benchmarks/first_gpu_hour.sh [--pretend] [DIR [DATA]]")])
def test_what_cannot_be_measured_is_one_line(tmp_path, arguments, code, message):
    variables = stand_ins(tmp_path, "#!/bin/sh\nexit 9\n")
    done = subprocess.run([SCRIPT, *arguments], cwd=tmp_path, text=True, capture_output=True, timeout=300,
                          env=os.environ | variables)
    assert (done.returncode, done.stderr) == (code, f"first_gpu_hour.sh: {message}\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.campaign
def test_the_tests_for_gpus_pass_on_cpus():
    """All of those that --pretend leaves out, too."""
    done = subprocess.run(
        ["env", "BIGBATCH_PRETEND_GPU=1", BIN / "python", "-m", "pytest", "-m", "gpu", "-o",
         "addopts=--import-mode=importlib", "-p", "no:cacheprovider", ROOT / "tests" / "test_gpu.py"],
        cwd=ROOT, text=True, capture_output=True, timeout=1800)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-5000:]
