"""New Python processes in a fraction of a second: forked from one that has imported SGLang.

Importing SGLang takes 12 CPU seconds, and each engine starts two processes, each server three.
`install` keeps the start method "spawn", what is handed to a process, whose child it is and what
becomes of it; only in place of a new interpreter comes a copy of a waiting one, which has imported
SGLang's modules and done nothing else: no plugin loaded, no argument read, no thread started.

A process gets the environment that it would have. Names that were read during those imports are
the exception that counts: where they differ, another interpreter is made, with these.

`SGLANG_SMC_COLD_TESTS=1`, or an accelerator, which a process can not use after a fork: all starts
are Python's own. Some tests ask for those in any case.
"""

import contextlib
import ctypes
import fcntl
import multiprocessing.spawn
import multiprocessing.util
import os
import pickle
import re
import resource
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

COLD_ENV = "SGLANG_SMC_COLD_TESTS"
#: What schedulers, detokenizers and servers import anyway. Not `prometheus_client`: it is to read
#: the environment later.
MODULES = (
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.models.registry",
    "sglang_smc.plugin",
)
#: Read by libraries in C, unseen by `_names_read`.
READ_IN_C = ("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "MALLOC_", "LD_", "PYTHON")
#: Set before processes start: logs of a GPU library, and how threads wait, of which there is one.
OF_NO_CONSEQUENCE = {"CUTE_DSL_LOG_LEVEL", "CUTE_DSL_LOG_TO_CONSOLE"}
OF_NO_CONSEQUENCE |= {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
_HARD = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
MOST_FDS = 6000 if _HARD == resource.RLIM_INFINITY else min(_HARD, 6000)
#: Below are files of a starting process, of which engines leave some behind; above those that
#: libraries opened on import.
LOW_FDS = MOST_FDS // 2
LARGEST = 1 << 20
MOST_KEPT = 2
PR_SET_CHILD_SUBREAPER = 36
SPAWN = re.compile(r"from multiprocessing.spawn import spawn_main; spawn_main\((.*)\)")

_original_spawn = multiprocessing.util.spawnv_passfds


class Request(NamedTuple):
    """What a new process is to be; its files come along, to get these numbers."""

    arguments: list[str]  # behind the interpreter's name
    environment: dict[str, str]
    folder: str
    new_session: bool
    fds: list[int]


class Interpreter:
    """The near end of a waiting interpreter, of which copies are made."""

    def __init__(self, channel: socket.socket, pid: int) -> None:
        self.pid = pid
        self._channel = channel
        self._lock = threading.Lock()
        _, (self._before, self._after, self._names) = _receive(channel)  # once it is ready

    def misfits(self, environment: dict[str, str]) -> set[str]:
        """Names that had another value when they were read, and that no import sets itself."""
        read = self._names | {
            name for name in {**environment, **self._before} if name.startswith(READ_IN_C)
        }
        return {
            name
            for name in read - OF_NO_CONSEQUENCE
            if environment.get(name) not in (self._before.get(name), self._after.get(name))
        }

    def copy(self, request: Request, files: Sequence[int]) -> int:
        """Start a process with ``files`` as ``request.fds``, as a child of ours; its pid."""
        with self._lock, _adopting():
            _send(self._channel, tuple(request), files)
            return _receive(self._channel)[1]

    def end(self) -> None:
        self._channel.close()
        os.waitpid(self.pid, 0)


class Process(subprocess.Popen):
    """A child that was not started by `subprocess`."""

    def __init__(self, pid: int) -> None:
        self._started = pid
        super().__init__([])

    def _execute_child(self, *_: Any) -> None:
        self.pid = self._started
        self._child_created = True


class Warm:
    """The waiting interpreters of this process, for the environments asked for last."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)  # before any engine or test has added to it
        self.interpreters: list[Interpreter] = []

    def interpreter(self, environment: dict[str, str]) -> Interpreter:
        for found in self.interpreters:
            if not found.misfits(environment):
                return found
        base = dict(self.environment)
        is_first = not self.interpreters
        if not is_first:
            for name in self.interpreters[0].misfits(environment):
                base.pop(name, None)
                base |= {name: environment[name]} if name in environment else {}
        if len(self.interpreters) == MOST_KEPT:
            self.interpreters.pop().end()
        self.interpreters.append(_new_interpreter(base))
        # What the first has read is known now, and may not be what is asked for.
        return self.interpreter(environment) if is_first else self.interpreters[-1]


_warm: Warm | None = None


def install() -> None:
    """From now on, `multiprocessing` and `start` copy a waiting interpreter."""
    global _warm
    if os.environ.get(COLD_ENV) == "1" or sys.platform != "linux":
        return
    _make_room_for_files()
    _warm = Warm()
    multiprocessing.util.spawnv_passfds = _spawn  # type: ignore[assignment]
    _keep_from_killing(_warm)


def _make_room_for_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MOST_FDS:
        resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FDS, hard))


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Python's own starts for a while."""
    global _warm
    kept = _warm
    _warm = None
    try:
        yield
    finally:
        _warm = kept


def start(arguments: list[str], environment: dict[str, str], output: int) -> subprocess.Popen:
    """Start ``python`` with ``arguments`` in a session of its own, all output to one file."""
    if _warm is None or _accelerator():
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    sys.audit("subprocess.Popen", sys.executable, arguments, None, environment)
    request = Request(arguments, environment, os.getcwd(), True, [1, 2])
    return Process(_warm.interpreter(environment).copy(request, [output, output]))


def _spawn(path: bytes, arguments: list[bytes | str], fds: Sequence[int]) -> int:
    """In place of `multiprocessing.util.spawnv_passfds`."""
    code = os.fsdecode(arguments[-2]) if len(arguments) > 1 else ""
    if _warm is None or not SPAWN.fullmatch(code) or max(fds) >= LOW_FDS or _accelerator():
        return _original_spawn(path, arguments, fds)
    environment = dict(os.environ)
    request = Request(["-c", code], environment, os.getcwd(), False, [1, 2, *fds])
    return _warm.interpreter(environment).copy(request, request.fds)


def _accelerator() -> bool:
    import torch

    return torch.accelerator.is_available()


def _keep_from_killing(warm: Warm) -> None:
    """An engine that shuts down kills all children of its process; not a waiting interpreter.

    Nor torch's manager of shared tensors: it starts once in a process, and later tests need it.
    """
    import psutil

    original = psutil.Process.children

    def is_manager(process: psutil.Process) -> bool:
        try:
            return process.name().startswith("torch_shm")
        except psutil.Error:  # it has ended
            return False

    def children(self: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        waiting = {interpreter.pid for interpreter in warm.interpreters}
        found = original(self, recursive)
        return [one for one in found if one.pid not in waiting and not is_manager(one)]

    psutil.Process.children = children  # type: ignore[method-assign]


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Orphans among our descendants become our children: this is how a copy becomes one."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _new_interpreter(environment: dict[str, str]) -> Interpreter:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-W", "ignore", __file__, str(theirs.fileno())]
        process = subprocess.Popen(
            command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
    process.returncode = 0  # `Interpreter.end` waits for it
    return Interpreter(ours, process.pid)


def _send(channel: socket.socket, message: object, fds: Sequence[int] = ()) -> None:
    socket.send_fds(channel, [pickle.dumps(message)], list(fds))


def _receive(channel: socket.socket) -> tuple[list[int], Any]:
    """Files and a message; EOFError where the other end is gone."""
    data, fds, _, _ = socket.recv_fds(channel, LARGEST, 200)
    if not data:
        raise EOFError
    return fds, pickle.loads(data)


# What follows runs in the waiting interpreter and its copies.


def _names_read() -> set[str]:
    """Import the modules; names of the environment that were read meanwhile."""
    names: set[str] = set()
    original = os._Environ.__getitem__

    def remember(self: os._Environ, name: str) -> str:
        names.add(name)
        return original(self, name)

    os._Environ.__getitem__ = remember  # type: ignore[method-assign]
    try:
        for module in MODULES:
            __import__(module)
    finally:
        os._Environ.__getitem__ = original  # type: ignore[method-assign]
    assert "prometheus_client" not in sys.modules
    return names


def _wait_for_requests(channel: socket.socket) -> tuple[Request, list[int]]:
    """Copy this process for each request; returns in the copies only."""
    while True:
        try:
            fds, request = _receive(channel)
        except EOFError:
            os._exit(0)
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            me = os.getpid()
            child = os.fork()
            if child == 0:
                channel.close()
                os.close(reading)
                os.close(writing)
                while os.getppid() == me:  # until whoever asked has become our parent
                    time.sleep(0.001)
                return Request(*request), fds
            os.write(writing, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        _send(channel, int(os.read(reading, 32)))
        for fd in (reading, writing, *fds):
            os.close(fd)


def _become(request: Request, fds: list[int]) -> None:
    """Be the process that was asked for, to its end."""
    if request.new_session:
        os.setsid()
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, LOW_FDS) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, number in zip(high, request.fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    kind, what, *rest = request.arguments
    if kind == "-c":
        sys.argv = ["-c", "--multiprocessing-fork"]
        numbers = dict(pair.split("=") for pair in SPAWN.fullmatch(what)[1].split(", "))  # type: ignore[index]
        multiprocessing.spawn.spawn_main(**{name: int(fd) for name, fd in numbers.items()})
    assert kind == "-m"
    _wait_for_own_processes()
    sys.argv = [what, *rest]
    sys.path.insert(0, request.folder)
    runpy.run_module(what, run_name="__main__", alter_sys=True)


def _wait_for_own_processes() -> None:
    """A server starts processes too: it gets a waiting interpreter of its own."""
    global _warm
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _send(theirs, _told)
        _become(*_wait_for_requests(theirs))
        sys.exit(0)
    theirs.close()
    _warm = Warm()
    _warm.interpreters.append(Interpreter(ours, pid))
    multiprocessing.util.spawnv_passfds = _spawn  # type: ignore[assignment]


_told: list[object] = []  # the environment before and after imports, and the names read


def _main() -> None:
    _make_room_for_files()
    channel = socket.socket(fileno=fcntl.fcntl(int(sys.argv[1]), fcntl.F_DUPFD, LOW_FDS))
    os.close(int(sys.argv[1]))
    del sys.path[0]  # the tests' folder
    taken = []
    while (fd := os.dup(0)) < LOW_FDS:
        taken.append(fd)
    os.close(fd)
    before = dict(os.environ)
    names = _names_read()
    _told.extend((before, dict(os.environ), names))
    sys.stdout.flush()
    for fd in taken:
        os.close(fd)
    _send(channel, _told)
    _become(*_wait_for_requests(channel))


if __name__ == "__main__":
    _main()
