"""Code that all commands share: exit codes, error messages, flags and atomic file writes."""
import os
import signal
import sys

VERSION = "0.9.0"
COMMANDS = ("data", "distributed", "experiments", "launch", "reporting")  # rooms with programs for python -m
TRAIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "train.py")


def end_at_once(*_):
    """Ends a command that Ctrl-C reaches while it imports its modules, which takes up to half a second."""
    try:
        os.write(2, f"{COMMAND}: interrupted\n".encode())
    finally:
        os._exit(130)


def _command(main) -> str | None:
    """Returns the name of this process's command, or None if another program imports Bigbatch."""
    if spec := getattr(main, "__spec__", None):
        return spec.name if spec.parent in COMMANDS else None
    return "train.py" if getattr(main, "__file__", None) == TRAIN else None


COMMAND = _command(sys.modules["__main__"])
if COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is ignored in the background
    signal.signal(signal.SIGINT, end_at_once)  # until command.shell
