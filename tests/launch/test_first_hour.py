"""The first hour on a GPU: its steps on CPUs, what it says of a command that fails or hangs, and its page."""
import html
import json
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import BIN, ROOT, run

from common import flags
from experiments import benchmark
from launch import first_hour
from launch.first_hour import LIMITS, Command, commands
from reporting.first_hour import write_first_hour

SCRIPT = ROOT / "launch" / "first_gpu_hour.sh"
PUBLISHED = json.loads(first_hour.PUBLISHED.read_text())


def launch(*arguments, timeout=600):
    return subprocess.run([SCRIPT, *map(str, arguments)], text=True, capture_output=True, timeout=timeout,
                          stdin=subprocess.DEVNULL)


def results(folder) -> list[dict]:
    return json.loads((folder / "first_hour.json").read_text())["rows"]


def tables(page: str) -> list[list[list[str]]]:
    """The texts of a page's cells: tables, rows, cells."""
    return [[[html.unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row)]
             for row in re.findall(r"<tr>(.*?)</tr>", table)] for table in re.findall(r"<table>(.*?)</table>", page)]


def test_every_step_measures_what_it_is_for_on_cpus(tmp_path):
    done = launch("--pretend", f"--output_dir={tmp_path}")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {row["step"]: row for row in results(tmp_path)}
    assert [*rows] == [*LIMITS] and {row["outcome"] for row in rows.values()} == {"ok"}
    assert {path.stem for path in tmp_path.glob("*.log")} == {*LIMITS}
    assert rows["tests"]["result"].startswith("1 passed")
    assert rows["speed"]["images_per_second"] > 0 and rows["exchange"]["images_per_second"] > 0
    assert rows["data"]["train"] > 0 and rows["data"]["pipeline"] > 0
    assert rows["update"]["bigbatch LARS, weight decay, ms"] > 0
    assert rows["exchange"]["workers"] == 2 and rows["exchange"]["compression"] == "fp16"
    page = (tmp_path / "first_hour.html").read_text()
    assert not re.search(r'(src|href|action|data)="(?!data:)', page) and "numbers mean nothing" in page
    headings = [html.unescape(heading) for heading in re.findall(r"<h2>(.*?)</h2>", page)]
    assert headings == [*LIMITS, "Published figures"]


