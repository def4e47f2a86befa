"""A Python that starts at once: a server that has imported what train.py needs forks each process from itself.

    warm.start(folder)     FOLDER/python is a program to start like python, under any launcher: python train.py, -m, -c

A fork is a real process, with the caller's environment, folder, cores, namespaces, input and output, that has started
nothing yet. The program called stands in for it: it passes signals on, and ends as the process does. When it is killed,
so is the process, which `child` finds: it is the server's child, not the launcher's. `sys.executable` of a fork is
FOLDER/python, so the Pythons that it starts are forks, too.

train.py of this checkout finds the checkout's modules imported. Any other program imports them itself: it may change
some before others load, as bn_train.py does, or belong to another checkout.

A fork ends as Python does up to where Python would free its modules, which takes 0.2 s with TensorFlow.

What a fork cannot show, and a test starts a cold Python for:

- what a start imports and how long it takes (test_rooms.py, `--help` in test_train.py), and a request to stop that
  comes meanwhile (test_stopping.py, test_preemption.py)
- a crash at the interpreter's end: the scripts in launch/ have a cold run each (test_dgx1.py, test_horovodrun.py,
  test_slurm.py), and so have horovodrun (test_train.py) and a single worker (test_default_recipe.py); a signal that
  comes then (test_preemption.py)
- .pth files (the clock in test_horovodrun.py), Python's options, and variables that are read when Python or a library
  loads: PYTHONHASHSEED, OMP_NUM_THREADS, TF_CPP_MIN_LOG_LEVEL (test_xla.py)
- that a worker ends with its launcher, whose child a fork is not (the stopped launchers in test_horovodrun.py); the
  memory and the limits that a launcher binds
"""
import array
import contextlib
import json
import os
import signal
import socket
import struct
import sys  # the stand-in imports no more than this: it starts for each fork

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
NAMESPACES = ("user", "pid", "uts", "ipc", "net", "mnt")  # in the order in which a fork enters them
PR_SET_PDEATHSIG = 1  # prctl(2)
SERVERS = {}  # that this process has started, by folder
IMPORTED = ("tensorflow", "horovod.tensorflow.keras", "horovod.tensorflow.elastic", "nvidia.dali.fn",
            "nvidia.dali.plugin.tf")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# The rooms of train.py.
ROOMS = ("common", "model_zoo", "optim", "data", "plan", "distributed", "training", "reporting", "inference")


def start(folder) -> None:
    """Starts a server, which ends with this process. Programs may start at once: they wait for its imports.

    folder: a Path.
    """
    import subprocess

    program, interpreter = folder / "python", folder / "real-python"  # tests look for the word in `ps`
    interpreter.symlink_to(sys.executable)  # a first line with #! takes no path with a space
    program.write_text(f"#!{interpreter} -IS\nimport sys\nsys.path.insert(0, {os.path.dirname(__file__)!r})\n"
                       f"import warm\nwarm.stand_in({str(folder)!r})\n")
    program.chmod(0o755)
    with open(folder / "server.log", "wb") as log, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen(64)
        SERVERS[folder] = subprocess.Popen([sys.executable, __file__, str(listener.fileno())], stdout=log, stderr=log,
                                           stdin=subprocess.DEVNULL, pass_fds=[listener.fileno()])


def last_words(folder) -> str:
    """What to say about a server that has ended."""
    with open(f"{folder}/server.log", errors="replace") as log:
        return f"the server of forks ({__file__}) has ended:\n{log.read()}"


def child(folder, process: int) -> int:
    """The process that a started program stands for. folder: a Path."""
    return int((folder / str(process)).read_text())


