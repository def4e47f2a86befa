"""A horovodrun that launch/horovodrun.py has started: what its workers print, how they are stopped, and how it ends."""
import re
import signal
import subprocess
import sys
import threading
import uuid

from common.errors import ExitCode, complain
from distributed import environment
from launch import hosts as host_lists
from plan.launcher import end_with_parent

PROGRAM = "horovodrun.sh"
PREFIX = re.compile(r"\[(\d+)\]<(?:stdout|stderr)>:")
ENDED = re.compile(r"Process (\d+) exit with status code (\d+)\.")
STOPPING = signal.SIGINT, signal.SIGHUP
SAVING = signal.SIGTERM, signal.SIGUSR1
MARK = f"job={uuid.uuid4().hex}"  # an -X option, which Python ignores: tells this job's workers from those of others
GRACE = 15  # seconds that horovodrun has to end its workers
REQUESTED = "stopped on request"
NOT_FOUND = 1  # pkill's exit code; ssh's is 255


class Running:
    """A running horovodrun. output: stream for rank 0's standard output. first: rank 0's host.

    stopped_by: the last signal that has asked it to end, or None.
    """

    def __init__(self, words: list[str], output, first: str):
        self.stopped_by = None
        self._first = first
        self._ended = None  # (rank, exit code) of the first worker that ended
        self._killed = False  # all workers, by this process
        self._launcher_lines = []
        self._process = subprocess.Popen(words, env=environment.without_launcher(), stdin=subprocess.DEVNULL,
                                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                                         preexec_fn=lambda: end_with_parent(signal.SIGTERM))
        self._threads = [threading.Thread(target=self._relay, args=pair, daemon=True)
                         for pair in ((self._process.stdout, output), (self._process.stderr, sys.stderr))]
        for thread in self._threads:
            thread.start()

    def wait(self) -> int:
        """Returns the exit code.

        It is 0, 128 + signal if that killed the workers, 75 if they stopped on request, 2 if the first failed worker
        has it, or else 1.
        """
        before = {number: signal.signal(number, self._stop) for number in (*STOPPING, *SAVING)}
        code = self._process.wait()
        for thread in self._threads:
            thread.join(GRACE)
        for number, handler in before.items():
            signal.signal(number, handler)
        if self._killed and code:
            return ExitCode.STOPPED if self.stopped_by in SAVING else 128 + self.stopped_by
        if not self._ended:
            if code:
                reason = self._launcher_lines[-1] if self._launcher_lines else f"exit code {code}"
                complain(f"horovodrun failed: {reason}", PROGRAM)
            return int(code != 0)
        rank, code = self._ended
        if code > 128:  # else the worker has reported the cause; others may be killed before they can report its loss
            complain(f"worker {rank} was killed, or its host was lost (exit code {code})", PROGRAM)
        return code if code in (ExitCode.USAGE, ExitCode.STOPPED) else ExitCode.WRONG

    def _stop(self, number, _):
        is_first = self.stopped_by is None
        self.stopped_by = number
        if number not in SAVING:
            self._kill()
        elif is_first:
            threading.Thread(target=self._ask, daemon=True).start()

    def _ask(self):
        """Asks rank 0 to stop, on which all ranks save a checkpoint. Kills the workers if it does not train."""
        pkill = ["pkill", "--oldest", "-USR1", "-f", rf"^\S+ -X {MARK} "]
        try:
            done = subprocess.run(host_lists.words(self._first, pkill), text=True, capture_output=True,
                                  stdin=subprocess.DEVNULL)
        except OSError as error:  # its name is unknown
            complain(f"{self._first} could not be asked to stop: {error}", PROGRAM)
            return
        if done.returncode == NOT_FOUND:
            complain(REQUESTED, PROGRAM)
            self._kill()
        elif done.returncode:
            complain(f"{self._first} could not be asked to stop: {done.stderr.strip()}", PROGRAM)

    def _kill(self):
        if not self._killed:
            self._killed = True
            self._process.terminate()
            watch = threading.Timer(GRACE, self._process.kill)
            watch.daemon = True
            watch.start()

    def _relay(self, source, output):
        with open(source.fileno(), newline="", encoding="utf-8", errors="replace", closefd=False) as lines:
            for line in lines:
                prefix = PREFIX.match(line)
                if prefix and prefix[1] == "0":
                    print(line[prefix.end():], end="", file=output, flush=True)
                elif prefix:
                    print(f"[{prefix[1]}] {line[prefix.end():]}", end="", file=sys.stderr, flush=True)
                elif ended := ENDED.match(line):
                    self._ended = self._ended or (ended[1], int(ended[2]))
                elif line.strip():
                    self._launcher_lines.append(line.strip())
