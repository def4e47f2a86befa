"""launch/slurm on a real Slurm cluster of two emulated nodes."""
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import BIN, ROOT, TINY, rows, scripts_environment, warm_python, weights

from experiments import sweep
from tests.launch.test_workers import PHASES
from tests.rigs.pyxis import Pyxis
from tests.rigs.slurm import Slurm
from tests.rigs.telling import SET, telling_python, told

pytestmark = pytest.mark.launchers

SUBMIT = ROOT / "launch" / "slurm" / "submit.sh"
NODES = ("--nodes", 2, "--workers-per-node", 1, "--no-preflight")
TRAINING = ("digits", *TINY, "--epochs=24", "--checkpoint_every=0.5", "--deterministic")


@pytest.fixture(scope="module")
def slurm():
    with Slurm(nodes=2, cpus=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(slurm, tmp_path_factory):
    """The folder of the training with nothing in its way, on the same nodes: bits depend on the cores of a worker."""
    cwd = tmp_path_factory.mktemp("undisturbed")
    job = submit(slurm, cwd, *NODES, "--launcher=mpirun", *TRAINING)
    [ended] = slurm.wait_for_end(job, 300)
    assert ended["JobState"] == "COMPLETED", job_output(cwd)
    assert "2 workers on node[1-2], with mpirun" in job_output(cwd) and "resumed" not in job_output(cwd)
    return cwd / "runs" / f"slurm-{job}"


def submit(slurm, cwd, *arguments, cold=False) -> str:
    """The number of the job. cold: Python as it is, instead of forks."""
    return submitted(slurm, cwd, *arguments, cold=cold).stdout.strip()


def submitted(slurm, cwd, *arguments, cold=False, within=()) -> subprocess.CompletedProcess:
    """within: words before the command."""
    done = slurm.run(*within, *(("env", "-u", "BIGBATCH_PYTHON") if cold else ()), SUBMIT, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done


def job_output(cwd) -> str:
    return "".join(path.read_text() for path in sorted((cwd / "runs" / "slurm").glob("*.out")))


def chatty(folder, program) -> list:
    """The words before a command that finds a site's program of this name, which says more than Slurm's."""
    folder.mkdir(exist_ok=True)
    (folder / program).write_text(f'#!/bin/sh\necho "*** Welcome, 3 jobs run ***"\n/usr/bin/{program} "$@"\ncode=$?\n'
                                  'echo "Quota: 12"\nexit $code\n')
    (folder / program).chmod(0o755)
    return ["sh", "-c", f'PATH={folder}:$PATH exec "$@"', "sh"]


def training_under_way(slurm, cwd, job, steps=20):
    """Waits until a checkpoint of this many steps is there."""
    folder = cwd / "runs" / f"slurm-{job}" / "checkpoints"

    def reached():
        assert slurm.jobs(job)[0]["JobState"] in ("PENDING", "CONFIGURING", "RUNNING"), job_output(cwd)
        return any(int(path.name.split("-")[1]) >= steps for path in folder.glob("step-*[0-9]"))

    slurm.wait_for(reached, "checkpoint", 150)


def scripts(job) -> list[psutil.Process]:
    """The processes of a job's batch script."""
    return [process for process in psutil.process_iter(["cmdline"])
            if any(word.endswith(f"job{int(job):05}/slurm_script") for word in process.info["cmdline"] or ())]


def same(folder, undisturbed):
    """Whether two runs have the same weights and rows of metrics, to the bit."""
    ours, theirs = weights(folder), weights(undisturbed)
    times = ("images_per_second", "seconds")
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours) and [
        {k: v for k, v in row.items() if k not in times} for row in rows(folder)] == [
        {k: v for k, v in row.items() if k not in times} for row in rows(undisturbed)]


# What Slurm sets in an allocation on GPUs. Submitted there, a job inherits it, and srun fails with each of them.
ELSEWHERE = ("NTASKS_PER_GPU=1", "GPUS_PER_TASK=1", "CPUS_PER_GPU=3", "TRES_PER_TASK=cpu:3", "MEM_PER_GPU=100",
             "MEM_PER_CPU=100", "HINT=nomultithread")


def test_two_nodes_train_with_srun(slurm, tmp_path):
    """Python as it is: a fork would not show a crash at its end. The workers have what the site's file has set."""
    python, site = tmp_path / "python", tmp_path / "site's.sh"
    python.write_text(f'#!/bin/sh\necho "$SITE $SLURM_PROCID" >>{tmp_path}/started\nexec "{BIN}/python" "$@"\n')
    python.chmod(0o755)
    site.write_text(f'[ -z "$unknown" ] || module load cuda\nexport SITE=here BIGBATCH_PYTHON={python}\n')
    within = ("env", *(f"SLURM_{name}" for name in ELSEWHERE))
    job = submitted(slurm, tmp_path, *NODES, "--launcher", "srun", "--export=NONE", "--setup", site, *TRAINING,
                    cold=True, within=within).stdout.strip()
    [ended] = slurm.wait_for_end(job, 300)
    assert ended["JobState"] == "COMPLETED", job_output(tmp_path)
    assert '"world_size": 2' in job_output(tmp_path) and "2 workers on node[1-2], with srun" in job_output(tmp_path)
    assert (tmp_path / "runs" / f"slurm-{job}-logs" / "rank-1.log").is_file()
    assert {"here 0", "here 1"} <= {*(tmp_path / "started").read_text().splitlines()}


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_what_a_site_sets_for_the_network_reaches_the_workers(slurm, tmp_path, launcher):
    """From where the job is submitted, or from --setup, which counts also with --export=NONE."""
    python = telling_python(tmp_path / "told")
    first, second = (f"{name}={value}" for name, value in SET.items())
    (tmp_path / "site").write_text(f"export {second} BIGBATCH_PYTHON={python}\n")
    done = slurm.run("env", first, SUBMIT, *NODES, f"--launcher={launcher}", "--setup", tmp_path / "site", *TRAINING,
                     cwd=tmp_path)
    slurm.wait_for_end(done.stdout.strip(), 100)
    assert SET in told(tmp_path / "told"), job_output(tmp_path)


def test_a_phase_on_fewer_workers_continues_in_the_same_job(slurm, tmp_path):
    """tests/launch/test_workers.py compares the bits, with another launcher."""
    job = submit(slurm, tmp_path, *NODES, PHASES[0].partition("=")[2], *PHASES[1:], "--workers_schedule=0:2,1:1,2:2")
    [ended] = slurm.wait_for_end(job, 300)
    assert ended["JobState"] == "COMPLETED" and ended["Restarts"] == "0", job_output(tmp_path)
    said = [line.split()[3] for line in job_output(tmp_path).splitlines() if line.startswith("train.sbatch: continues")]
    assert said == ["1", "2"]


def test_the_preflight_comes_first_and_launcher_auto_finds_one_and_a_notice_before_requeues(slurm, tmp_path):
    """The job is submitted in another job's allocation, which counts memory in another way. The site's squeue says
    more than Slurm's."""
    within = ("salloc", "-n1", "--mem-per-cpu=100", *chatty(tmp_path / "bin", "squeue"))
    job = submitted(slurm, tmp_path, "--nodes=2", "--workers-per-node=1", "--mem=500", *TRAINING, "--epochs=1",
                    within=within).stdout.strip()
    slurm.wait_for(lambda: list((tmp_path / "runs").glob("slurm-*-logs")), "start")
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    [ended] = slurm.wait_for_end(job, 300)
    assert ended["JobState"] == "COMPLETED" and ended["Restarts"] == "1", job_output(tmp_path)
    table = [line.split()[0] for line in job_output(tmp_path).splitlines() if line.startswith(("host ", "node"))]
    assert table == ["host", "node1", "node2"]


def test_a_job_that_is_preempted_signalled_and_loses_a_node_is_the_undisturbed_one(slurm, tmp_path, undisturbed):
    job = submit(slurm, tmp_path, *NODES, "--time=10", "--signal-before=60", *TRAINING)
    restarts = 0

    def restarted(what):
        nonlocal restarts
        restarts += 1
        slurm.wait_for(lambda: int(slurm.jobs(job)[0]["Restarts"]) >= restarts, f"requeue after {what}", 120)
        slurm.wait_for(lambda: job_output(tmp_path).count("resumed after step") >= restarts, "resumed training", 150)

    training_under_way(slurm, tmp_path, job)
    urgent = slurm.run("sbatch", "--parsable", "-p", "urgent", "--nodes=2", "--ntasks-per-node=2", "--output=/dev/null",
                       "--wrap=sleep 2").stdout.strip()
    assert slurm.wait_for_end(urgent, 120)[0]["JobState"] == "COMPLETED"
    restarted("preemption")
    # Slurm looks at its limits every half minute; this is the signal that it would send
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    restarted("signal")
    assert "stopped on request" in job_output(tmp_path)
    slurm.switch_off("node2")
    slurm.wait_for(lambda: slurm.jobs(job)[0]["JobState"] == "PENDING", "requeue", 120)
    slurm.switch_on("node2")
    [ended] = slurm.wait_for_end(job, 300)
    assert ended["JobState"] == "COMPLETED" and int(ended["Restarts"]) >= 3, job_output(tmp_path)
    assert job_output(tmp_path).count("resumed after step") >= 3
    assert same(tmp_path / "runs" / f"slurm-{job}", undisturbed)


def test_a_job_that_gets_no_further_is_requeued_once(slurm, digits, tmp_path):
    """Its data are gone when it starts, and srun fails, as if a node were lost."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "srun").chmod(0o755)
    shutil.copytree(digits, tmp_path / "data")
    done = slurm.run("env", f"PATH={tmp_path}/bin:{slurm.environment['PATH']}", SUBMIT, "--nodes=1",
                     "--workers-per-node=1", "--no-preflight", "--launcher=mpirun", "--sbatch=--hold", *TRAINING,
                     f"--data_dir={tmp_path}/data", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(tmp_path / "data")
    job = done.stdout.strip()
    slurm.run("scontrol", "release", job)
    [ended] = slurm.wait_for_end(job, 120)
    said = job_output(tmp_path)
    assert (ended["JobState"], ended["Restarts"], said.count("there is no folder")) == ("FAILED", "1", 2), said
    assert said.count("the job is requeued") == 1 and said.count("the job ends") == 1


@pytest.fixture
def pyxis(slurm, tmp_path, monkeypatch):
    """Of two nodes that share a stand-in, whose containers have this environment's Python."""
    stand_in = Pyxis(tmp_path / "pyxis")
    monkeypatch.setattr(slurm, "environment", slurm.environment | {
        "PATH": f"{stand_in.bin}:{slurm.environment['PATH']}",
        "BIGBATCH_CONTAINER_PYTHON": slurm.environment["BIGBATCH_PYTHON"]})
    return stand_in


def test_a_job_unpacks_its_image_once_a_node_and_start(slurm, pyxis, tmp_path):
    """Five steps use the container of a start. It is gone before the next start, and at the end, with what a job that
    has ended has left. That of another job stays."""
    other = slurm.run("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true").stdout.strip()
    (pyxis.top / "node1").mkdir()
    for number in (other, 999):
        (pyxis.top / "node1" / f"pyxis_bigbatch-{number}-0").touch()
    job = submit(slurm, tmp_path, "--nodes=2", "--workers-per-node=1", "--container-image=/images/a.sqsh",
                 "--container-mounts=/data:/data", *TRAINING)
    training_under_way(slurm, tmp_path, job)
    assert sorted(path.parent.name for path in pyxis.left() if path.name.endswith(f"-{job}-0")) == ["node1", "node2"]
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    [ended] = slurm.wait_for_end(job, 300)
    said = job_output(tmp_path)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), said
    names = [f"bigbatch-{job}-{start}" for start in (0, 1)]
    assert sorted(pyxis.unpacked()) == sorted([node, name] for node in ("node1", "node2") for name in names), said
    assert [path.name for path in pyxis.left()] == [f"pyxis_bigbatch-{other}-0"] and "is left on" not in said
    slurm.run("scancel", other)
    users = [line for line in pyxis.sruns() if f"--container-name={names[0]}" in line and " true" not in line]
    assert [next(word for word in ("launch.job", "open_mpi", "preflight", "train.py") if word in line) for line in users
            ] == ["launch.job", "launch.job", "open_mpi", "preflight", "train.py"]
    assert all("/data:/data" in line and "--container-image" not in line for line in users)