def stand_in(folder: str) -> None:
    """Has the server fork a process for this one's arguments; does not return."""
    server = socket.socket(socket.AF_UNIX)
    asked = json.dumps({"python": f"{folder}/python", "argv": sys.argv[1:], "environment": dict(os.environ),
                        "cwd": os.getcwd(), "cores": sorted(os.sched_getaffinity(0)), "umask": _umask()}).encode()
    descriptors = array.array("i", [0, 1, 2, *_namespaces()])
    try:
        server.connect(f"{folder}/socket")
        server.sendmsg([struct.pack("I", len(asked))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        server.sendall(asked)
        _pass_on(lambda number: server.send(bytes([number])))
        [status] = struct.unpack("i", _exactly(server, 4))
    except (EOFError, ConnectionError):
        sys.exit(last_words(folder))
    _end_as(status)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _namespaces() -> list[int]:
    """This process's namespaces, as descriptors."""
    return [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in NAMESPACES]


def _pass_on(send) -> None:
    """Hands signals to a function of their number from now on."""
    def handle(number, _):
        with contextlib.suppress(OSError):  # what they are for has just ended
            send(number)

    for number in FORWARDED:
        signal.signal(number, handle)


def _end_as(status: int) -> None:
    """Ends this process as another one has ended. status: as of waitpid."""
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


class Server:
    """Forks on request, from the main thread: the end of that one is what a child's PR_SET_PDEATHSIG tells of."""

    def __init__(self, listener: socket.socket):
        import selectors

        self._listener = listener
        self._folder = os.path.dirname(listener.getsockname())
        self._train_py = os.stat(f"{ROOT}/train.py")
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _accept(self):
        connection, _ = self._listener.accept()
        try:
            header, descriptors, *_ = socket.recv_fds(connection, 4, 3 + len(NAMESPACES))
            asked = json.loads(_exactly(connection, struct.unpack("I", header)[0]))
        except (EOFError, OSError, struct.error):
            connection.close()
            return
        process = os.fork()
        if not process:
            self._selector.close()
            self._listener.close()
            connection.close()
            _become(asked, descriptors, self._train_py)
        for descriptor in descriptors:
            os.close(descriptor)
        self._record(connection, process)
        ended = os.pidfd_open(process)
        self._selector.register(ended, 1, lambda: self._reap(process, ended, connection))
        self._selector.register(connection, 1, lambda: self._hear(process, connection))

    def _record(self, connection, process):
        """For `child`. The kernel knows the caller by the number that it has among the server's processes."""
        caller, *_ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        with open(f"{self._folder}/{caller}.part", "w") as file:
            file.write(str(process))
        os.rename(file.name, f"{self._folder}/{caller}")

    def _reap(self, process, ended, connection):
        _, status = os.waitpid(process, 0)
        self._selector.unregister(ended)
        os.close(ended)
        with contextlib.suppress(OSError):
            connection.sendall(struct.pack("i", status))
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()

    def _hear(self, process, connection):
        """Passes on signals from who asked for the process. Kills it when the caller has gone."""
        if connection.fileno() < 0:  # the caller has just been told that the process has ended
            return
        try:
            numbers = connection.recv(64)
        except OSError:
            numbers = b""
        for number in numbers:
            os.kill(process, number)
        if not numbers:
            self._selector.unregister(connection)
            os.kill(process, signal.SIGKILL)


def _become(asked, descriptors, train_py) -> None:
    """Runs what was asked for in this new process, as python would; does not return.

    train_py: os.stat of the program for which the checkout's modules stay imported.
    """
    import random
    import tempfile

    import numpy as np

    _end_with_parent()
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which nohup leaves ignored
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _enter(descriptors[3:])
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.umask(asked["umask"])
    os.chdir(asked["cwd"])
    os.sched_setaffinity(0, asked["cores"])
    random.seed()
    np.random.seed()
    tempfile.tempdir = None  # TMPDIR may be another one here
    sys.executable = asked["python"]
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty() or bool(os.environ.get("PYTHONUNBUFFERED")))
    sys.path[:0] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    while asked["argv"][0] == "-X":  # Python's own options mean nothing to a fork
        del asked["argv"][:2]
    program = asked["argv"][0]
    if os.path.exists(program) and os.path.samestat(os.stat(program), train_py):
        from common.activity import startup

        startup.__init__()  # the clock that train.py starts when it imports this
    else:
        for name in [name for name in sys.modules if name.partition(".")[0] in ROOMS]:
            del sys.modules[name]
    _end(_run(*asked["argv"]))


def _end_with_parent() -> None:
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _enter(namespaces: list[int]) -> None:
    """Enters the caller's namespaces. namespaces: descriptors, which are closed.

    Only a child of this process can be in another namespace of process numbers. This one then passes signals on to it
    and ends as it does, and this function returns in the child.
    """
    import ctypes

    libc, own = ctypes.CDLL(None, use_errno=True), _namespaces()
    others = [not os.path.sameopenfile(*pair) for pair in zip(namespaces, own, strict=True)]
    for kind, namespace, is_other in zip(NAMESPACES, namespaces, others, strict=True):
        if is_other and libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), f"{kind}: {os.strerror(ctypes.get_errno())}")
    for descriptor in (*namespaces, *own):
        os.close(descriptor)
    if others[NAMESPACES.index("pid")]:
        if process := os.fork():
            _pass_on(lambda number: os.kill(process, number))
            _end_as(os.waitpid(process, 0)[1])
        _end_with_parent()


def _run(program: str, *arguments: str) -> int:
    """Runs -c CODE, -m MODULE or a file, with arguments; returns the exit code."""
    import runpy
    import traceback

    try:
        if program == "-c":
            sys.argv = ["-c", *arguments[1:]]
            sys.path.insert(0, "")
            exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
        elif program == "-m":
            sys.argv = [*arguments]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [program, *arguments]
            sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
            runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code & 0xFF if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> None:
    """Ends as Python does, but leaves the modules to the kernel."""
    import atexit
    import ctypes
    import threading

    threading._shutdown()  # waits for other threads
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and sys.modules["mpi4py"].rc.finalize is not False and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()  # as mpi4py does when Python has ended
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it has been closed
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what libraries have printed
    os._exit(code)


def serve(listener: int) -> None:
    """listener: the descriptor of a socket."""
    import gc
    import importlib
    import multiprocessing.spawn  # noqa: F401  keeps sys.executable, because its children get descriptors
    import traceback

    os.set_inheritable(listener, False)
    _end_with_parent()
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    sys.path[0] = ROOT  # instead of this folder
    try:
        for module in (*IMPORTED, *_modules()):
            importlib.import_module(module)
    except Exception:
        traceback.print_exc()
        os._exit(1)  # at once: TensorFlow's end takes longer than a test that has lost its server
    del sys.path[0]
    sys.modules["tensorflow"].__spec__.cached = __file__  # a fork compiles nothing, whatever the environment has
    gc.collect()
    gc.freeze()
    Server(socket.socket(fileno=listener)).serve()


def _modules() -> list[str]:
    """The modules of all rooms of train.py."""
    import pkgutil

    return [module.name for room in ROOMS for module in pkgutil.walk_packages([f"{ROOT}/{room}"], f"{room}.")]


if __name__ == "__main__":
    serve(int(sys.argv[1]))
