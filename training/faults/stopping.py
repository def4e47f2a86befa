"""A request to stop: SIGTERM or SIGUSR1 to any one worker, which all agree to follow at the same step."""
import signal

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: run me again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stopped(Exception):
    """Training has stopped on request, with a checkpoint written."""


class StopRequest:
    """Whether this worker has been asked to stop."""

    def __init__(self):
        self.received = False

    def listen(self) -> None:
        """From now on the signals no longer end this process; `received` has to be looked at."""
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _note(self, *_):
        self.received = True
