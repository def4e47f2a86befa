"""The hosts of a training run: their names, slots, and the facts that each reports over ssh before the start."""
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from common.errors import UsageError, UserError, complain
from distributed import environment, gpus
from launch import facts

PATIENCE = gpus.PATIENCE + 15  # seconds for a host's answer, which may be that nvidia-smi hangs there
PAUSE = 2  # seconds until hosts that do not answer are asked again
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8", "-o", "ServerAliveInterval=10",  # ends after 30 s
       "-o", "StrictHostKeyChecking=accept-new")


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
    """Reads a file with a line `host slots=8` or `host:8` per host; # starts a comment. Raises UserError."""
    try:
        text = Path(path).expanduser().read_text("utf-8-sig")
        lines = [re.sub(r"^([^:]+):(\d+)\s*$", r"\1 slots=\2", line.partition("#")[0]).split()
                 for line in text.splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hostfile: {path} cannot be read: {getattr(error, 'strerror', error)}") from None
    wrong = [" ".join(words) for words in lines if words[2:] or (words[1:] and not words[1].startswith("slots="))]
    if wrong:
        raise UserError(f"--hostfile: '{wrong[0]}' in {path} does not have the form 'host slots=8'")
    return _checked([_host(words[0], words[1][6:] if words[1:] else "") for words in lines if words])


def _host(name, slots):
    if (not name or name.startswith("-") or name.count(":") == 1 or not (slots or "1").isdecimal()
            or int(slots or 1) < 1):
        raise UsageError(f"'{name}{':' if slots else ''}{slots}' is not a host and a number of workers, such as h1:8")
    return Host(name, int(slots or 1))


def _checked(hosts):
    names = [host.name for host in hosts]
    if not names:
        raise UserError("the list of hosts is empty")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"host {twice[0]} is listed twice; list it once")
    return hosts


def ask(hosts: list[Host], arguments: list[str], waiting: str | None = None) -> tuple[list[dict], list[str]]:
    """Asks all hosts for their facts in parallel, over ssh except for this host.

    Returns (a dict of facts for each host that answers, an error message for each other host). arguments: train.py's.
    waiting: name of a program that waits until all hosts answer, and prints each error message once. None: do not wait.
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
    command = shlex.join([sys.executable, "-m", "launch.facts", *arguments])
    try:
        if not is_here(host.name):
            there = f"{environment.RECEIVE}cd {shlex.quote(os.getcwd())} || exit 3; exec {command}"
            command = environment.sending(shlex.join([*SSH, host.name, there]))
    except OSError:
        return f"{host.name}: this host name is unknown; check -H or --hostfile"
    try:
        done = subprocess.run(command, shell=True, text=True, capture_output=True, timeout=PATIENCE,
                              stdin=subprocess.DEVNULL)
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
    """Returns the command line that runs a command on a host, over ssh unless it is this one. Raises OSError if the
    name does not resolve."""
    return command if is_here(name) else [*SSH, name, shlex.join(command)]


def common_interface(hosts: list[dict]) -> str:
    """Returns the name of a network interface that all hosts and this machine have. Raises UserError if there is none.

    Of several, it is the one over which ssh reached most hosts. One that has the same address on all hosts, such as
    Docker's, does not connect them and is left out. hosts: the facts of each. At least one is not this machine.
    """
    here = facts.interfaces()
    names = [name for name in here if all(name in host["interfaces"] for host in hosts)
             and any(host["interfaces"][name] != here[name] for host in hosts)]
    if not names:
        listed = "; ".join(f"{host['host']} has {', '.join(host['interfaces']) or 'none'}" for host in hosts)
        raise UserError(f"the hosts and this machine have no network interface with the same name ({listed}; this "
                        f"machine has {', '.join(here) or 'none'}); start from a machine that has")
    return max(names, key=lambda name: sum(host["ssh_address"] in host["interfaces"][name] for host in hosts))


def any_remote(hosts: list[Host]) -> bool:
    """Whether any host is not this machine. A name that does not resolve counts as another machine."""
    try:
        return not all(is_here(host.name) for host in hosts)
    except OSError:
        return True


def is_here(name: str) -> bool:
    """Whether a host name resolves to this machine. Raises OSError if it does not resolve."""
    theirs = {info[4][0] for info in socket.getaddrinfo(name, None)}
    return bool(theirs & {address.address for addresses in psutil.net_if_addrs().values() for address in addresses})
