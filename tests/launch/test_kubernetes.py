"""launch/kubernetes: the job against the operator's schema, and its pods on emulated hosts."""
import contextlib
import copy
import json
import os
import subprocess

import jsonschema
import pytest
import yaml
from conftest import ROOT, emulated_hosts, rows

from tests.rigs.gpus import gpu, pretend
from tests.rigs.pods import Pods, wait_for

SUBMIT = ROOT / "launch" / "kubernetes" / "submit.sh"
SCHEMA = ROOT.parent / "shared" / "kubernetes" / "mpijob.v2beta1.schema.json"
TRAINING = ("digits", "--model=convnet", "--optimizer=sgd", "--learning_rate=0.02", "--warmup=none",
            "--checkpoint_every=0.5")


def submit(*arguments, **environment) -> subprocess.CompletedProcess:
    return subprocess.run([SUBMIT, *arguments], text=True, capture_output=True, timeout=60,
                          env=os.environ | environment)


def documents(*arguments) -> list[dict]:
    done = submit("--image=registry.example/bigbatch:1", *arguments)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


# --- the job ---

def strict(schema):
    """The schema without room for other properties, which the API server drops without a word."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return closed | {name: strict(part) for name, part in schema.items()}


@pytest.fixture(scope="module")
def schema():
    if not SCHEMA.exists():
        pytest.skip("needs the operator's schema in ../shared/kubernetes")
    closed = strict(json.loads(SCHEMA.read_text())["schema"])
    closed["properties"]["metadata"] = {"type": "object"}
    return closed


@pytest.mark.parametrize("arguments", [
    ("--workers=4", "--gpus-per-worker=8", "--data=imagenet", "--output=runs", "--rdma=rdma/hca_shared_devices_a",
     "--no-preflight", "--name=mine", "sony_1811.05233/table3-reference"),
    ("--workers=1", "digits", "--epochs=1"),
])
def test_the_job_follows_the_operators_schema(schema, arguments):
    [job] = documents(*arguments)
    jsonschema.Draft7Validator(schema).validate(job)
    for broken in ("restartPolicies", "replicas"):  # the schema does notice
        wrong = copy.deepcopy(job)
        wrong["spec"]["mpiReplicaSpecs"]["Worker"][broken] = "four"
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft7Validator(schema).validate(wrong)


def test_a_job_with_gpus_claims_and_rdma():
    [job] = documents("--workers=4", "--gpus-per-worker=8", "--data=imagenet", "--output=runs", "--rdma=rdma/hca",
                      "sony_1811.05233/table3-reference", "--epochs=2")
    spec = job["spec"]
    assert job["metadata"]["name"] == "table3-reference" and spec["slotsPerWorker"] == 8
    assert spec["runPolicy"] == {"cleanPodPolicy": "Running", "backoffLimit": 0}
    launcher, worker = (spec["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    assert (launcher["replicas"], worker["replicas"]) == (1, 4)
    for pod in (launcher["template"]["spec"], worker["template"]["spec"]):
        assert pod["securityContext"]["runAsUser"] == 10000 and pod["terminationGracePeriodSeconds"] == 300
        claims = {volume["name"]: volume.get("persistentVolumeClaim", {}).get("claimName") for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: claims[mount["name"]] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts["/data"] == "imagenet" and mounts["/output"] == "runs"
        assert "command" not in pod["containers"][0]  # the image's entry point is tini
    assert launcher["template"]["spec"]["containers"][0]["args"] == [
        "python", "-m", "launch.pods", "/output/table3-reference",
        "launch/recipes/sony_1811.05233/table3-reference.flags", "--output_dir=/output/table3-reference",
        "--data_dir=/data", "--epochs=2"]
    [container] = worker["template"]["spec"]["containers"]
    assert len({json.dumps(role["template"]["spec"]["securityContext"]) for role in (launcher, worker)}) == 1
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/hca": 1}
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    shared_memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}
    assert shared_memory in worker["template"]["spec"]["volumes"]


def test_the_dockerfile_has_what_the_job_names():
    """The user, its home with the keys, ssh's port and the folders of the claims."""
    dockerfile, [job] = (ROOT / "Dockerfile").read_text(), documents("--workers=1", "digits")
    user = job["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["securityContext"]["runAsUser"]
    home = job["spec"]["sshAuthMountPath"].removesuffix("/.ssh")
    assert f"useradd --uid {user} --no-create-home --home-dir {home} " in dockerfile
    assert f"{home} /data /output" in dockerfile
    ports = {word for name in ("ssh_config", "sshd_config")
             for line in (SUBMIT.parent / name).read_text().splitlines() for word in line.split()[1:] if "Port" in line}
    assert ports == {"2222"}


def test_a_recipe_of_ones_own_comes_with_the_job(tmp_path):
    own = tmp_path / "Our_own.flags"
    own.write_text("# ours\n--data_dir=digits\n--model=convnet\n")
    recipe, job = documents("--workers=2", own, "--learning_rate=0:1,3:2")
    assert recipe["data"] == {own.name: own.read_text()}
    pod = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    [volume] = pod["volumes"]
    assert job["metadata"]["name"] == "our-own" and volume["configMap"]["name"] == recipe["metadata"]["name"]
    assert pod["containers"][0]["args"][4:6] == ["/recipe/Our_own.flags", "--output_dir=/output/our-own"]
    assert pod["containers"][0]["volumeMounts"] == [{"name": volume["name"], "mountPath": "/recipe"}]
    assert pod["containers"][0]["args"][-1] == "--learning_rate=0:1,3:2"


def test_apply_hands_the_job_to_kubectl(tmp_path):
    kubectl = tmp_path / "kubectl"  # the one part that needs a cluster
    kubectl.write_text(f'#!/bin/sh\necho "$@"\ncat >{tmp_path}/applied\nexit 3\n')
    kubectl.chmod(0o755)
    arguments = ("--image=b", "--workers=2", "digits")
    done = submit("--apply", *arguments, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout) == (3, "apply --filename=-\n")
    assert (tmp_path / "applied").read_text() == submit(*arguments).stdout != ""
    done = submit("--apply", *arguments, "--dry_run", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 3 and done.stdout.endswith("\napply --filename=- --dry-run=server\n")
    done = submit("--dry-run", *arguments)
    assert done.returncode == 0 and json.loads(done.stdout)["workers"] == 2
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "env", "grep", "id"):
        (tmp_path / "bin" / tool).symlink_to(f"/usr/bin/{tool}")
    done = submit("--apply", *arguments, PATH=str(tmp_path / "bin"))
    assert (done.returncode, done.stderr) == (1, "submit.sh: kubectl: No such file or directory\n")


@pytest.mark.parametrize("arguments, code, message", [
    (["--workers=2", "--image=b"], 2, "recipe"),
    (["--workers=0", "--image=b", "digits"], 2, "0 is not a positive integer"),
    (["--workers=2", "digits"], 2, "--image"),
    (["--workers=2", "--image=b", "no-such"], 1, "there is no recipe no-such"),
    (["--workers=2", "--image=b", "digits", "--optimizer=adagrad"], 2, "optimizer"),
    (["--workers=2", "--image=b", "--name=My_job", "digits"], 2, "--name takes lower-case letters"),
    (["--workers=7", "--image=b", "digits"], 1, "128 is not divisible by 7 workers"),
    (["--workers=2", "--image=b", "digits", "--workers_schedule=0:4"], 1, "needs 4 workers, but 2 are available"),
    (["--workers=2", "--image=b", "digits", "--output_dir=mine"], 2, "--output_dir=mine is lost with the pods"),
])
def test_wrong_arguments_are_one_line(arguments, code, message):
    done = submit(*arguments)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (code, "", 1), done.stderr
    assert message in done.stderr


# --- its pods ---

@contextlib.contextmanager
def prepared(digits, *arguments):
    """The pods of a job before their start, each with one worker."""
    [job] = documents("--workers=2", "--output=runs", "--data=digits", *arguments)
    with emulated_hosts("w0", "w1") as hosts:
        pods = Pods(hosts, job)
        hosts.run("login", "cp", "-r", f"{digits}/.", f"{hosts.top}/data").check_returncode()
        for host in hosts.names:
            pods.prepare(host)
        yield pods


@pytest.fixture(scope="module")
def pods(digits):
    """The pods of a job. Those of its workers run."""
    with prepared(digits, "--no-preflight", *TRAINING, "--epochs=30") as pods:
        for host in ("w0", "w1"):
            pods.start(host)
        yield pods


@pytest.fixture
def launcher(tmp_path):
    """A function that starts the launcher of pods, and one that returns what it has printed so far."""
    log = tmp_path / "log"

    def start(pods, *flags, run=""):
        with open(log, "a") as output:
            return pods.start("login", *flags, run=run, stdout=output, stderr=subprocess.STDOUT)

    return start, log.read_text


def steps(pods, run="digits") -> list[str]:
    return sorted(path.name for path in (pods.hosts.top / "output" / run / "checkpoints").glob("step-*[0-9]"))


def test_the_training_goes_on_after_a_lost_pod_and_a_drained_one(pods, launcher):
    start, log = launcher
    process = start(pods)
    wait_for(lambda: steps(pods), process)
    pods.hosts.switch_off("w1")
    wait_for(lambda: log().endswith("launch.pods: waiting for digits-worker-1.digits.default.svc\n"), process)
    before = steps(pods)[-1]
    pods.replace("w1")
    wait_for(lambda: steps(pods)[-1] > before, process)
    assert log().count("resumed after step") == 1
    pods.terminate("w0")
    wait_for(lambda: log().endswith("launch.pods: waiting for digits-worker-0.digits.default.svc\n"), process)
    assert log().count("train.py: stopped on request") == 2  # on each rank
    pods.start("w0")
    assert process.wait(180) == 0, log()
    assert log().count("resumed after step") == 2
    assert [row["epoch"] for row in rows(pods.hosts.top / "output" / "digits")] == list(range(1, 31))


@pytest.mark.parametrize("asked", [("login",), ("w0", "w1", "login")])
def test_a_job_that_is_asked_to_stop_saves_and_ends(pods, launcher, asked):
    """Its launcher is, as when its node is drained, or all pods are, as when the job is suspended."""
    start, log = launcher
    process = start(pods, "--epochs=1000", run=f"stopped-{len(asked)}")
    wait_for(lambda: steps(pods, f"stopped-{len(asked)}"), process)
    for host in asked:
        pods.terminate(host)
    assert process.wait(60) == 75, log()
    assert log().count("train.py: stopped on request") == 2 and pods.hosts.trainers() == []
    for host in asked[:-1]:
        pods.start(host)


def test_a_wrong_flag_is_2_and_is_not_tried_again(pods, launcher):
    start, log = launcher
    assert start(pods, "--optimizer=none").wait(60) == 2
    assert len(log().splitlines()) == 1 and "optimizer" in log()


def test_an_error_that_training_repeats_ends_the_job(pods, launcher):
    """The first start writes a checkpoint, so there is a second one, which diverges before it can write another."""
    start, log = launcher
    assert start(pods, "--learning_rate=0:0.02,2:1e30", "--lr_schedule=constant", run="failing").wait(180) == 1
    assert log().count("the training continues from its newest checkpoint") == 1, log()


DEVICES = """
mkdir /mnt/dev && mount -t tmpfs tmpfs /mnt/dev && cd /mnt/dev
for name in null zero full random urandom tty; do touch $name && mount --bind /dev/$name $name; done
mkdir shm pts infiniband && mount --rbind /dev/shm shm && mount --rbind /dev/pts pts && touch infiniband/uverbs0
mount --rbind /mnt/dev /dev
"""  # as a container runtime makes it
CARD = """
mount -t tmpfs tmpfs /sys/class && mkdir -p /sys/class/infiniband/mlx5_0/ports/1
echo InfiniBand >/sys/class/infiniband/mlx5_0/ports/1/link_layer
"""


def test_what_breaks_first_on_a_pod_is_a_line_each(digits, launcher, tmp_path):
    """w0 may lock little memory. w1 has a small /dev/shm, no devices of InfiniBand, no data, and another image."""
    start, log = launcher
    pretend(tmp_path, [gpu(0)])  # the one thing that cannot be had here
    (tmp_path / "__init__.py").write_text("# another version")
    tmp_path.chmod(0o755)
    with prepared(digits, *TRAINING, "--epochs=1") as pods:
        for host in ("w0", "w1"):
            pods.run(host, f"mount --bind {tmp_path} /usr/local/bin", CARD)
        pods.run("w0", DEVICES)
        pods.start("w0", before=("prlimit", "--memlock=65536:65536"))
        pods.run("w1", "mount -t tmpfs -o size=64m tmpfs /dev/shm", f"mount -t tmpfs tmpfs {pods.hosts.top}/data",
                 f"mount --bind {tmp_path}/__init__.py {ROOT}/common/__init__.py")
        pods.start("w1")
        assert start(pods).wait(120) == 1
    names = [f"digits-worker-{number}.digits.default.svc" for number in (0, 1)]
    found = [line.removeprefix("preflight: ").partition(";")[0] for line in log().splitlines() if "preflight: " in line]
    assert f"{names[0]}: a process may lock 0.065536 MB of memory, too little for RDMA" in found
    for problem in ("0.07 GB free in /dev/shm, less than 0.25", "/dev/infiniband is missing",
                    f"the folder {pods.hosts.top}/data is empty"):
        assert f"{names[1]}: {problem}" in found, found
    assert any(line.startswith(f"{names[1]}: bigbatch is ") for line in found)
    assert len(found) == 5 and "Traceback" not in log()
