"""`python WORDS...` as processes forked from this one, which has imported everything: a start costs tenths of
a second, not seconds.

All but the start is the product's: a launcher that runs in such a process forks its workers in the same way,
and everybody is the child of whoever started it. For processes that have no process group and no threads: see
`distributed(process_group=False)`.
"""

import atexit
import contextlib
import faulthandler
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util as multiprocessing_util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pentatron.supervise.processes as processes_module
from pentatron.supervise.signals import WATCHED

_PAUSE = 0.02


class Forked:
    """What is used of `subprocess.Popen`, for a process that was not started but forked."""

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """For the launcher: a worker, which leads a session of its own.

        Words begin with the interpreter; descriptors are all inherited.
        """
        self.returncode: int | None = None
        self.pid = fork(lambda: _as_worker(words[1:], env or {}), session=True)

    @classmethod
    def of(cls, live: Callable[[], int], session: bool = False) -> "Forked":
        forked = cls.__new__(cls)
        forked.returncode, forked.pid = None, fork(live, session)
        return forked

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (3600 if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0)
            time.sleep(_PAUSE)
        return code


class Command(Forked):
    """A command and what it says."""

    outputs: tempfile.TemporaryDirectory[str]

    @classmethod
    def start(
        cls, *words: str, cwd: Path, environment: Mapping[str, str], fork_workers: bool = True
    ) -> "Command":
        """`python WORDS...`, a script or `-m` and a module.

        Workers can also be fresh interpreters, as a user's are.
        """
        outputs = tempfile.TemporaryDirectory()
        out, err = (Path(outputs.name) / name for name in ("out", "err"))

        def live() -> int:
            for path, descriptor in ((out, 1), (err, 2)):
                send_to(path, descriptor)
            os.chdir(cwd)
            _surround(environment)
            if fork_workers:
                fork_workers_too()
            return as_python(words)

        command = cls.of(live)
        assert isinstance(command, Command)
        command.outputs = outputs
        return command

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (Path(self.outputs.name, name).read_text(errors="replace") for name in ("out", "err"))
        return out, err


def fork_workers_too() -> None:
    """From now on, a launcher in this process forks its workers."""
    stand_in: Any = SimpleNamespace(Popen=Forked, TimeoutExpired=subprocess.TimeoutExpired)
    processes_module.subprocess = stand_in


def send_to(path: Path, descriptor: int) -> None:
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, descriptor)
    os.close(opened)


def as_python(words: Sequence[str]) -> int:
    """Runs what `python WORDS...` would."""
    if words[0] == "-P":
        # Nothing is imported from the current folder here in any case.
        words = words[1:]
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
    return 0


def fork(live: Callable[[], int], session: bool = False) -> int:
    """The process that ends with what `live` returns; who leads a session does so before this returns, as
    with `Popen`."""
    sys.stdout.flush()
    sys.stderr.flush()
    begun, begins = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(begun)
        if session:
            os.setsid()
        os.close(begins)
        _end(live)
    os.close(begins)
    os.read(begun, 1)
    os.close(begun)
    return pid


def _end(live: Callable[[], int]) -> NoReturn:
    """Nobody comes out of here: whatever goes wrong on the way, this process must not go on as a second one
    of its parent's."""
    status = 1
    try:
        status = _lived(live)
    finally:
        os._exit(status)


def _lived(live: Callable[[], int]) -> int:
    """What an interpreter does around a program, without what the parent has registered: its temporary
    folders are among it."""
    atexit._clear()
    faulthandler.disable()
    faulthandler.unregister(signal.SIGQUIT)
    code: Any = 1
    interrupted = False
    try:
        code = live()
    except SystemExit as end:
        code = end.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        traceback.print_exc()
        interrupted = isinstance(error, KeyboardInterrupt)
    # Threads are waited for; in this order.
    threading._shutdown()  # type: ignore[attr-defined]
    multiprocessing_util._run_finalizers()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return code or 0


def _as_worker(words: Sequence[str], environment: Mapping[str, str]) -> int:
    # Handlers of the launcher are not those of a worker.
    for number in WATCHED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _surround(environment)
    return as_python(words)


def _surround(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
