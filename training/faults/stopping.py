"""A request to stop: SIGTERM or SIGUSR1 to any one worker, which all agree to follow at the same step."""
import os
import signal

from training.errors import complain

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: run me again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stopped(Exception):
    """Training has stopped on request, with a checkpoint written."""


class StopRequest:
    """Whether this worker has been asked to stop. heeded: by a training under way, which looks at `received`."""

    def __init__(self):
        self.received = self.heeded = False

    def listen(self) -> None:
        """From now on the signals set `received`; and before training is under way, they end this process at once."""
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, *_):
        self.received = True
        if not self.heeded:
            complain("stopped on request before training went on")
            os._exit(EXIT_CODE)