def test_an_image_that_cannot_be_unpacked_ends_the_job_with_its_cause(slurm, pyxis, tmp_path):
    job = submit(slurm, tmp_path, *NODES, "--container-image=/images/broken.sqsh", *TRAINING)
    [ended] = slurm.wait_for_end(job, 100)
    said = job_output(tmp_path)
    assert ended["JobState"] == "FAILED" and "pyxis: no such image" in said
    assert "launch.job" not in "".join(pyxis.sruns())
    assert "Pyxis has not made a container of /images/broken.sqsh on each node; its message is above" in said


@pytest.mark.parametrize("image", ["", "/images/a.sqsh"])
def test_launchers_that_fail_are_shown_with_what_they_said(slurm, tmp_path, image, request):
    """Slurm has no such plugin, and Open MPI no such component."""
    if image:
        request.getfixturevalue("pyxis")
    (tmp_path / "bin").mkdir()
    srun = shutil.which("srun", path=slurm.environment["PATH"])
    (tmp_path / "bin" / "srun").write_text(f'#!/bin/bash\nexec {srun} "${{@/--mpi=pmix/--mpi=pmix9}}"\n')
    (tmp_path / "bin" / "srun").chmod(0o755)
    (tmp_path / "site").write_text(f"export PATH={tmp_path}/bin:$PATH OMPI_MCA_pml=nosuch\n")
    job = submit(slurm, tmp_path, *NODES, "--setup", tmp_path / "site",
                 *([f"--container-image={image}"] if image else []), *TRAINING)
    [ended] = slurm.wait_for_end(job, 200)
    said = job_output(tmp_path)
    assert ended["JobState"] == "FAILED" and "no launcher starts 2 workers that find each other on node[1-2]" in said
    assert "\nsrun: srun: error: cannot find mpi plugin for mpi/pmix9" in said
    assert ("hook 50-slurm-pmi.sh" in said) == bool(image)
    log = tmp_path / f"runs/slurm-{job}-logs/mpirun.log"
    heard = [] if image else [line.rstrip() for line in log.read_text().replace("\0", "").splitlines() if line.strip()]
    assert image or "a worker: MPI does not start with OMPI_MCA_pml=nosuch: " in "".join(heard), heard
    assert {f"mpirun: {line}" for line in heard[-20:]} <= {line.rstrip() for line in said.splitlines()}


