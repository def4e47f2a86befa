"""Namespaces of the kernel, made as root or, where the system allows it, by an ordinary user.

An ordinary user first gets a user namespace, and is root in it.
"""
import functools
import os
import subprocess

ALL = ("--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc")


@functools.cache
def unshare(every_user: bool = False) -> tuple[str, ...]:
    """Returns the start of an unshare command that may make namespaces; their options and the program follow.

    every_user: whether the program needs other users than root, as sshd does. Raises OSError.
    """
    own_user = ("--user", "--map-root-user", *(("--map-auto",) if every_user else ()))
    for words in (("unshare",), ("unshare", *own_user)):
        done = subprocess.run([*words, *ALL, "true"], text=True, capture_output=True)
        if done.returncode == 0:
            return words
    needed = "newuidmap and a line for this user in /etc/subuid" if every_user else "user namespaces"
    raise PermissionError(f"needs root, or {needed} ({done.stderr.strip()})")


def enter(process: int, *namespaces: str) -> list[str]:
    """Returns the start of an nsenter command: into these namespaces of a process that `unshare` has started."""
    own_user = os.readlink(f"/proc/{process}/ns/user") != os.readlink("/proc/self/ns/user")
    return ["nsenter", "--target", str(process), *(("--user", "--preserve-credentials") if own_user else ()),
            *namespaces]