def test_a_command_that_fails_is_reported_and_the_others_go_on(tmp_path):
    done = launch("--pretend", "--only=data,update", "--data_dir=/nowhere", f"--output_dir={tmp_path}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("first_hour: these steps failed: data; ")
    assert {row["step"]: row["outcome"] for row in results(tmp_path)} == {"data": "failed", "update": "ok"}
    [shown] = [table for table in tables((tmp_path / "first_hour.html").read_text())
               if table[0][0] == "hw decoder load"]
    assert "/nowhere" in shown[1][shown[0].index("note")]


HANGS = """
import subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(f"other {other.pid}", flush=True)
time.sleep(600)
"""


def test_a_command_that_hangs_is_killed_with_all_it_has_started(tmp_path):
    hangs, quick = Command("speed", {}, [sys.executable, "-c", HANGS]), Command("checks", {}, ["true"])
    failed = first_hour.run_all([hangs, hangs, quick], tmp_path, {"pretend": True, "machine": {}, "rows": []},
                                {"speed": 3.0, "checks": 60.0})
    assert failed == ["speed"]
    assert [(row["outcome"], row["note"]) for row in results(tmp_path)] == [
        ("failed", "killed after 3 s"), ("not run", "no time was left"), ("ok", "")]
    [other] = re.findall(r"^other (\d+)$", (tmp_path / "speed.log").read_text(), re.MULTILINE)
    assert not psutil.pid_exists(int(other)) or psutil.Process(int(other)).status() == psutil.STATUS_ZOMBIE


def test_an_hour_that_is_stopped_leaves_what_it_has_and_no_process(tmp_path):
    process = subprocess.Popen([SCRIPT, "--pretend", "--only=checks", f"--output_dir={tmp_path}"],
                               stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "checks.log").exists() or not psutil.Process(process.pid).children():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    under_way = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130 and process.communicate()[1].splitlines()[-1] == "first_hour: interrupted"
    assert not psutil.wait_procs(under_way, timeout=60)[1]


BOX = "-" * 70
MPIRUN = f"train.py: --xla: what went wrong\n{BOX}\nprterun detected that a process exited\n  Exit code: 1\n{BOX}\n"


@pytest.mark.parametrize(("step", "code", "output", "outcome", "note"), [
    ("checks", 0, "well\n", "ok", ""),
    ("checks", 3, "one\nlast line\n\n", "failed", "exit code 3: last line"),
    ("checks", 1, "", "failed", "exit code 1: no output"),
    ("exchange", 1, MPIRUN, "failed", "exit code 1: train.py: --xla: what went wrong"),
    ("speed", 1, "experiments.benchmark: OOM when allocating tensor with shape[256,64]\n", "out of memory", ""),
    ("data", 1, "RESOURCE_EXHAUSTED: Out of memory while trying to allocate\n", "out of memory", ""),
    ("exchange", 1, "OOM when allocating tensor\n", "failed", "exit code 1: OOM when allocating tensor"),
    *((step, 0, "nothing of use\n", "failed", "its output cannot be read") for step in ("tests", "speed", "data")),
])
def test_the_outcome_of_a_command(tmp_path, step, code, output, outcome, note):
    words = ["sh", "-c", f'printf %s "$0"; exit {code}', output]
    row = first_hour.run_command(Command(step, {}, words), tmp_path / "log", 60.0)
    assert row["outcome"] == outcome and (row["note"].startswith(note) if note else not row["note"])


@pytest.mark.parametrize(("workers", "memory"), [(1, 80.0), (1, 16.0), (2, 80.0), (8, 40.0), (16, 32.0)])
def test_the_commands_for_gpus_have_flags_that_their_programs_take(workers, memory):
    """The hour itself is only pretended here: what is left out then has to be right, too."""
    asked = [*commands(workers, memory, "digits")]
    assert [*dict.fromkeys(one.step for one in asked)] == [step for step in LIMITS if workers > 1 or step != "exchange"]
    for one in asked:
        if one.step in ("speed", "data", "exchange"):
            values = flags.read(benchmark.all_flags(), one.words[one.words.index("experiments.benchmark"):])
            assert all(str(values[name].value) == str(value) for name, value in one.label.items()
                       if name not in ("workers", "hw_decoder_load", "batch norm"))
    measured = {(one.label["precision"], one.label["micro_batch_size"], one.label["xla"])
                for one in asked if one.step == "speed"}
    assert measured >= {(precision, size, xla) for precision in ("float32", "mixed_float16", "mixed_bfloat16")
                        for size in (64, 128, 256) for xla in ("false", "true")}
    assert [one.label["dali_device"] for one in asked if one.step == "data"] == ["cpu", "gpu", "gpu", "gpu"]


def test_one_gpu_takes_about_an_hour():
    assert sum(limit for step, limit in LIMITS.items() if step != "exchange") <= 3600


def test_the_page_sets_what_was_measured_beside_what_was_published(tmp_path):
    row = {"step": "speed", "workers": 1, "precision": "mixed_float16", "micro_batch_size": 256, "xla": "true",
           "images_per_second": 1234.0, "outcome": "ok", "note": "", "seconds": 9.0}
    failed = {name: value for name, value in row.items() if name != "images_per_second"}
    ring = row | {"step": "exchange", "workers": 8, "allreduce": "ring", "images_per_second": 600.0}
    rows = [failed | {"outcome": "failed", "note": "<b>why</b>"}, row, row | {"images_per_second": 900.0},
            ring | {"workers": 1, "images_per_second": 100.0}, ring]
    text = write_first_hour(tmp_path, {"pretend": False, "machine": {"gpus": ["A100"]}, "rows": rows},
                            PUBLISHED).read_text()
    published = [dict(zip(tables(text)[-1][0], row, strict=True)) for row in tables(text)[-1][1:]]
    found = {(row["gpu"], row["gpus"], row["precision"]): (row["images per second"], row["measured here"])
             for row in published if row["micro batch size"] in ("128", "256")}
    assert found["A100 40 GB", "1", "mixed_float16"] == ("2,375", "1,234")
    assert found["A100 40 GB", "8", "mixed_float16"] == ("17,400", "600")
    assert found["V100 16 GB", "1", "float32"] == ("412", "")
    [exchange] = [table for table in tables(text) if "efficiency" in table[0]]
    assert [row[exchange[0].index("efficiency")] for row in exchange[1:]] == ["100.0%", "75.0%"]
    assert "<b>why</b>" not in text and "numbers mean nothing" not in text and "<svg" in text


def without_tensorflow(*arguments):
    """The command, by a program that exits with 99 if it has imported TensorFlow."""
    program = ("import sys; from launch import first_hour; code = first_hour.main(sys.argv); "
               "sys.exit(99 if 'tensorflow' in sys.modules else code)")
    return run("python", 1, "-c", program, *arguments, cold=True)


@pytest.mark.parametrize("argument", ["--only=speed,sped", "--sekonds=1", "digits", "--pretend=often"])
def test_a_wrong_flag_is_one_line(argument):
    done = without_tensorflow(argument)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and done.stderr.startswith("first_hour: ")


def test_help_names_every_flag_and_step():
    done = without_tensorflow("--help")
    assert done.returncode == 0
    assert all(f"  --{name}: " in done.stdout for name in ("output_dir", "data_dir", "pretend", "only"))
    assert all(f"    {name} " in done.stdout for name in LIMITS)


def test_without_a_gpu_nothing_is_run(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = launch(f"--output_dir={tmp_path / 'hour'}")
    assert done.returncode == 1 and done.stderr.splitlines() == [
        "first_hour: nvidia-smi lists no GPU on this machine; use --pretend to try all steps on CPUs"]
    assert not (tmp_path / "hour").exists()


@pytest.mark.campaign
def test_the_tests_for_gpus_pass_on_cpus():
    """All of those that --pretend leaves out, too."""
    done = subprocess.run(
        ["env", "BIGBATCH_PRETEND_GPU=1", BIN / "python", "-m", "pytest", "-m", "gpu", "-o",
         "addopts=--import-mode=importlib", "-p", "no:cacheprovider", ROOT / "tests" / "test_gpu.py"],
        cwd=ROOT, text=True, capture_output=True, timeout=1800)
    assert done.returncode == 0 and "skipped" not in done.stdout, done.stdout[-5000:]