def test_a_cancelled_job_does_not_come_back(slurm, tmp_path):
    (cwd := tmp_path / "my runs").mkdir()
    done = submitted(slurm, cwd, *NODES, *TRAINING, within=chatty(tmp_path / "bin", "sbatch"))
    job = done.stdout.strip()
    training_under_way(slurm, cwd, job)
    assert scripts(job) and "Welcome" in done.stderr and "Quota" in done.stderr
    watch, cancel = (shlex.split(line.partition("with: ")[2]) for line in done.stderr.splitlines()[-2:])
    assert watch[:2] == ["tail", "-F"] and "2 workers on" in Path(watch[2]).read_text()
    assert cancel == ["scancel", job]
    slurm.run(*cancel)
    slurm.wait_for_end(job, 60)
    slurm.wait_for(lambda: not scripts(job), "end of the job's script, which alone requeues it", 60)
    assert slurm.jobs(job)[0]["JobState"] == "CANCELLED", job_output(cwd)
    assert slurm.run("squeue", "-h").stdout == ""


def test_where_slurm_refuses_to_requeue_the_job_says_how_to_go_on(slurm, tmp_path):
    job = submit(slurm, tmp_path, *NODES, "--sbatch=--no-requeue", *TRAINING)
    training_under_way(slurm, tmp_path, job)
    slurm.run("scancel", "--signal=USR1", "--batch", job)
    [ended] = slurm.wait_for_end(job, 100)
    said = job_output(tmp_path).splitlines()[-1]
    assert ended["ExitCode"] == "75:0" and "(Requested operation is presently disabled for job" in said, said
    assert said.endswith(f"submit it again as before, with --output_dir=runs/slurm-{job}")


