"""Trains a recipe on one or more hosts, over ssh: `launch/horovodrun.sh [options] RECIPE|-- [flags of train.py]`.

RECIPE is a file of flags, or its name in recipes/. With -- in its place, train.py chooses the recipe that fits
--data_dir. Flags of train.py, which override the recipe, follow it.

This program wraps horovodrun, which starts the workers over ssh, and checks the hosts first. It prints rank 0's output
unchanged and prefixes that of other ranks with `[RANK]`. It returns the exit code of the training, where horovodrun
returns 1 for any failure. On SIGTERM or SIGUSR1, the workers save a checkpoint and end. On SIGINT or SIGHUP, it kills
them on all hosts.
"""
import itertools
import re
import shlex
import signal
import subprocess
import sys
import threading
import uuid
from dataclasses import dataclass

from common import SAVING, TRAIN, command, streams
from common.errors import ExitCode, Stopped, UsageError, complain
from common.flags import define, described, flag, names, parsed, read, split
from common.launcher import end_with_parent
from common.threads import start_service
from distributed import environment, gpus
from launch import hosts as host_lists
from launch import preflight
from launch.binding import workers_here
from launch.facts import of_gpus as facts_of_gpus
from launch.job import micro_batch_flags, next_workers, print_plan, recipe_flags, workers_now
from plan import flags

PROGRAM = "horovodrun.sh"
PREFIX = re.compile(r"\[(\d+)\]<(?:stdout|stderr)>:")
ENDED = re.compile(r"Process (\d+) exit with status code (\d+)\.")
STOPPING = signal.SIGINT, signal.SIGHUP
MARK = f"job={uuid.uuid4().hex}"  # an -X option, which Python ignores. It identifies this job's workers for pkill
GRACE = 15  # seconds that horovodrun has to end its workers
REQUESTED = "stopped on request"
NOT_FOUND = 1  # pkill's exit code; ssh's is 255


@dataclass(frozen=True)
class Options:
    """This command's own flags, which come before the recipe."""

    hosts: str | None = flag(None, "Hosts and their numbers of workers, such as -H h1:8,h2:8.", alias="H")
    hostfile: str | None = flag(None, "File with a line 'h1 slots=8' for each host.", path=True)
    np: int | None = flag(None, "Number of workers. Default: all slots of the hosts.", low=1)
    network_interfaces: str | None = flag(None, "Network interfaces that all hosts share.", alias="network-interfaces")
    wait: bool = flag(False, "Wait until all hosts answer.")
    no_preflight: bool = flag(False, "Do not check the hosts first.", alias="no-preflight")
    dry_run: bool = flag(False, "Print the plan, and the command on standard error. Also after the recipe.",
                         alias="dry-run")


@command.program(PROGRAM, __doc__, lambda _: described(define(Options), names(Options)), is_alone=True)
def main(argv) -> int:
    """Runs a command line; returns the exit code."""
    def stop(*_):
        raise Stopped(REQUESTED)

    for number in SAVING:
        signal.signal(number, stop)
    own, words = split(define(Options), argv)
    hints = dict.fromkeys(flags.FLAGS, "put the flags of train.py after the recipe") | {
        "workers": "the number of workers is -np"}
    return run(parsed(read(define(Options), own, hints), Options), words)


def run(options: Options, words: list[str]) -> int:
    """Trains, or prints the plan; returns the exit code. words: recipe and flags of train.py. Raises UserError."""
    streams.Output.is_kept = True  # in summary.json; the workers must not wait for a reader that has ended
    recipe, given = recipe_flags(words, PROGRAM)
    arguments = [*recipe, *given]
    settings = flags.parse(["train.py", *arguments])
    hosts = _hosts(options)
    slots = options.np or sum(host.slots for host in hosts)
    workers = workers_now(settings, slots)
    interfaces = options.network_interfaces
    lacks_interface = not (interfaces or options.dry_run) and host_lists.any_remote(hosts)
    asks = not options.dry_run and (options.wait or not options.no_preflight or lacks_interface)
    facts, silent = host_lists.ask(hosts, arguments, PROGRAM if options.wait else None) if asks else ([], [])
    memory = [host["memory"] for host in facts or [facts_of_gpus(gpus.visible())] if host["memory"] is not None]
    arguments[len(recipe):len(recipe)] = micro_batch_flags(settings, workers, min(memory, default=None))

    def on_hosts(worker):
        return horovodrun(hosts, workers, interfaces, worker)

    if options.dry_run:
        print(shlex.join(on_hosts(training(arguments))), file=sys.stderr)
        return print_plan(arguments, workers, hosts[0].slots)
    wrong = silent + ([] if options.no_preflight else preflight.problems(facts, settings.recipe.data_dir))
    if wrong:
        return preflight.report(facts, wrong, sys.stderr)
    if lacks_interface:
        interfaces = host_lists.common_interface(facts)
    if not options.no_preflight:
        checks = on_hosts([sys.executable, "-m", "launch.preflight", *arguments])
        if code := Running(checks, sys.stderr, hosts[0].name).wait():
            return code
    while True:
        running = Running(on_hosts(training(arguments)), sys.stdout, hosts[0].name)
        code = running.wait()
        if code != ExitCode.STOPPED or running.stopped_by or not (following := next_workers(settings)):
            return code
        workers = following


def _hosts(options):
    if options.hosts is not None and options.hostfile is not None:
        raise UsageError("-H and --hostfile both list the hosts; remove one of them")
    if options.hosts is not None or options.hostfile is not None:
        hosts = host_lists.read(options.hostfile) if options.hosts is None else host_lists.parse(options.hosts)
    else:
        hosts = [host_lists.Host("localhost", options.np or workers_here())]
    slots = sum(host.slots for host in hosts)
    if options.np is not None and not 0 < options.np <= slots:
        raise UsageError(f"-np {options.np}: the hosts have {slots} slots; give a number from 1 to {slots}")
    return hosts


def training(arguments: list[str]) -> list[str]:
    """Returns the command of one worker."""
    return [sys.executable, "-m", "launch.binding", sys.executable, "-X", MARK, TRAIN, *arguments]


def horovodrun(hosts, workers: int, interfaces: str | None, worker: list[str]) -> list[str]:
    """Returns horovodrun's command. The cache, in which it keeps checks of hosts for an hour, is off: hosts may change.

    horovodrun starts a worker in each slot, whatever -np is. So it is given only as many slots as there are workers.
    """
    before = itertools.accumulate((host.slots for host in hosts), initial=0)
    used = [(host.name, min(host.slots, workers - start)) for host, start in zip(hosts, before, strict=False)]
    return [sys.executable, "-m", "distributed.gloo", "--gloo", "--disable-cache",
            *([f"--network-interfaces={interfaces}"] if interfaces else []), "-np", str(workers),
            "-H", ",".join(f"{name}:{slots}" for name, slots in used if slots > 0), *worker]


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
        self._threads = [start_service("relay of the output", self._relay, *pair)
                         for pair in ((self._process.stdout, output), (self._process.stderr, sys.stderr))]

    def wait(self) -> int:
        """Waits until all workers have ended. Returns the exit code of the launcher.

        0: all succeeded. 75: they stopped on request. 128 + N: this process killed them on signal N. 2: the first
        worker that failed exited with 2. 1: any other failure.
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
        """Asks rank 0 to stop, which makes all ranks save a checkpoint. Kills the workers if rank 0 has not started."""
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


if __name__ == "__main__":
    command.end(main(sys.argv))
