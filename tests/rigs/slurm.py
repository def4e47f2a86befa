"""A Slurm cluster of emulated nodes on one machine, for as long as a test needs it.

Each node is a slurmd with its own host name, mounts and processes; they share one network. Needs root and Debian's
slurmctld, slurmd, slurm-client, slurm-wlm-basic-plugins, munge and libpmix-dev.
"""
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from conftest import BIN, require_tool, skip, warm_python

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
SEARCH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
OWN = re.compile("SLURM|SBATCH|SRUN|PMI|OMPI|BIGBATCH")  # of a job that these tests may run in
CONFIGURATION = """
ClusterName=rig
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={top}/munge.socket,cred_expire=5
{addresses}
StateSaveLocation={top}/state
SlurmdSpoolDir={top}/spool/%n
SlurmctldPidFile={top}/slurmctld.pid
SlurmdPidFile={top}/%n.pid
SlurmctldLogFile={top}/slurmctld.log
SlurmdLogFile={top}/%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,bf_interval=1
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdTimeout=10
KillWait=30
MinJobAge=3600
{nodes}
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""
NODE = """hostname {name} && mount --bind {top}/hosts /etc/hosts && mount --bind {top}/spool/{name} {top}/pmix \
&& mount --bind {top}/tmp-{name} {top}/tmp && slurmd -D -N {name} & wait"""


class Slurm:
    """Context: a cluster of node1, node2, ..., all idle. has_gpus: each has four GPUs, which are none."""

    def __init__(self, nodes: int = 2, cpus: int = 2, has_gpus: bool = False):
        for tool in TOOLS:
            require_tool(tool, f"/usr/sbin/{tool}")
        if os.geteuid():
            skip("needs root: the daemons of this Slurm run as root")
        self.nodes, self._cpus, self._processes = [f"node{n + 1}" for n in range(nodes)], cpus, {}
        self._has_gpus = has_gpus
        self.top = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # a short name, for its sockets
        self.environment = {key: value for key, value in os.environ.items() if not OWN.match(key)} | {
            "PATH": f"{BIN}:{SEARCH}", "BIGBATCH_PYTHON": warm_python(), "SLURM_CONF": str(self.top / "slurm.conf"),
            "TMPDIR": str(self.top / "tmp")}

    def __enter__(self):
        self.top.chmod(0o711)
        for folder in ("state", "pmix", "tmp", *(f"spool/{name}" for name in self.nodes)):
            (self.top / folder).mkdir(parents=True)
        key = self.top / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        self._configure()
        self._start("munged", "munged", "--foreground", "--force", f"--key-file={key}",
                    f"--socket={self.top}/munge.socket", f"--pid-file={self.top}/munged.pid",
                    f"--log-file={self.top}/munged.log", f"--seed-file={self.top}/munge.seed")
        self.wait_for((self.top / "munge.socket").exists, "munge")
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for name in self.nodes:
            self.switch_on(name)
        idle = ("sinfo", "-hNp", "normal", "-t", "idle", "-o", "%N")
        self.wait_for(lambda: self.run(*idle).stdout.split() == self.nodes, "idle nodes")
        return self

    def __exit__(self, *_):
        for process in reversed(self._processes.values()):
            process.kill()
            process.wait()
        shutil.rmtree(self.top, ignore_errors=True)

    def _configure(self):
        host, ports = socket.gethostname().split(".")[0], _free_ports(len(self.nodes) + 1)
        try:
            local = socket.gethostbyname(host) == "127.0.0.1"
        except OSError:
            local = False
        # daemons would listen on the address of the host's name, where jobs do not look for them
        addresses = "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny" if local else ""
        nodes = [f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs={self._cpus} RealMemory=4000"
                 for name, port in zip(self.nodes, ports[1:], strict=True)]
        if self._has_gpus:
            nodes = ["GresTypes=gpu", *(f"{node} Gres=gpu:a100:4" for node in nodes)]
            (self.top / "gres.conf").write_text(  # any four devices
                "AutoDetect=off\nName=gpu Type=a100 File=/dev/null,/dev/zero,/dev/full,/dev/random\n")
        (self.top / "slurm.conf").write_text(CONFIGURATION.format(
            top=self.top, host=host, port=ports[0], addresses=addresses, nodes="\n".join(nodes)))
        (self.top / "mpi.conf").write_text(f"PMIxCliTmpDirBase={self.top}/pmix\n")
        (self.top / "hosts").write_text(f"127.0.0.1 localhost {host} {' '.join(self.nodes)}\n")

    def switch_on(self, name: str) -> None:
        # A node's processes are numbered from 1: mpirun fails where a killed one of its number has left its folder.
        shutil.rmtree(self.top / f"tmp-{name}", ignore_errors=True)
        (self.top / f"tmp-{name}").mkdir()
        self._start(name, "unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c",
                    NODE.format(name=name, top=self.top))

    def switch_off(self, name: str) -> None:
        """As if its power were cut."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def run(self, *command, cwd=None, timeout=300) -> subprocess.CompletedProcess:
        return subprocess.run([*map(str, command)], env=self.environment, text=True, capture_output=True, cwd=cwd,
                              timeout=timeout, stdin=subprocess.DEVNULL)

    def jobs(self, number: str) -> list[dict]:
        """What `scontrol show job` says of a job, or of each task of an array."""
        output = self.run("scontrol", "-o", "show", "job", number).stdout
        return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in output.splitlines() if line.strip()]

    def wait_for_end(self, number: str, timeout: float) -> list[dict]:
        final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        self.wait_for(lambda: all(job["JobState"] in final for job in self.jobs(number)), f"job {number}", timeout)
        return self.jobs(number)

    def wait_for(self, condition, what: str, timeout: float = 20) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            gone = [name for name, process in self._processes.items() if process.poll() is not None]
            assert not gone, (gone, (self.top / f"{gone[0]}.output").read_text())
            assert time.monotonic() < deadline, f"no {what} within {timeout} s"
            time.sleep(0.1)

    def _start(self, name, *command):
        with open(self.top / f"{name}.output", "ab") as output:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command], env=self.environment, stdout=output, stderr=output,
                stdin=subprocess.DEVNULL, start_new_session=True)


def _free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports
