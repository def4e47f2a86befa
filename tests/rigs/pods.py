"""The pods of an MPIJob on emulated hosts: does what Kubeflow's operator and a kubelet would do, without Kubernetes.

The operator's files are a list of hosts, and ssh keys that belong to root. Each host is a pod: its processes run as the
user of the job, with a home, a /dev/shm and an sshd of their own. The claims are folders that all pods share.
"""
import subprocess
import sys
import time
from pathlib import Path

from tests.rigs.hosts import ROOT, Hosts

FOLDERS = {"/data": "data", "/output": "output", "/etc/mpi": "mpi"}  # in the pods: here, in the folder of the hosts


class Pods:
    """The pods of a job: `login` is its launcher, and the other hosts are its workers."""

    def __init__(self, hosts: Hosts, job: dict):
        self.hosts, self._name, self._spec = hosts, job["metadata"]["name"], job["spec"]
        self._user = self._template("Worker")["spec"]["securityContext"]["runAsUser"]
        self._home = hosts.top / "home"
        hosts.top.chmod(0o755)
        for folder in (hosts.top / "ssh", self._home, *(hosts.top / name for name in FOLDERS.values())):
            folder.mkdir(exist_ok=True)
        (hosts.top / "output").chmod(0o777)
        self._write_operators_files()

    def _write_operators_files(self):
        top, workers = self.hosts.top, self.hosts.names[1:]
        names = [f"{self._name}-worker-{number}.{self._name}.default.svc" for number in range(len(workers))]
        (top / "mpi" / "hostfile").write_text("".join(f"{pod} slots={self._spec['slotsPerWorker']}\n" for pod in names))
        for path, line in ((top / "hosts", "".join(f"{self.hosts.address(host)} {pod}\n" for host, pod in
                                                   zip(workers, names, strict=True))),
                           (top / "passwd", f"bigbatch:x:{self._user}:{self._user}::{self._home}:/bin/sh\n")):
            with open(path, "a") as file:
                file.write(line)
        (top / "ssh_config").write_text((ROOT / "launch" / "kubernetes" / "ssh_config").read_text())
        key = top / "ssh" / "id_rsa"
        subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", key], check=True)
        (top / "ssh" / "authorized_keys").write_text(key.with_suffix(".pub").read_text())
        key.chmod(0o644)  # as a Secret's files are by default

    def prepare(self, host: str) -> None:
        """Mounts what a pod has of its own."""
        top = self.hosts.top
        script = [f"chmod 1777 {top}/tmp", "mount -t tmpfs tmpfs /mnt", f"cd {self._home}",
                  "mount -t tmpfs -o mode=1777 tmpfs . && cd $PWD && mkdir .ssh && mount --bind ../ssh .ssh"]
        # The Python of the tests may be in a home that only its owner can enter.
        hidden = [path for path in (Path(sys.base_prefix), ROOT) if path.is_relative_to(Path.home())]
        script += [f"mkdir /mnt/{n} && mount --bind {path} /mnt/{n}" for n, path in enumerate(hidden)]
        if hidden:
            script.append(f"mount -t tmpfs -o mode=755 tmpfs {Path.home()}")
        script += [f"mkdir -p {path} && mount --bind /mnt/{n} {path}" for n, path in enumerate(hidden)]
        for volume in self._template("Worker")["spec"]["volumes"]:
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                size = volume["emptyDir"]["sizeLimit"].removesuffix("i")
                script.append(f"mount -t tmpfs -o size={size} tmpfs /dev/shm")
        self.run(host, *script)

    def run(self, host: str, *script: str) -> None:
        """Runs commands of a shell as root on a host."""
        done = self.hosts.run(host, "sh", "-ec", "\n".join(script))
        assert done.returncode == 0, done.stderr

    def start(self, host: str, before: tuple[str, ...] = (), **options) -> subprocess.Popen:
        """Starts the container of a pod. before: words that start it."""
        [container] = self._template("Launcher" if host == "login" else "Worker")["spec"]["containers"]
        given = [f"{one['name']}={one['value']}" for one in container.get("env", [])]
        words = self.as_user(
            host, *before, "env", "OMPI_MCA_plm_rsh_args=-o ConnectionAttempts=10", "USER=bigbatch",
            f"HOME={self._home}", f"OMPI_MCA_orte_default_hostfile={self.hosts.top}/mpi/hostfile",
            *map(self.here, given), "sh", "-c", f'cd "{ROOT}" && exec launch/entrypoint.sh "$@"', "sh",
            *map(self.here, container["args"]))
        return subprocess.Popen(words, text=True, stdin=subprocess.DEVNULL, **options)

    def as_user(self, host: str, *command) -> list[str]:
        """Returns the words that run a command on a host as the user of the job."""
        return self.hosts.words(host, "setpriv", f"--reuid={self._user}", f"--regid={self._user}", "--clear-groups",
                                *command)

    def replace(self, host: str) -> None:
        """Starts a pod again on another node, after `switch_off`."""
        self.hosts.switch_on(host)
        self.prepare(host)
        self.start(host)
        for other in self.hosts.names:  # a new pod has another address, which nobody has looked up yet
            self.run(other, "ip neighbour flush all")

    def terminate(self, host: str) -> None:
        """Sends SIGTERM to the first process of a container, as a kubelet does before it deletes a pod."""
        first = r"\S*python -m launch\.horovodrun" if host == "login" else r"bash \S*worker\.sh"
        self.hosts.run(host, "pkill", "-TERM", "-f", f"^{first}").check_returncode()

    def here(self, word: str) -> str:
        """Replaces a folder of the pods in a word `name=value`."""
        for folder, name in FOLDERS.items():
            word = word.replace(f"={folder}", f"={self.hosts.top}/{name}")
        return word

    def _template(self, role):
        return self._spec["mpiReplicaSpecs"][role]["template"]


def wait_for(condition, process: subprocess.Popen | None = None, seconds=120):
    """Waits until a condition is true. Fails if the process ends before."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert (process is None or process.poll() is None) and time.monotonic() < deadline
        time.sleep(0.1)
