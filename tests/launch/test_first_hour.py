"""The first hour on a GPU: its whole list on CPUs, what it says of a step that fails or hangs, and its page."""
import html
import json
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from conftest import ROOT, run

from common import flags as common_flags
from common.errors import UserError
from experiments import benchmark
from launch import first_hour
from launch import first_hour_steps as hour_steps
from launch.first_hour_probe import MARK
from launch.first_hour_steps import NAMES, Command, Machine, Step
from reporting.first_hour import write_first_hour
from training import flags
from training.plan import plan_for

SCRIPT = ROOT / "launch" / "first_gpu_hour.sh"


def launch(*arguments, timeout=60):
    return subprocess.run([SCRIPT, *map(str, arguments)], text=True, capture_output=True, timeout=timeout,
                          stdin=subprocess.DEVNULL)


def results(folder) -> list[dict]:
    return json.loads((folder / "first_hour.json").read_text())["steps"]


def tables(page: str) -> list[list[list[str]]]:
    """The texts of a page's cells: tables, rows, cells."""
    return [[[html.unescape(cell) for cell in re.findall(r"<t[dh]>(.*?)</t[dh]>", row)]
             for row in re.findall(r"<tr>(.*?)</tr>", table)] for table in re.findall(r"<table>(.*?)</table>", page)]


@pytest.fixture(scope="module")
def hour(tmp_path_factory):
    """(the finished hour on CPUs, its folder)."""
    folder = tmp_path_factory.mktemp("hour")
    return launch("--pretend", f"--output_dir={folder}", timeout=600), folder


def test_the_whole_hour_ends_well_on_cpus(hour):
    done, folder = hour
    assert done.returncode == 0, done.stderr[-3000:]
    assert [step["name"] for step in results(folder)] == list(NAMES)
    assert {step["outcome"] for step in results(folder)} == {"ok"}
    logs = sorted(path.name for path in folder.glob("*.log"))
    assert logs == [f"{index:02d}-{name}.log" for index, name in enumerate(NAMES, 1)]
    skipped = [row for step in results(folder) for row in step["rows"] if row["outcome"] == "skipped"]
    assert [row["check"] for row in skipped] == ["nvidia-smi", "topology"] and all(row["note"] for row in skipped)


def test_each_step_measured_what_it_is_for(hour):
    rows = {step["name"]: step["rows"] for step in results(hour[1])}
    assert rows["tests"][0]["result"].split()[1] == "passed" and "failed" not in rows["tests"][0]["result"]
    assert rows["placement"][0]["operations on the CPU"] > 100
    assert {(row["precision"], row["xla"]) for row in rows["speed"]} == {
        (precision, xla) for precision in ("float32", "mixed_bfloat16") for xla in ("false", "true")}
    assert all(row["images_per_second"] > 0 for row in rows["speed"] + rows["exchange"])
    assert all(row["training"] > 0 and row["whole pipeline"] > 0 for row in rows["data"])
    [update] = rows["update"]
    assert 0 < update["LARS's update, ms"] < update["training step, ms"]
    assert [row["workers"] for row in rows["exchange"]] == [1, 2, 2, 2, 2]
    assert rows["exchange"][0]["runs as"].startswith("none") and rows["exchange"][1]["runs as"].startswith("ring")
    assert "allreduce" in (hour[1] / "timeline.json").read_text().lower()
    [stop] = rows["stop"]
    assert (stop["exit code on SIGUSR1"], stop["resumed"], stop["differences to the bit"]) == (75, 0, 0)
    assert json.loads((hour[1] / "trainings" / "ring" / "summary.json").read_text())["world_size"] == 2


def test_the_page_names_every_step_and_fetches_nothing(hour):
    page, found = (hour[1] / "first_hour.html").read_text(), results(hour[1])
    assert not re.search(r'(src|href|action|data)="(?!data:)', page)
    headings = [html.unescape(heading) for heading in re.findall(r"<h2>(.*?)</h2>", page)]
    assert headings == ["Steps", *(step["title"] for step in found), "Published figures"]
    _, listed, *shown_tables, published = tables(page)
    assert [row[0] for row in listed[1:]] == list(NAMES)
    for step, shown in zip(found, shown_tables, strict=True):
        assert [row[shown[0].index("outcome")] for row in shown[1:]] == [row["outcome"] for row in step["rows"]]
    assert {"1,270", "2,375", "56,074"} <= {cell for row in published for cell in row}
    assert "numbers mean nothing" in page


