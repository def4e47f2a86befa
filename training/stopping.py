"""A request to stop: SIGTERM or SIGUSR1 to any one worker, which all agree to follow at the same step."""
import os
import signal

from common.errors import ExitCode, complain

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether this worker has been asked to stop. heeded: by a training under way, which looks at `received`."""

    def __init__(self):
        self.received = self.heeded = False

    def listen(self) -> None:
        """Has the signals set `received` from now on; before training is under way, they end this process at once."""
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, *_):
        self.received = True
        if not self.heeded:
            complain("stopped on request before training went on")
            os._exit(ExitCode.STOPPED)
