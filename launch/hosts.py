"""The hosts of a training run: their names, slots, and the facts that each reports over ssh before the start."""
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.errors import UserError, complain

PATIENCE = 20  # seconds for a host's answer
PAUSE = 2  # seconds until hosts that do not answer are asked again
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "-o", "ServerAliveInterval=10",  # ends after 30 s
       "-o", "StrictHostKeyChecking=accept-new")
# Prefixes of the variables that go to the workers. The list is short, because horovodrun writes the variables into
# command lines that all users of a host can read.
PASSED = ("BIGBATCH_", "CUDA_", "DALI_", "GLOO_", "HOROVOD_", "LD_LIBRARY_PATH", "NCCL_", "OMP_", "PATH", "PYTHON",
          "TF_", "XLA_")
KEPT = ("HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "SSH_AUTH_SOCK", "TERM", "TMPDIR")


@dataclass(frozen=True)
class Host:
    """A host. slots: the number of workers that it takes."""

    name: str
    slots: int


def parse(text: str) -> list[Host]:
    """Parses a list host1:8,host2:8; a host without a number has 1 slot. Raises UserError."""
    parts = [word.strip().partition(":") for word in text.split(",")]
    return _checked([_host(name, slots) for name, _, slots in parts])


def read(path: str) -> list[Host]:
    """Reads a file with a line `host slots=8` per host; # starts a comment. Raises UserError."""
    try:
        lines = [line.partition("#")[0].split() for line in Path(path).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hostfile: {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    wrong = [" ".join(words) for words in lines if words[2:] or (words[1:] and not words[1].startswith("slots="))]
    if wrong:
        raise UserError(f"--hostfile: '{wrong[0]}' in {path} does not have the form 'host slots=8'")
    return _checked([_host(words[0], words[1][6:] if words[1:] else "") for words in lines if words])


def _host(name, slots):
    if not name or name.startswith("-") or not (slots or "1").isdecimal() or int(slots or 1) < 1:
        raise UserError(f"'{name}{':' if slots else ''}{slots}' is not a host and a number of workers, such as host1:8")
    return Host(name, int(slots or 1))


def _checked(hosts):
    names = [host.name for host in hosts]
    if not names:
        raise UserError("the list of hosts is empty")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"host {twice[0]} is listed twice; list it once")
    return hosts


def environment() -> dict[str, str]:
    """Returns the environment for horovodrun, which passes it on to the workers."""
    return {name: value for name, value in os.environ.items() if name in KEPT or name.startswith(PASSED)}


def ask(hosts: list[Host], arguments: list[str], waiting: str | None = None) -> tuple[list[dict], list[str]]:
    """Returns (the facts of each host that answers, with its `slots`; an error message for each other host).

    arguments: train.py's. All hosts are asked in parallel, over ssh except for this host.
    waiting: a program that waits until all answer. It prints each error message once, on standard error.
    """
    reported = set()
    while True:
        with ThreadPoolExecutor(len(hosts)) as pool:
            answers = list(pool.map(lambda host: _ask(host, arguments), hosts))
        silent = [answer for answer in answers if isinstance(answer, str)]
        if not (waiting and silent):
            return [answer | {"host": host.name, "slots": host.slots}
                    for host, answer in zip(hosts, answers, strict=True) if isinstance(answer, dict)], silent
        for line in silent:
            if line not in reported:
                complain(f"waiting for {line}", waiting)
        reported |= {*silent}
        time.sleep(PAUSE)


def _ask(host, arguments):
    try:
        command = words(host.name, [sys.executable, "-m", "launch.facts", *arguments])
    except OSError:
        return f"{host.name}: this host name is unknown; check -H or --hostfile"
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"{host.name}: no answer within {PATIENCE} s; try: ssh {host.name} true"
    last_line = (done.stderr.strip() or "nothing").splitlines()[-1]
    if done.returncode == 255:
        return f"{host.name}: cannot be reached by ssh ({last_line}); try: ssh {host.name} true"
    if done.returncode == 3:
        return f"{host.name}: the folder {os.getcwd()} does not exist; every host needs it at the same path"
    if done.returncode == 127:
        return f"{host.name}: {sys.executable} does not exist; every host needs the checkout and .venv at the same path"
    try:
        return json.loads(done.stdout)
    except ValueError:
        return f"{host.name}: {last_line}"


def words(name: str, command: list[str]) -> list[str]:
    """Returns the words that run a command on a host: over ssh, except for this host. Raises OSError as `is_here`."""
    return command if is_here(name) else [*SSH, name, _remotely(command)]


def _remotely(command):
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment().items() if name not in KEPT)
    return f"cd {shlex.quote(os.getcwd())} || exit 3; exec env {exports} {shlex.join(command)}"


def is_here(name: str) -> bool:
    """Whether a host name resolves to this machine. Raises OSError if it does not resolve."""
    theirs = {info[4][0] for info in socket.getaddrinfo(name, None)}
    return bool(theirs & {address.address for found in psutil.net_if_addrs().values() for address in found})
