"""A request to stop: SIGTERM, SIGUSR1 or Ctrl-C to any worker. All workers stop at the same step."""
import os
import signal

from common.activity import startup
from common.errors import SAVING, ExitCode, complain


class StopRequest:
    """Whether this worker has been asked to stop. heeded: whether a training is running, which checks `received`."""

    def __init__(self):
        self.received = self.heeded = False

    def listen(self) -> None:
        """Makes the signals set `received`. Before training has started, they also end this process, with code 75."""
        for number in SAVING:
            signal.signal(number, self._note)

    def heed(self) -> None:
        """Training is running. From now on, the first Ctrl-C sets `received`, and a second one ends at once."""
        self.heeded = True
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is ignored in the background
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number, _):
        self.received = True
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        if not self.heeded:
            startup.clear()
            complain("stopped on request; there was nothing to save")
            os._exit(ExitCode.STOPPED)
