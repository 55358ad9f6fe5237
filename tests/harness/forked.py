"""Runs `python WORDS...` in processes forked from this one, which has all imports done.

A start costs tenths of a second instead of seconds. Everything after the start is product code: a launcher in
such a process forks its workers in the same way, and every process is the child of the one that started it.
The forking process must have no process group and no threads: see `distributed(process_group=False)`.
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
    """The used part of the interface of `subprocess.Popen`, for a forked process."""

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Forks a worker in its own session; called by the launcher in place of `Popen`.

        `words` begin with the interpreter. All descriptors are inherited.
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
    """A forked command with captured output."""

    outputs: tempfile.TemporaryDirectory[str]

    @classmethod
    def start(
        cls, *words: str, cwd: Path, environment: Mapping[str, str], fork_workers: bool = True
    ) -> "Command":
        """Starts `python WORDS...`: a script, or `-m` and a module.

        With `fork_workers=False` workers are fresh interpreters, as for a user.
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
    """Makes a launcher in this process fork its workers."""
    stand_in: Any = SimpleNamespace(Popen=Forked, TimeoutExpired=subprocess.TimeoutExpired)
    processes_module.subprocess = stand_in


def send_to(path: Path, descriptor: int) -> None:
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, descriptor)
    os.close(opened)


def as_python(words: Sequence[str]) -> int:
    """Runs `python WORDS...` in this process."""
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
    """Forks a process that exits with the return value of `live`, and returns its pid.

    With `session`, the child leads a session before this function returns, as with `Popen`.
    """
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
    """Runs `live` and exits, whatever is raised: the child must not continue as a copy of its parent."""
    status = 1
    try:
        status = _lived(live)
    finally:
        os._exit(status)


def _lived(live: Callable[[], int]) -> int:
    """Runs `live` as an interpreter runs a program, and returns the exit code.

    Exit handlers of the parent are dropped first: they would remove its temporary folders.
    """
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
    # The order matters: threads are joined before exit handlers run.
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
    # A worker must not inherit the signal handlers of the launcher.
    for number in WATCHED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _surround(environment)
    return as_python(words)


def _surround(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
