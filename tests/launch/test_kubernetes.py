"""launch/kubernetes: the manifest against the operator's schema, and its pods on emulated hosts."""
import contextlib
import copy
import json
import subprocess

import jsonschema
import pytest
import yaml
from conftest import BIN, ROOT, TINY, emulated_hosts, rows

from tests.rigs.gpus import gpu, pretend
from tests.rigs.pods import Pods, wait_for

FOLDER = ROOT / "launch" / "kubernetes"
SCHEMA = ROOT.parent / "shared" / "kubernetes" / "mpijob.v2beta1.schema.json"
TRAINING = (*TINY, "--checkpoint_every=0.5")
WORKERS = [f"bigbatch-worker-{number}.bigbatch.default.svc" for number in (0, 1)]


def manifest() -> str:
    return (FOLDER / "mpijob.yaml").read_text()


# --- the job ---

def strict(schema):
    """The schema without room for other properties, which the API server drops without a word."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return closed | {name: strict(part) for name, part in schema.items()}


def test_the_manifest_follows_the_operators_schema():
    """As it is, and with the fields for RDMA, which are comments."""
    if not SCHEMA.exists():
        pytest.skip("needs the operator's schema in ../shared/kubernetes")
    schema = strict(json.loads(SCHEMA.read_text())["schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    rdma = manifest().replace("# rdma/ib:", "rdma/ib:").replace("# securityContext:", "securityContext:")
    rdma = yaml.safe_load(rdma)
    [worker] = rdma["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert {*worker["resources"]["limits"]} == {"nvidia.com/gpu", "rdma/ib"} and "securityContext" in worker
    for job in (yaml.safe_load(manifest()), rdma):
        jsonschema.Draft7Validator(schema).validate(job)
    for broken in ("restartPolicies", "replicas"):  # the schema does notice
        wrong = copy.deepcopy(rdma)
        wrong["spec"]["mpiReplicaSpecs"]["Worker"][broken] = "four"
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft7Validator(schema).validate(wrong)


def test_the_dockerfile_has_what_the_manifest_names():
    """The user, its home with the keys, ssh's port and the folders of the claims."""
    dockerfile, spec = (ROOT / "Dockerfile").read_text(), yaml.safe_load(manifest())["spec"]
    home = spec["sshAuthMountPath"].removesuffix("/.ssh")
    for role in spec["mpiReplicaSpecs"].values():
        pod = role["template"]["spec"]
        [container] = pod["containers"]
        assert f"useradd --uid {pod['securityContext']['runAsUser']} --no-create-home --home-dir {home} " in dockerfile
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/data", "/output", "/dev/shm"}
        assert "command" not in container  # the image's entry point is tini
    assert f"{home} /data /output" in dockerfile
    ports = {word for name in ("ssh_config", "sshd_config")
             for line in (FOLDER / name).read_text().splitlines() for word in line.split()[1:] if "Port" in line}
    assert ports == {"2222"}


# --- its pods ---

@contextlib.contextmanager
def prepared(digits, *flags, options=()):
    """The pods of the manifest before their start, as edited for two workers without GPUs that train the digits."""
    job = yaml.safe_load(manifest())
    job["spec"]["slotsPerWorker"] = 1
    [launcher] = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    recipe = launcher["args"].index("sony_1811.05233/table3-reference")
    launcher["args"][recipe:recipe + 1] = [*options, "digits"]
    launcher["args"] += [*TRAINING, *flags]
    with emulated_hosts("w0", "w1", cold=True) as hosts:  # as users that may not reach the server of forks
        pods = Pods(hosts, job)
        hosts.run("login", "cp", "-r", f"{digits}/.", f"{hosts.top}/data").check_returncode()
        for host in hosts.names:
            pods.prepare(host)
        yield pods


@pytest.fixture
def launcher(tmp_path):
    """A function that starts the launcher of pods, and one that returns what it has printed so far."""
    log = tmp_path / "log"

    def start(pods):
        with open(log, "a") as output:
            return pods.start("login", stdout=output, stderr=subprocess.STDOUT)

    return start, log.read_text


@pytest.mark.launchers
def test_a_run_goes_on_after_a_stop_and_after_a_lost_pod(digits, launcher):
    """Kubernetes starts the launcher again after each exit code but 0."""
    start, log = launcher
    with prepared(digits, "--epochs=1000", options=["--no-preflight"]) as pods:
        run = pods.hosts.top / "output" / "bigbatch"

        def newest():
            return max((run / "checkpoints").glob("step-*[0-9]"), default=None)

        def started():
            """The launcher, after it has waited for the pods and its training has written a checkpoint."""
            before, process = newest(), start(pods)
            wait_for(lambda: newest() != before, process)
            return process

        for host in ("w0", "w1"):
            pods.start(host)
        other = subprocess.Popen(pods.as_user("w0", BIN / "python", "-X", "job=other", "-c", "input()"),
                                 stdin=subprocess.PIPE)
        process = started()
        pods.terminate("login")  # as when its node is drained
        assert process.wait(300) == 75, log()
        assert log().count("train.py: stopped on request") == 1 and pods.hosts.trainers() == []
        assert other.poll() is None

        process = started()
        pods.hosts.switch_off("w1")
        assert process.wait(300) == 1, log()

        before, process = newest(), start(pods)
        wait_for(lambda: f"horovodrun.sh: waiting for {WORKERS[1]}: cannot be reached by ssh" in log(), process)
        pods.replace("w1")
        wait_for(lambda: newest() != before, process)
        for host in ("w0", "w1", "login"):  # as when the job is suspended
            pods.terminate(host)
        assert process.wait(300) == 75, log()
        assert log().count("train.py: stopped on request") == 2 and pods.hosts.trainers() == []
        assert log().count("resumed after step") == 2 and (run.parent / "cuda-cache").is_dir()
        epochs = [row["epoch"] for row in rows(run)]
        assert epochs == list(range(1, len(epochs) + 1)) != []


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
    with prepared(digits, "--epochs=1") as pods:
        for host in ("w0", "w1"):
            pods.run(host, f"mount --bind {tmp_path} /usr/local/bin", CARD)
        pods.run("w0", DEVICES)
        pods.start("w0", before=("prlimit", "--memlock=65536:65536"))
        pods.run("w1", "mount -t tmpfs -o size=64m tmpfs /dev/shm", f"mount -t tmpfs tmpfs {pods.hosts.top}/data",
                 f"mount --bind {tmp_path}/__init__.py '{ROOT}'/launch/__init__.py")
        pods.start("w1")
        assert start(pods).wait(300) == 1
    found = [line.removeprefix("preflight: ").partition(";")[0] for line in log().splitlines() if "preflight: " in line]
    assert f"{WORKERS[0]}: a process may lock 0.065536 MB of memory, too little for RDMA" in found
    for problem in ("0.07 GB free in /dev/shm, less than 0.25", "/dev/infiniband is missing",
                    f"the folder {pods.hosts.top}/data is empty"):
        assert f"{WORKERS[1]}: {problem}" in found, found
    assert any(line.startswith(f"{WORKERS[1]}: bigbatch is ") for line in found)
    assert len(found) == 5 and "Traceback" not in log()
