"""Passes this process's environment to processes on other hosts over ssh's standard input.

It may hold credentials, and all users of a host can read the command lines there. As a program, it prints the
environment as lines of sh.
"""
import os
import shlex
import sys

from common.launcher import LAUNCHERS

# Prefixes of the variables that belong to a host, a session or another launcher.
OWN = ("_", "CUDA_VISIBLE_DEVICES", "DBUS_", "DISPLAY", "HOSTNAME", "NVIDIA_VISIBLE_DEVICES", "OLDPWD", "PWD", "SHLVL",
       "SSH_", "XDG_", *LAUNCHERS)
RECEIVE = 'eval "$(cat)"; '  # the beginning of a command that gets the environment


def sending(ssh: str) -> str:
    """Returns a line of sh that runs an ssh command and sends it the environment, on its standard input."""
    return f"exec {ssh} <<.\n$({shlex.quote(sys.executable)} -m {__name__})\n."


def without_launcher() -> dict[str, str]:
    """Returns the environment without the variables of a launcher that has started this process."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}


if __name__ == "__main__":
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in os.environ.items()
             if name.isidentifier() and name.isascii() and not name.startswith(OWN)]
    with open(1, "wb", closefd=False) as output:
        output.write(os.fsencode("".join(lines)))
