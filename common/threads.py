"""Threads on which the whole process depends."""
import os
import threading
import traceback
from collections.abc import Callable

from common.errors import ExitCode, complain, one_line


def start_service(name: str, target: Callable, *arguments) -> threading.Thread:
    """Starts a daemon thread that others rely on. An error in it ends the process with a line, whatever that waits for.

    name: of the thread, for the line.
    """
    def run():
        try:
            target(*arguments)
        except BaseException as error:
            try:
                traceback.print_exc()
                complain(f"the thread {name!r} has failed, which ends this process: {type(error).__name__}: "
                         f"{one_line(error)}")
            finally:
                os._exit(ExitCode.WRONG)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