@pytest.mark.parametrize(("recipe", "output", "folder"), [
    (("digits",), (), "runs/slurm-{job}_{seed}"), (("--",), ("--output_dir", "my runs"), "my runs/seed-{seed}")])
def test_an_array_trains_a_seed_each_into_a_folder_of_its_own(slurm, tmp_path, recipe, output, folder):
    done = submitted(slurm, tmp_path, "--nodes=1", "--workers-per-node=1", "--no-preflight", "--array=3-4", *recipe,
                     *TRAINING[1:], "--epochs=1", *output)
    job = done.stdout.strip()
    ended = slurm.wait_for_end(job, 300)
    assert Path(done.stderr.splitlines()[-2].split()[-1].strip("'")).is_file()
    assert [task["JobState"] for task in ended] == ["COMPLETED"] * 2, job_output(tmp_path)
    for seed in (3, 4):
        recorded = tmp_path / folder.format(job=job, seed=seed) / "flags.txt"
        assert f"--seed={seed}" in recorded.read_text().splitlines()


def test_an_array_trains_a_run_of_a_sweep_each(slurm, tmp_path, capsys):
    words = ["experiments.sweep", "--sweep=batch_size=96,48", "--model=convnet", "--epochs=1", "--warmup=none",
             f"--output_dir={tmp_path}/sweep"]
    assert sweep.main([*words, "--dry_run"]) == 0
    job = submit(slurm, tmp_path, "--nodes=1", "--workers-per-node=1", "--no-preflight", "--array=0-1",
                 "sweep/%a.flags")
    ended = slurm.wait_for_end(job, 300)
    assert [task["JobState"] for task in ended] == ["COMPLETED"] * 2, job_output(tmp_path)
    assert len(list((tmp_path / "runs" / "slurm").glob(f"sweep-1x1-{job}_*.out"))) == 2
    capsys.readouterr()
    assert sweep.main(words) == 0
    shown = capsys.readouterr()
    assert [row["flags"] for row in json.loads(shown.out)] == [{"batch_size": 96}, {"batch_size": 48}]
    assert "run 1 of 2" not in shown.err
    for row in json.loads(shown.out):
        recorded = json.loads((tmp_path / "sweep" / row["folder"] / "run.json").read_text())
        assert recorded["recipe"]["path"].endswith("recipes/digits.flags")


HIDDEN = "env -u PMI_SIZE -u SLURM_STEP_NUM_TASKS"


@pytest.mark.parametrize(("start", "message"), [
    ("srun --mpi=none", "SLURM_STEP_NUM_TASKS=2: Bigbatch does not know this launcher, so each process would work"),
    ("srun --mpi=pmi2", "PMI_SIZE=2: Bigbatch does not know this launcher, so each process would work alone"),
    (f"srun --mpi=pmi2 {HIDDEN}", "the launcher started 2 workers, but Horovod sees 1")])
def test_workers_that_do_not_find_each_other_are_an_error(slurm, tmp_path, start, message):
    # Open MPI under pmi2 starts each task as if it were alone, and exits with 0.
    script = tmp_path / "job"
    script.write_text(f"#!/bin/bash\n. '{ROOT}/launch/env.sh'\nexport BIGBATCH_WORLD_SIZE=2\n"
                      f"{start} python '{ROOT}/train.py' --epochs=1\n")
    job = slurm.run("sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", f"--output={tmp_path}/out", script,
                    cwd=tmp_path).stdout.strip()
    assert slurm.wait_for_end(job, 100)[0]["JobState"] == "FAILED"
    assert message in (tmp_path / "out").read_text()


def test_srun_with_pmix_starts_workers_without_a_script(slurm, tmp_path):
    done = slurm.run("srun", "--mpi=pmix", "-N2", "-n2", "python", ROOT / "train.py", *TINY, "--epochs=1",
                     f"--output_dir={tmp_path}/run", cwd=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert done.returncode == 0 and summary["world_size"] == 2, done.stderr


@pytest.mark.parametrize("nodes, gpus, recipe", [
    (1, 4, "sony_1811.05233/table3-reference"), (256, 4, "sony_1811.05233/table3-experiment4"),
    (512, 4, "sony_1811.05233/table3-reference"), (544, 4, "sony_1811.05233/table3-experiment1"),
    (864, 4, "sony_1811.05233/table3-experiment2"), (1024, 4, "sony_1811.05233/table3-reference"),
    (1, 8, "lars_1708.03888/table7-resnet50-8192"), (32, 8, "lars_1708.03888/section3.1-goyal-resnet50-8192")])
def test_the_papers_clusters(tmp_path, nodes, gpus, recipe):
    done = subprocess.run([SUBMIT, "--nodes", str(nodes), "--gpus-per-node", str(gpus), "--time=1:00:00",
                           "--sbatch=--constraint=v100", "--dry-run", recipe], cwd=tmp_path, text=True,
                          capture_output=True, timeout=300, env=scripts_environment())
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["workers"] == nodes * gpus
    for phase in plan["phases"]:
        assert phase["global_batch_size"] == nodes * gpus * phase["micro_batch_size"] * phase["accumulation_steps"]
    script = (tmp_path / "runs" / "slurm" / f"{os.path.basename(recipe)}-{nodes}x{gpus}.sbatch").read_text()
    header = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {f"#SBATCH --nodes={nodes}", f"#SBATCH --gpus-per-node={gpus}", f"#SBATCH --ntasks-per-node={gpus}",
            "#SBATCH --time=1:00:00", "#SBATCH --constraint=v100", "#SBATCH --requeue",
            "#SBATCH --signal=B:USR1@180"} <= set(header)
    assert f"set -- '{recipe}'" in script


def test_the_script_is_whole(slurm, tmp_path):
    """What --dry-run writes is what sbatch takes, with paths and flags that need quoting."""
    (cwd := tmp_path / "50% of \"my\" runs").mkdir()
    said = submitted(slurm, cwd, "--nodes=1", "--workers-per-node=1", "--no-preflight", "--dry-run", *TRAINING,
                     "--epochs=1", f"--output_dir={tmp_path}/a run's folder").stderr
    assert "to start at" in said and "on nodes node1" in said
    assert slurm.run("squeue", "-h").stdout == ""
    [script] = (cwd / "runs" / "slurm").glob("*.sbatch")
    job = slurm.run("sbatch", "--parsable", script, cwd="/").stdout.strip()
    assert slurm.wait_for_end(job, 100)[0]["JobState"] == "COMPLETED" and "epoch 1/1" in job_output(cwd)
    assert len(rows(tmp_path / "a run's folder")) == 1


@pytest.mark.parametrize("spelling", ["--dry_run", "--dry-run"])
@pytest.mark.parametrize("before", [True, False])
def test_a_dry_run_submits_nothing_however_it_is_spelled(slurm, tmp_path, spelling, before):
    for nodes, code, answer in ((2, 0, "to start at"), (3, 1, "Slurm does not accept the job: ")):
        words = [f"--nodes={nodes}", "--workers-per-node=1", "digits", "--batch_size=48"]
        words.insert(0 if before else len(words), spelling)
        done = slurm.run(SUBMIT, *words, cwd=tmp_path)
        assert done.returncode == code and json.loads(done.stdout)["workers"] == nodes, done.stderr
        assert answer in done.stderr.splitlines()[-1] and slurm.run("squeue", "-h").stdout == ""
        assert spelling not in (tmp_path / "runs" / "slurm" / f"digits-{nodes}x1.sbatch").read_text()


def script_for_a_container(folder: Path, image: str, *flags: str) -> str:
    done = subprocess.run([SUBMIT, "--nodes=2", "--gpus-per-node=8", f"--container-image={image}",
                           "--container-mounts=/data:/data", "--dry-run", *(flags or ["digits"]), "--batch_size=256"],
                          cwd=folder, text=True, capture_output=True, timeout=300, env=scripts_environment())
    assert done.returncode == 0, done.stderr
    [script] = (folder / "runs" / "slurm").glob("*.sbatch")
    return script.read_text()


def test_a_container_is_started_by_pyxis(tmp_path):
    """There is no Pyxis here: what can be seen is the script."""
    here = ("b.sqsh", "b.SQSH", "b.squashfs", "b:1", "b.SIF", "./b.img")
    for name in here:
        (tmp_path / name).touch()
    for image, path in (("/images/b.sqsh", "/images/b.sqsh"), ("a/b:1", "a/b:1"), ("nvcr.io#a/b:1", "nvcr.io#a/b:1"),
                        *((name, f"{tmp_path}/{name.removeprefix('./')}") for name in here)):
        script = script_for_a_container(tmp_path, image)
        assert f"export BIGBATCH_CONTAINER_IMAGE={path}\n" in script
    assert "export BIGBATCH_CONTAINER_MOUNTS=/data:/data\n" in script


@pytest.mark.parametrize(("options", "exclusive"), [(["--qos=high", "--constraint", "ib"], True),
                                                    (["--cpus-per-task=8", "--mem=64G"], False)])
def test_options_of_sbatch_and_typed_gpus_reach_the_script(options, exclusive, tmp_path):
    done = subprocess.run([SUBMIT, "--nodes=2", "--gpus-per-node=a100:4", *options, "--dry-run", "digits"],
                          cwd=tmp_path, text=True, capture_output=True, timeout=300, env=scripts_environment())
    assert done.returncode == 0 and json.loads(done.stdout)["workers"] == 8, done.stderr
    [script] = (tmp_path / "runs" / "slurm").glob("*.sbatch")
    lines = [line.removeprefix("#SBATCH ") for line in script.read_text().splitlines()]
    assert {"--gpus-per-node=a100:4", "--ntasks-per-node=4", *("=".join(options[1:3]).split() if exclusive else options)
            } <= {*lines} and ("--exclusive" in lines) == exclusive


@pytest.fixture
def gpu_node():
    with Slurm(nodes=1, cpus=2, has_gpus=True) as cluster:
        yield cluster


def test_a_job_takes_of_a_node_what_it_takes_of_its_gpus(gpu_node, tmp_path):
    """A node of 2 processors, 4,000 MB and 4 GPUs. Two jobs of half of it run at a time."""
    def script(*options) -> tuple[str, set[str]]:
        done = gpu_node.run(SUBMIT, "--nodes=1", *options, "--dry-run", "digits", cwd=tmp_path)
        assert done.returncode == 0 and "to start at" in done.stderr, done.stderr
        [path] = (tmp_path / "runs" / "slurm").glob("*.sbatch")
        lines = [line for line in path.read_text().splitlines() if line.startswith("#SBATCH ")]
        path.unlink()
        return "\n".join(["#!/bin/sh", *lines, "sleep 60"]), {line.split()[1] for line in lines}

    half = ("--gpus-per-node=2", "--workers-per-node=1")
    job, options = script(*half)
    assert {"--cpus-per-task=1", "--mem=2000M"} <= options and "--exclusive" not in options
    own = script(*half, "--mem-per-cpu=1G")[1]
    assert {"--cpus-per-task=1", "--mem-per-cpu=1G"} <= own and "--mem=2000M" not in own
    all_gpus = "--gpus-per-node=a100:4", "--workers-per-node=2"
    for whole in (all_gpus, (*half, "--exclusive"), ("--workers-per-node=1",)):
        assert "--exclusive" in script(*whole)[1]
    (tmp_path / "job").write_text(job)
    jobs = [gpu_node.run("sbatch", "--parsable", "job", cwd=tmp_path).stdout.strip() for _ in range(2)]
    gpu_node.wait_for(lambda: [gpu_node.jobs(job)[0]["JobState"] for job in jobs] == ["RUNNING"] * 2, "two jobs", 60)
    gpu_node.run("scancel", *jobs)


def test_apptainer_starts_the_workers_of_a_sif_file(tmp_path):
    """There is no Apptainer here: what would run is printed."""
    script = script_for_a_container(tmp_path, "/images/bigbatch.SIF")
    first = started_in_a_container(tmp_path, script)
    inside = first.partition(" apptainer ")[2].split()
    mounts = f"{ROOT}:{ROOT},{tmp_path}:{tmp_path},/data:/data"
    assert inside[:6] == ["exec", "--nv", f"--bind={mounts}", f"--pwd={tmp_path}", "/images/bigbatch.SIF",
                          "/opt/bigbatch/.venv/bin/python"] and "--container" not in first


@pytest.mark.parametrize(("image", "option"), [("a.sqsh", "--container-mounts="), ("a.sif", "--bind=")])
def test_a_container_sees_data_and_run_wherever_they_are(image, option, digits, tmp_path):
    """The dataset is named by the recipe, by a link; the folder of the run, which is not there yet, has a comma."""
    cwd, far = tmp_path / "cwd", tmp_path / "far"
    (cwd / "data").mkdir(parents=True)
    far.mkdir()
    (far / "digits").symlink_to(digits)
    (far / "my.flags").write_text(f"# mine\n--data_dir={far}/digits\n--epochs=1\n")

    def mounts(*flags) -> list[str]:
        shutil.rmtree(cwd / "runs", ignore_errors=True)
        body = script_for_a_container(cwd, f"/{image}", *flags)
        [found] = [word.partition("=")[2] for word in started_in_a_container(cwd, body).split()
                   if word.startswith(option)]
        return found.split(",")[3:]  # after checkout, current folder and --container-mounts

    assert mounts("digits") == []
    shutil.copytree(digits, cwd / "data" / "digits")
    assert mounts("digits", f"--data_dir={cwd}/data/digits", "--output_dir=runs/mine") == []
    assert mounts(f"{far}/my.flags", "--output_dir", f"{tmp_path}/out/rate=5,seed=0") == [
        f"{path}:{path}" for path in (f"{far}/my.flags", f"{tmp_path}/out", f"{far}/digits", digits.resolve())]
    assert (tmp_path / "out" / "rate=5,seed=0").is_dir()


def started_in_a_container(folder: Path, body: str) -> str:
    """What a job would do on its node up to the start of its workers, as the words after CUDA_CACHE_PATH and srun.

    launch.job answers on this machine."""
    node = folder / "bin"
    node.mkdir(exist_ok=True)
    (node / "srun").write_text('#!/bin/sh\necho "$CUDA_CACHE_PATH $*" >&2\n'
                               'case "$*" in *" -m launch.job "*) while [ "$1" != -m ]; do shift; done\n'
                               f'PYTHONPATH={ROOT} exec {warm_python()} "$@" ;; esac\n')
    (node / "srun").chmod(0o755)
    done = subprocess.run(["bash", "-c", body], cwd=folder, text=True, capture_output=True, timeout=300,
                          env={"PATH": f"{node}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8",
                               "SLURM_NNODES": "1", "SLURM_NODELIST": "n1", "HOME": str(folder)})
    assert "run 'uv sync'" not in done.stderr, done.stderr
    return next(line for line in done.stderr.splitlines() if "-m launch.preflight" in line)


def test_without_arguments_it_shows_its_help(tmp_path):
    done = subprocess.run([SUBMIT], cwd=tmp_path, text=True, capture_output=True, timeout=300,
                          env=scripts_environment())
    assert done.returncode == 2 and done.stderr.startswith("launch/slurm/submit.sh --nodes N") and done.stdout == ""


def test_with_a_container_the_host_needs_no_python_of_ours(tmp_path):
    """A host that has the checkout alone: the flags are checked inside."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    command = [tmp_path / "launch" / "slurm" / "submit.sh", "--nodes=1", "--gpus-per-node=8", "--dry-run"]

    def submitted(*options):
        return subprocess.run([*command, *options, "digits"], cwd=tmp_path, text=True, capture_output=True, timeout=300)

    done = submitted("--container-image=/images/bigbatch.sqsh")
    assert done.returncode == 0 and done.stdout == "" and "checks the flags when it starts" in done.stderr
    [script] = (tmp_path / "runs" / "slurm").glob("*.sbatch")
    first = started_in_a_container(tmp_path, script.read_text())  # there is no Pyxis here
    assert first.startswith(f"{tmp_path}/runs/cuda-cache --mpi=pmix")
    assert "--container-name=bigbatch-7-0" in first and "/opt/bigbatch/.venv/bin/python -m launch" in first
    done = submitted()
    assert done.returncode == 1 and "run 'uv sync'" in done.stderr


@pytest.mark.parametrize("arguments, code, message", [
    (["--nodes", "2", "digits"], 2, "--gpus-per-node or --workers-per-node is missing"),
    (["--nodes", "many", "--gpus-per-node", "4", "digits"], 2, "--nodes takes a number above 0, not 'many'"),
    (["--nodes", "2", "--gpus-per-node=0", "digits"], 2, "--workers-per-node takes a number above 0, not '0'"),
    (["--nodes"], 2, "--nodes needs a value"),
    (["--nodes=2", "--setup=no-such", "digits"], 2, "--setup: there is no file no-such"),
    (["--nodez=2", "digits"], 2, "there is no option --nodez"),
    (["-N", "2", "digits"], 2, "there is no option -N"),
    (["--nodes=2", "--gpus-per-node=4"], 2, "the recipe is missing"),
    (["--nodes=2", "--gpus-per-node=4", "sweep/%a.flags"], 2, "needs --array"),
    (["--nodes=2", "--gpus-per-node=4", "--array=0-1", "sweep/%a.flags"], 2, "no recipe sweep/0.flags"),
    (["--nodes=2", "--gpus-per-node=4", "no-such"], 2, "there is no recipe no-such"),
    (["--nodes=2", "--gpus-per-node=4", "--container-image=", "digits"], 2, "--container-image needs a value"),
    *((["--nodes=2", "--gpus-per-node=4", f"--container-image={name}", "digits"], 2, f"there is no file {name} here")
      for name in ("x.sqsh", "x.SQSH", "images/x.squashfs", "x.Sif", "./x")),
    *((["--nodes=2", "--gpus-per-node=4", f"--container-image={address}", "digits"], 2, "REGISTRY#IMAGE:TAG")
      for address in ("docker://ubuntu", "dockerd://bigbatch", "oras://h/x", "https://h/x.sif", "file:///images/x.sqsh")),
    (["--nodes=2", "--gpus-per-node=4", "--array=0-1", "digits", "--seed=3"], 2, "gives each job its own --seed"),
    (["--nodes=2", "--gpus-per-node=4", "--array=0-1", "{sweep}/%a.flags", "--output_dir", "D"], 2,
     "gives each job its own --output_dir"),
    (["--nodes=2", "--gpus-per-node=4", "digits", "--output_dir=s3://b/run"], 2, "written to an address"),
    (["--nodes=2", "--gpus-per-node=3", "digits"], 1, "is not divisible"),
    (["--nodes=2", "--gpus-per-node=4", "digits", "--optimizer=adagrad"], 2, "optimizer"),
])
def test_wrong_arguments_are_one_line_and_nothing_is_submitted(arguments, code, message, tmp_path):
    (tmp_path / "0.flags").touch()
    done = subprocess.run([SUBMIT, *(word.format(sweep=tmp_path) for word in arguments)], cwd=tmp_path, text=True,
                          capture_output=True, timeout=300, env=scripts_environment())
    assert (done.returncode, len(done.stderr.splitlines())) == (code, 1), done.stderr
    assert message in done.stderr and done.stdout == "" and not (tmp_path / "runs").exists()
