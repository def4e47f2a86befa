"""Code that all commands share: exit codes, error messages, flags and atomic file writes.

Importing it as the first module of a command makes Ctrl-C end the command with one line from the start.
"""
import os
import signal
import sys

VERSION = "0.13.0"
SAVING = signal.SIGTERM, signal.SIGUSR1  # on which a training saves a checkpoint and ends with ExitCode.STOPPED
TRAIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "train.py")


def command_of(main) -> str | None:
    """Returns the name of the command whose module `__main__` is, or None if another program imports Bigbatch."""
    if spec := getattr(main, "__spec__", None):
        return spec.name if spec.parent in ("data", "distributed", "experiments", "launch", "reporting") else None
    return "train.py" if getattr(main, "__file__", None) == TRAIN else None


def end_at_once(*_):
    """Handles Ctrl-C while a command imports its modules, which takes up to half a second: one line, no traceback."""
    os.write(2, f"{command_of(sys.modules['__main__'])}: interrupted\n".encode())
    os._exit(130)


# A command that a shell starts in the background ignores SIGINT, and keeps ignoring it. In the foreground, the handler
# stays until command.shell handles KeyboardInterrupt.
if command_of(sys.modules["__main__"]) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end_at_once)
