"""Emulates several hosts on one machine, each with its own network, host name, processes, sshd and working folder.

Needs iproute2, openssh-server, and root or what tests.rigs.namespaces needs instead. The hosts are connected to one
bridge. If a host differs from the others (in a program, a package's version, a missing dataset), its own files are
mounted over those that all hosts see.
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.rigs.namespaces import ALL, enter, unshare

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
NETWORK = "10.78.0"
WORKER = r"^\S*python (-IS \S*python )?(-X \S+ )?\S*train\.py"  # of a worker, or of what stands for it
INIT = """
set -e
hostname "$NAME"
ip link set lo up
until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
ip address add "$ADDRESS/24" dev eth0
ip link set eth0 up
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
mount --bind "$TOP/$NAME" "$TOP/work"
mount --bind "$TOP/$NAME.tmp" "$TOP/tmp"
mount --bind "$TOP/hosts" /etc/hosts
mount --bind "$TOP/passwd" /etc/passwd
mount --bind "$TOP/shadow" /etc/shadow
mount --bind "$TOP/ssh_config" /etc/ssh/ssh_config
/usr/sbin/sshd -f "$TOP/sshd_config" -o ListenAddress="$ADDRESS" -E "$TOP/$NAME.log"
touch "$TOP/$NAME.ready"
while :; do sleep 1000 & wait; done
"""


class Hosts:
    """Context manager that runs `login` and the named hosts. work: path of the working folder, different on each.

    python: what the scripts in launch/ start instead of this environment's Python, such as one that starts forks.
    """

    def __init__(self, *names: str, python: str | None = None):
        self.names, self._processes, self._python = ("login", *names), {}, python
        self.top = Path(tempfile.mkdtemp(prefix="hosts-", dir="/tmp"))
        self.work = self.top / "work"

    def __enter__(self):
        self.work.mkdir()
        (self.top / "tmp").mkdir()
        for key in ("identity", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.top / key], check=True)
        (self.top / "hosts").write_text("127.0.0.1 localhost\n" + "".join(
            f"{self.address(name)} {name}\n" for name in self.names) + f"{NETWORK}.250 gone\n")
        # An ordinary user, who is root here, can read neither root's home nor /etc/shadow.
        (self.top / "passwd").write_text(re.sub(r"^root:.*", f"root:x:0:0:root:{Path.home()}:/bin/bash",
                                                Path("/etc/passwd").read_text(), flags=re.MULTILINE))
        (self.top / "shadow").write_text("root:*:19000::::::\n")
        (self.top / "ssh_config").write_text(
            f"Host *\nIdentityFile {self.top}/identity\nIdentitiesOnly yes\nUserKnownHostsFile {self.top}/known_hosts\n"
            "LogLevel ERROR\n")
        (self.top / "sshd_config").write_text(
            f"HostKey {self.top}/host_key\nAuthorizedKeysFile {self.top}/identity.pub\nStrictModes no\nUsePAM no\n"
            f"SetEnv TMPDIR={self.top}/tmp\n"
            "PidFile none\nPasswordAuthentication no\nKbdInteractiveAuthentication no\nMaxStartups 100\n")
        self._start("switch", *unshare(every_user=True), "--net", "sleep", "infinity")
        self._wait_for(lambda: Path(f"/proc/{self._processes['switch'].pid}/comm").read_text() == "sleep\n")
        self._switch("ip", "link", "add", "bridge", "type", "bridge")
        self._switch("ip", "link", "set", "bridge", "up")
        for name in self.names:
            self.switch_on(name)
        return self

    def __exit__(self, *_):
        for process in self._processes.values():
            process.kill()
            process.wait()
        shutil.rmtree(self.top, ignore_errors=True)

    def address(self, name: str) -> str:
        return f"{NETWORK}.{10 + self.names.index(name)}"

    def switch_on(self, name: str) -> None:
        (self.top / name).mkdir(exist_ok=True)
        # Every host numbers its processes from 1. mpirun fails where a killed one of its number has left its folder.
        shutil.rmtree(self.top / f"{name}.tmp", ignore_errors=True)
        (self.top / f"{name}.tmp").mkdir()
        (self.top / f"{name}.ready").unlink(missing_ok=True)
        self._start(name, *self._at_the_switch(), "unshare", *ALL, "--kill-child", "--propagation", "private", "sh",
                    "-c", INIT,
                    env=os.environ | {"NAME": name, "ADDRESS": self.address(name), "TOP": str(self.top)})
        self._wait_for(lambda: self._in_own_network(name))
        self._switch("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns",
                     str(self._processes[name].pid))
        self._switch("ip", "link", "set", f"to-{name}", "master", "bridge", "up")
        self._wait_for((self.top / f"{name}.ready").exists)

    def switch_off(self, name: str) -> None:
        """Ends a host as if its power were cut."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def pull_cable(self, name: str) -> None:
        self._switch("ip", "link", "set", f"to-{name}", "down")

    def plug_cable(self, name: str) -> None:
        self._switch("ip", "link", "set", f"to-{name}", "up")

    def shape(self, rate: str) -> None:
        """Limits the rate at which every host sends. rate: in the syntax of tc, such as `1gbit`."""
        for name in self.names:
            self.run(name, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "64kb",
                     "latency", "100ms").check_returncode()

    def words(self, name: str, *command) -> list[str]:
        """Returns the words of a command line that runs a command on a host, in its own working folder."""
        pid, python = self._processes[name].pid, [f"BIGBATCH_PYTHON={self._python}"] if self._python else []
        return [*enter(pid, "--net", "--mount", "--uts", f"--pid=/proc/{pid}/ns/pid_for_children"),
                f"--wdns={self.work}", "env", "-i", f"HOME={Path.home()}", "LANG=C.UTF-8", f"TMPDIR={self.top}/tmp",
                f"PATH={BIN}:/usr/local/bin:/usr/bin:/bin:/usr/sbin", *python, *map(str, command)]

    def run(self, name: str, *command, timeout=200) -> subprocess.CompletedProcess:
        return subprocess.run(self.words(name, *command), text=True, capture_output=True, timeout=timeout,
                              stdin=subprocess.DEVNULL)

    def cover(self, name: str, path, replacement) -> None:
        """Replaces, on one host, a file that all hosts have."""
        self.run(name, "mount", "--bind", replacement, path).check_returncode()

    def uncover(self, name: str, path) -> None:
        self.run(name, "umount", path).check_returncode()

    def trainers(self) -> list[str]:
        """Returns the processes of train.py and preflight, and all forks, on all hosts, each as `host: command`."""
        found = []
        for name in self._processes:
            if name != "switch":
                pattern = r"python.*(train\.py|launch\.preflight|rigs/warm\.py)"
                lines = self.run(name, "pgrep", "-fa", pattern).stdout.splitlines()
                found += [f"{name}: {line}" for line in lines
                          if not any(word in line for word in ("horovodrun", "distributed.gloo", "ssh"))]
        return found

    def _start(self, name, *command, env=None):
        self._processes[name] = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command], env=env, stdin=subprocess.DEVNULL, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)

    def _switch(self, *command):
        subprocess.run([*self._at_the_switch("--net"), *command], check=True)

    def _at_the_switch(self, *namespaces):
        return enter(self._processes["switch"].pid, *namespaces)

    def _in_own_network(self, name):
        return os.readlink(f"/proc/{self._processes[name].pid}/ns/net") != os.readlink("/proc/self/ns/net")

    @staticmethod
    def _wait_for(condition, seconds=10):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "a host has not started in time"
            time.sleep(0.02)