def test_a_step_that_fails_is_reported_and_the_others_go_on(tmp_path):
    done = launch("--pretend", "--only=data,update", "--data_dir=/nowhere", f"--output_dir={tmp_path}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("first_hour: these steps failed: data; ")
    assert {step["name"]: step["outcome"] for step in results(tmp_path)} == {"data": "failed", "update": "ok"}
    [shown] = [table for table in tables((tmp_path / "first_hour.html").read_text()) if table[0][0] == "DALI on"]
    assert all("/nowhere" in row[shown[0].index("note")] for row in shown[1:]) and len(shown) == 3


HANGS = """
import subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(f"other {other.pid}", flush=True)
time.sleep(600)
"""


def test_a_step_that_hangs_is_killed_with_all_it_has_started(tmp_path):
    quick = Command({"what": "quick"}, [sys.executable, "-c", "print('done')"])
    hangs = Command({"what": "hangs"}, [sys.executable, "-c", HANGS], limit=2.0)
    begun = time.monotonic()
    failed = first_hour.run_steps([Step("hang", "A step that hangs", 3.0, [hangs, hangs, hangs]),
                                   Step("after", "The step after it", 60.0, [quick])], tmp_path,
                                  {"pretend": True, "machine": {"host": "here"}}, {})
    assert failed == ["hang"] and time.monotonic() - begun < 20
    hung, after = results(tmp_path)
    notes = [row["note"] for row in hung["rows"]]
    assert notes == ["killed after 2 s", "killed after 1 s", "the step ran out of time"] and after["outcome"] == "ok"
    others = [int(pid) for pid in re.findall(r"^other (\d+)$", (tmp_path / hung["log"]).read_text(), re.MULTILINE)]
    assert others
    assert not any(psutil.pid_exists(other) and psutil.Process(other).status() != psutil.STATUS_ZOMBIE
                   for other in others)


def test_an_hour_that_is_stopped_leaves_what_it_has_and_no_process(tmp_path):
    process = subprocess.Popen([SCRIPT, "--pretend", "--only=checks", f"--output_dir={tmp_path}"],
                               stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not psutil.Process(process.pid).children(recursive=True) or not (tmp_path / "first_hour.json").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    under_way = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 130 and process.communicate()[1].splitlines()[-1] == "first_hour: interrupted"
    assert not psutil.wait_procs(under_way, timeout=10)[1]
    [step] = results(tmp_path)
    assert step["outcome"] == "under way" and step["rows"]


def line(name, op, device="GPU", source="placer.cc:125] "):
    return (f"2026-11-22 09:51:35.759522: I tensorflow/core/common_runtime/{source}{name}: ({op}): "
            f"/job:localhost/replica:0/task:0/device:{device}:0\n")


LOG = (line("weights/Initializer", "RandomUniform", "CPU") + f"{MARK}\n" + line("model/conv1/Conv2D", "Conv2D")
       + line("model/conv2/Conv2D", "Conv2D") + line("PyFunc", "PyFunc", "CPU") + line("images", "_Arg", "CPU")
       + line("shape", "Const") + line("initial", "Mul", "CPU", source=""))


def test_the_placement_log_is_read_from_the_step_s_beginning():
    assert hour_steps.placements(LOG) == {("Conv2D", "GPU"): 2, ("PyFunc", "CPU"): 1, ("_Arg", "CPU"): 1,
                                          ("Const", "GPU"): 1}
    assert hour_steps.placed(LOG, "GPU") == {"operations on the GPU": 3,
                                             "elsewhere, as they must be": "PyFunc (1), _Arg (1)"}


@pytest.mark.parametrize(("log", "problem"), [
    (LOG + line("one", "L2Loss", "CPU") + line("two", "L2Loss", "CPU") + line("norm", "Sqrt", "CPU"),
     "operations not on the GPU: L2Loss (2), Sqrt (1)"),
    (LOG.partition(MARK)[0] + MARK, "contains no operation"),
    (LOG.replace(MARK, ""), "contains no operation"),
])
def test_a_step_s_operation_on_the_cpu_is_an_offender(log, problem):
    with pytest.raises(UserError) as raised:
        hour_steps.placed(log, "GPU")
    assert problem in str(raised.value)


BOX = "-" * 70
MPIRUN = f"train.py: --xla: what went wrong\n{BOX}\nprterun detected that a process exited\n  Exit code: 1\n{BOX}\n"


@pytest.mark.parametrize(("code", "output", "may_not_fit", "outcome", "note"), [
    (0, "well\n", False, "ok", ""),
    (None, "under way", False, "failed", "killed after 7 s"),
    (3, "one\nlast line\n\n", False, "failed", "exit code 3: last line"),
    (1, "", False, "failed", "exit code 1: no output"),
    (1, MPIRUN, False, "failed", "exit code 1: train.py: --xla: what went wrong"),
    (1, "experiments.benchmark: OOM when allocating tensor with shape[256,64]\n", True, "out of memory", ""),
    (1, "RESOURCE_EXHAUSTED: Out of memory while trying to allocate\n", True, "out of memory", ""),
    (1, "OOM when allocating tensor\n", False, "failed", "exit code 1: OOM when allocating tensor"),
])
def test_the_outcome_of_a_command(code, output, may_not_fit, outcome, note):
    judged = first_hour.judged(Command({}, may_not_fit=may_not_fit), code, output, 7.0)
    assert judged == {"outcome": outcome, "note": note}


@pytest.mark.parametrize(("outcomes", "expected"), [
    ("ok ok", "ok"), ("ok out-of-memory skipped", "ok"), ("skipped", "skipped"), ("out-of-memory", "failed"),
    ("ok failed", "failed"), ("ok not-run", "failed")])
def test_the_outcome_of_a_step(outcomes, expected):
    assert first_hour.outcome([{"outcome": one.replace("-", " ")} for one in outcomes.split()]) == expected


@pytest.mark.parametrize("read", [hour_steps.summary, hour_steps.rates, hour_steps.stages, hour_steps.stopped])
def test_an_output_without_results_is_a_failure(read):
    judged = first_hour.judged(Command({}, read=read), 0, "nothing of use\n", 7.0)
    assert judged["outcome"] == "failed" and "cannot be read" in judged["note"]


def test_missing_nccl_and_a_resumed_training_that_differs_are_failures():
    output = "Available Tensor Operations:\n    [ ] NCCL\n    [X] MPI\n    [X] Gloo"
    assert hour_steps.built(output, nccl=False) == "MPI Gloo"
    assert hour_steps.built(output.replace("[ ]", "[X]"), nccl=True) == "NCCL MPI Gloo"
    with pytest.raises(UserError, match="without NCCL"):
        hour_steps.built(output, nccl=True)
    with pytest.raises(UserError, match="1 differ from the undisturbed run; the first is model/kernel"):
        hour_steps.stopped('{"stopped": 75, "resumed": 0, "differ": ["model/kernel"]}')


def commands(machine, folder, name):
    return next(step.commands for step in hour_steps.steps(machine, folder, "digits") if step.name == name)


def test_one_gpu_takes_about_an_hour_and_leaves_out_the_exchange(tmp_path):
    one = Machine(1, 80.0)
    limits = {step.name: step.limit for step in hour_steps.steps(one, tmp_path, "digits")}
    assert list(limits) == list(NAMES)
    assert sum(limit for name, limit in limits.items() if name != "exchange") <= 3600
    assert {command.skip for command in commands(one, tmp_path, "exchange")} == {"a single GPU has nothing to exchange"}
    assert not any(command.skip for command in commands(Machine(8, 80.0), tmp_path, "exchange"))
    measured = [tuple(command.label.values()) for command in commands(one, tmp_path, "speed")]
    assert {*measured} >= {(precision, batch, xla) for precision in ("float32", "mixed_float16", "mixed_bfloat16")
                           for batch in (64, 128, 256) for xla in ("false", "true")}


@pytest.mark.parametrize("machine", [Machine(1, 16.0), Machine(2, 80.0), Machine(8, 40.0), Machine(16, 32.0)],
                         ids=lambda machine: f"{machine.gpus} GPUs")
def test_what_is_run_on_gpus_has_flags_that_its_programs_take(machine, tmp_path):
    """The hour itself is only pretended here: what is left out then has to be right, too."""
    for command in commands(machine, tmp_path, "speed") + commands(machine, tmp_path, "data"):
        assert command.words[:3] == [sys.executable, "-m", "experiments.benchmark"]
        common_flags.read(benchmark.all_flags(), command.words[2:])
    assert [command.label["DALI on"] for command in commands(machine, tmp_path, "data")] == ["cpu", "gpu", "gpu", "gpu"]
    for command in commands(machine, tmp_path, "exchange"):
        settings = flags.parse(command.words[command.words.index(str(ROOT / "train.py")):])
        samples = int(settings.recipe.data_dir.partition(":")[2])
        plan = plan_for(settings, command.label["workers"], command.label["workers"], samples)
        assert plan.steps == 120 and [phase.accumulation_steps for phase in plan.phases] == [1]
    [stop] = commands(machine, tmp_path, "stop")
    assert plan_for(flags.parse(["train.py", *stop.words[6:]]), machine.workers, machine.workers, 1437).steps >= 80
    for name in ("placement", "update"):
        [command] = commands(machine, tmp_path, name)
        given = [word for word in command.words[4:] if not word.startswith("--rounds")]
        assert flags.parse(["train.py", *given]).recipe.model == "resnet50"


def test_the_page_sets_what_was_measured_beside_what_was_published(tmp_path):
    row = {"precision": "mixed_float16", "micro_batch_size": 256, "xla": "true", "outcome": "ok", "note": "",
           "images_per_second": 1234.0, "seconds": 9.0}
    failed = {"precision": "float32", "micro_batch_size": 256, "xla": "true", "outcome": "failed",
              "note": "<b>why</b>", "seconds": 1.0}
    one_gpu = {"exchange": "one GPU alone", "workers": 1, "precision": "mixed_float16", "micro_batch_size": 256,
               "outcome": "ok", "note": "", "images_per_second": 100.0, "seconds": 1.0}
    ring = one_gpu | {"exchange": "ring", "workers": 8, "images_per_second": 600.0}
    steps = [{"name": name, "title": title, "outcome": "ok", "seconds": 1.0, "log": "04-speed.log", "rows": rows}
             for name, title, rows in (("speed", "Speed", [failed, row, row | {"images_per_second": 900.0}]),
                                       ("exchange", "Exchange", [one_gpu, ring]))]
    (tmp_path / "04-speed.log").write_text("\n".join(f"line {number} <&>" for number in range(500)))
    text = write_first_hour(tmp_path, {"pretend": False, "machine": {"GPU": "A100"}, "steps": steps},
                            json.loads(first_hour.PUBLISHED.read_text())).read_text()
    [published] = [table for table in tables(text) if "published, images/s" in table[0]]
    a100 = next(row for row in published if row[:4] == ["A100 40 GB", "1", "mixed_float16", "256"])
    assert a100[4:6] == ["2,375", "1,234"]
    a100s = next(row for row in published if row[:4] == ["A100 40 GB", "8", "mixed_float16", "256"])
    assert a100s[4:6] == ["17,400", "600"]
    v100 = next(row for row in published if row[0] == "V100 16 GB" and row[2] == "float32")
    assert v100[4:6] == ["412", ""]
    [exchange] = [table for table in tables(text) if table[0][0] == "exchange"]
    assert [row[exchange[0].index("efficiency")] for row in exchange[1:]] == ["100.0%", "75.0%"]
    assert "<b>why</b>" not in text and "line 499 &lt;&amp;&gt;" in text and "line 300 " not in text
    assert "numbers mean nothing" not in text and "<svg" in text


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
    assert all(f"    {name} " in done.stdout for name in NAMES)


def test_without_a_gpu_nothing_is_run(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = launch(f"--output_dir={tmp_path / 'hour'}")
    assert done.returncode == 1 and done.stderr.splitlines() == [
        "first_hour: nvidia-smi lists no GPU on this machine; use --pretend to try all steps on CPUs"]
    assert not (tmp_path / "hour").exists()
