"""An observer that sends this process a signal after a step: STOP_AT=SIGTERM:5 --observer=tests.rigs.stop_at:StopAt."""
import os
import signal


class StopAt:
    def __init__(self):
        name, _, step = os.environ["STOP_AT"].partition(":")
        self._signal, self._step = signal.Signals[name], int(step)

    def step(self, update):
        if update.number + 1 == self._step:
            os.kill(os.getpid(), self._signal)
