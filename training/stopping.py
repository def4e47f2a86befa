"""A request to stop: SIGTERM, SIGUSR1 or Ctrl-C to any worker. All workers stop at the same step."""
import os
import signal

from common import SAVING
from common.errors import ExitCode, complain


class StopRequest:
    """Whether this worker has been asked to stop (`received`).

    The other workers learn it from the sum of training.step.Signals in the next step, or in an evaluation from
    training.recovery.Recovery.stop_is_asked.
    """

    def __init__(self):
        self.received = False
        self._is_training = False

    def install(self) -> None:
        """Handles the signals: they set `received`. Before training has started, they end this process with code 75."""
        for number in SAVING:
            signal.signal(number, self._note)

    def start_training(self) -> None:
        """Leaves the end of the process to the training, which checks `received`.

        The first Ctrl-C then also sets `received`, and a second one ends the process at once.
        """
        self._is_training = True
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is ignored in the background
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number, _):
        self.received = True
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        if not self._is_training:
            complain("stopped on request; there was nothing to save")
            os._exit(ExitCode.STOPPED)
