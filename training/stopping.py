"""A request to stop: SIGTERM or SIGUSR1 to any worker. All workers stop at the same step."""
import os
import signal

from common.errors import ExitCode, complain
from common.startup import startup

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether this worker has been asked to stop. heeded: whether a training is running, which checks `received`."""

    def __init__(self):
        self.received = self.heeded = False

    def listen(self) -> None:
        """Makes the signals set `received`. Before training has started, they also end this process, with code 75."""
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, *_):
        self.received = True
        if not self.heeded:
            startup.clear()
            complain("stopped on request; there was nothing to save")
            os._exit(ExitCode.STOPPED)
