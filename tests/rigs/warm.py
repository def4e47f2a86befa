"""A Python that starts at once: a server that has imported TensorFlow, Horovod and DALI forks each process from itself.

    warm.start(folder)     FOLDER/python is a program to start like python, under any launcher: python train.py, -m, -c

What is forked is a real process, with the caller's environment, folder, cores, network, input and output, that has
imported and started nothing else. The program called stands in for it: it passes signals on, and ends as the process
does. When it is killed, so is the process, which `child` finds: it is the server's child, not the launcher's.

What such a process cannot show, and a test starts the real Python for: how long a start takes, what is imported.
"""
import array
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1  # prctl(2)
SERVERS = {}  # that this process has started, by folder
IMPORTED = ("tensorflow", "horovod.tensorflow.keras", "horovod.tensorflow.elastic", "nvidia.dali.fn",
            "nvidia.dali.plugin.tf")


def start(folder: Path) -> None:
    """Starts a server, which ends with this process. Programs may start at once: they wait for its imports."""
    program = folder / "python"
    program.write_text(f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
                       f"import warm\nwarm.stand_in({str(folder)!r})\n")
    program.chmod(0o755)
    with open(folder / "server.log", "wb") as log, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen(64)
        SERVERS[folder] = subprocess.Popen([sys.executable, __file__, str(listener.fileno())], stdout=log, stderr=log,
                                           stdin=subprocess.DEVNULL, pass_fds=[listener.fileno()])


def last_words(folder) -> str:
    """What to say about a server that has ended."""
    return f"the server of forks ({__file__}) has ended:\n{Path(folder, 'server.log').read_text(errors='replace')}"


def child(folder: Path, process: int) -> int:
    """The process that a started program stands for."""
    return int((folder / str(process)).read_text())


def stand_in(folder: str) -> None:
    """Has the server fork a process for this one's arguments; does not return."""
    server = socket.socket(socket.AF_UNIX)
    asked = json.dumps({"argv": sys.argv[1:], "environment": dict(os.environ), "cwd": os.getcwd(),
                        "cores": sorted(os.sched_getaffinity(0)), "umask": _umask()}).encode()
    network = os.open("/proc/self/ns/net", os.O_RDONLY)
    descriptors = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2, network]))]
    try:
        server.connect(f"{folder}/socket")
        server.sendmsg([struct.pack("I", len(asked))], descriptors)
        server.sendall(asked)
        [process] = struct.unpack("i", _exactly(server, 4))
    except (EOFError, ConnectionError):
        sys.exit(last_words(folder))
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(process, number))
    with open(f"{folder}/{os.getpid()}.part", "w") as file:
        file.write(str(process))
    os.rename(file.name, f"{folder}/{os.getpid()}")
    [status] = struct.unpack("i", _exactly(server, 4))
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code in FORWARDED:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _exactly(connection, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise EOFError("the server of forks has ended")
        data += more
    return data


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class Server:
    """Forks on request, from the main thread: the end of that one is what a child's PR_SET_PDEATHSIG tells of."""

    def __init__(self, listener: socket.socket):
        import selectors

        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _accept(self):
        connection, _ = self._listener.accept()
        try:
            header, descriptors, *_ = socket.recv_fds(connection, 4, 4)
            asked = json.loads(_exactly(connection, struct.unpack("I", header)[0]))
        except (EOFError, OSError, struct.error):
            connection.close()
            return
        process = os.fork()
        if not process:
            self._selector.close()
            self._listener.close()
            connection.close()
            _become(asked, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        ended = os.pidfd_open(process)
        self._selector.register(ended, 1, lambda: self._reap(process, ended, connection))
        self._selector.register(connection, 1, lambda: self._kill(process, connection))
        with contextlib.suppress(OSError):
            connection.sendall(struct.pack("i", process))

    def _reap(self, process, ended, connection):
        _, status = os.waitpid(process, 0)
        self._selector.unregister(ended)
        os.close(ended)
        with contextlib.suppress(OSError):
            connection.sendall(struct.pack("i", status))
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()

    def _kill(self, process, connection):
        """Who asked for the process has gone; unless it has just been told that the process has ended."""
        if connection.fileno() < 0:
            return
        self._selector.unregister(connection)
        os.kill(process, signal.SIGKILL)


def _become(asked, descriptors) -> None:
    """Runs what was asked for in this new process, as python would; does not return."""
    import ctypes
    import random
    import runpy
    import traceback

    import numpy as np

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which nohup leaves ignored
    *streams, network = descriptors
    if not os.path.sameopenfile(network, os.open("/proc/self/ns/net", os.O_RDONLY)):
        ctypes.CDLL(None).setns(network, 0)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.umask(asked["umask"])
    os.chdir(asked["cwd"])
    os.sched_setaffinity(0, asked["cores"])
    random.seed()
    np.random.seed()
    what, *arguments = asked["argv"]
    sys.path[:0] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    code = 0
    try:
        if what == "-c":
            sys.argv = ["-c", *arguments[1:]]
            sys.path.insert(0, "")
            exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
        elif what == "-m":
            sys.argv = arguments
            sys.path.insert(0, os.getcwd())
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [what, *arguments]
            sys.path.insert(0, str(Path(what).absolute().parent))
            runpy.run_path(what, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.exit(code & 0xFF)  # up to serve's caller, where Python ends as it does


def serve(listener: int) -> None:
    """listener: the descriptor of a socket."""
    import ctypes
    import gc
    import importlib
    import traceback

    os.set_inheritable(listener, False)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    sys.path.remove(str(Path(__file__).parent))
    try:
        for module in IMPORTED:
            importlib.import_module(module)
    except Exception:
        traceback.print_exc()
        os._exit(1)  # at once: TensorFlow's end takes longer than a test that has lost its server
    gc.collect()
    gc.freeze()
    Server(socket.socket(fileno=listener)).serve()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
