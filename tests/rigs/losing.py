"""An observer that kills worker 1 of its elastic training after a rollback, before the next commit."""
import contextlib
import os
import signal

import psutil

JOB = "HOROVOD_GLOO_RENDEZVOUS_PORT"


class Losing:
    def rewind(self, progress):
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                found = process.environ()
                if found.get("HOROVOD_RANK") == "1" and found.get(JOB) == os.environ[JOB]:
                    process.send_signal(signal.SIGKILL)
