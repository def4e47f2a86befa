"""Trains a recipe on several hosts, from a login node or from one of them. launch/horovodrun.sh runs this module.

It wraps horovodrun, which starts the workers over ssh. It checks the hosts first. It prints rank 0's output unchanged,
and the output of other ranks after `[RANK]`. It returns the exit code of the training (horovodrun itself returns 1).
On SIGTERM or SIGUSR1, the workers save a checkpoint and end. On SIGINT or SIGHUP, they are killed on all hosts.
"""
import argparse
import itertools
import re
import shlex
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

from common import command, streams
from common.errors import SAVING, ExitCode, Stopped, UsageError, complain
from common.flags import file_text
from common.launcher import end_with_parent
from distributed import environment, gpus
from launch import hosts as host_lists
from launch import preflight
from launch.binding import workers_here
from launch.facts import of_gpus as facts_of_gpus
from launch.workers import micro_batch_flags, next_workers, workers_now
from plan import flags
from plan.recipes import recipe_path

PROGRAM = "horovodrun.sh"
ROOT = Path(__file__).parents[1]
PREFIX = re.compile(r"\[(\d+)\]<(?:stdout|stderr)>:")
ENDED = re.compile(r"Process (\d+) exit with status code (\d+)\.")
STOPPING = signal.SIGINT, signal.SIGHUP
MARK = f"job={uuid.uuid4().hex}"  # an -X option, which Python ignores: tells this job's workers from those of others
GRACE = 15  # seconds that horovodrun has to end its workers
REQUESTED = "stopped on request"
NOT_FOUND = 1  # pkill's exit code; ssh's is 255
DRY_RUN = ("--dry-run", "--dry_run", "--dry-run=true", "--dry_run=true", "-dry-run", "-dry_run")


class Parser(argparse.ArgumentParser):
    """Raises UsageError instead of exiting."""

    def error(self, message):
        raise UsageError(message)


@command.program(PROGRAM, described=lambda _: [_parser().format_help().rstrip()], is_alone=True)
def main(argv) -> int:
    """Runs a command line; returns the exit code."""
    def stop(*_):
        raise Stopped(REQUESTED)

    for number in SAVING:
        signal.signal(number, stop)
    words = [word for word in argv[1:] if word not in DRY_RUN]  # also after the recipe, as in launch/common.sh
    return run(parsed(words if len(words) == len(argv) - 1 else ["--dry-run", *words]))


def parsed(words: list[str]) -> argparse.Namespace:
    """Returns the options, with the flags of train.py, which may also follow --; then `recipe` may be None."""
    end = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:end])
    options.flags += words[end + 1:]
    if options.recipe is None and end == len(words):
        raise UsageError("the recipe is missing; see --help")
    return options


def run(options) -> int:
    """Trains, or prints the plan; returns the exit code. Raises UserError."""
    streams.Output.is_kept = True  # in summary.json; the workers must not wait for a reader that has ended
    recipe = recipe_flags(options.recipe)
    arguments = [*recipe, *options.flags]
    settings = flags.parse(["train.py", *arguments])
    hosts = _hosts(options)
    slots = options.np or sum(host.slots for host in hosts)
    workers = workers_now(settings, slots)
    facts = []
    silent = []
    interfaces = options.network_interfaces
    lacks_interface = not (interfaces or options.dry_run) and host_lists.any_remote(hosts)
    if not options.dry_run and (options.wait or not options.no_preflight or lacks_interface):
        facts, silent = host_lists.ask(hosts, arguments, PROGRAM if options.wait else None)
    memory = [host["memory"] for host in facts or [facts_of_gpus(gpus.visible())] if host["memory"] is not None]
    arguments[len(recipe):len(recipe)] = micro_batch_flags(settings, workers, min(memory, default=None))

    def on_hosts(worker):
        return horovodrun(hosts, workers, interfaces, worker)

    if options.dry_run:
        print(shlex.join(on_hosts(training(arguments))), file=sys.stderr)
        return subprocess.call([sys.executable, str(ROOT / "train.py"), *arguments, "--dry_run",
                                f"--workers={workers}", f"--workers_per_node={hosts[0].slots}"])
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


def _parser():
    parser = Parser(prog="launch/horovodrun.sh", description="Trains a recipe on one or more hosts, over ssh.")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", help="hosts and their numbers of workers, such as h1:8,h2:8")
    where.add_argument("--hostfile", help="file with a line 'h1 slots=8' for each host")
    parser.add_argument("-np", type=int, help="number of workers (default: all slots of the hosts)")
    parser.add_argument("--network-interfaces", help="network interfaces that all hosts share")
    parser.add_argument("--wait", action="store_true", help="wait until all hosts answer")
    parser.add_argument("--no-preflight", action="store_true", help="do not check the hosts first")
    parser.add_argument("--dry-run", "--dry_run", action="store_true",
                        help="print the plan, and the command on standard error; also after the recipe")
    parser.add_argument("recipe", nargs="?", help="file of flags, or its name in recipes/. With -- in its place, "
                        "train.py chooses the recipe that fits --data_dir")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of train.py, which override the recipe")
    return parser


def _hosts(options):
    if options.hosts is not None or options.hostfile is not None:
        hosts = host_lists.read(options.hostfile) if options.hosts is None else host_lists.parse(options.hosts)
    else:
        hosts = [host_lists.Host("localhost", options.np or workers_here())]
    slots = sum(host.slots for host in hosts)
    if options.np is not None and not 0 < options.np <= slots:
        raise UsageError(f"-np {options.np}: the hosts have {slots} slots; give a number from 1 to {slots}")
    return hosts


def recipe_flags(name: str | None) -> list[str]:
    """Returns the flags that read a recipe, and those of RECIPE.launch, if it exists, as launch/common.sh does."""
    if name is None:
        return []
    recipe = recipe_path(name)
    launch = recipe.with_suffix(".launch")
    if not launch.is_file():
        return [f"--flagfile={recipe}"]
    added = " ".join(line for line in file_text(launch).splitlines() if line.startswith("--"))
    complain(f"{launch.name} adds {added}", PROGRAM)
    return [f"--flagfile={recipe}", f"--flagfile={launch}"]


def training(arguments: list[str]) -> list[str]:
    """Returns the command of one worker."""
    return [sys.executable, "-m", "launch.binding", sys.executable, "-X", MARK, str(ROOT / "train.py"), *arguments]


def horovodrun(hosts, workers: int, interfaces: str | None, worker: list[str]) -> list[str]:
    """Returns horovodrun's command. Its cache, which keeps checks for an hour, is off, because hosts may change.

    It gets as many slots as workers, on the first hosts, because it starts a worker in each slot, whatever -np is.
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


if __name__ == "__main__":
    command.end(main(sys.argv))
