"""`pentatron train` as a process whose ranks are forked from what is imported here, instead of eight fresh interpreters each time.

All else is the product's: its launcher, its supervisor, its workers and their files. It computes nothing and starts no thread before
it forks.
"""

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pentatron.launch.processes as processes_module
from pentatron.cli.main import main
from pentatron.train.interrupt import WATCHED
from tests.harness.zygote import preload

_PR_SET_CHILD_SUBREAPER = 36
_PAUSE = 0.02


def prepare_to_fork() -> None:
    """Imports what every process needs; whoever loses its parent becomes ours, so that nobody is left unseen."""
    preload()
    import pentatron.cli.train
    import pentatron.launch.supervise  # noqa: F401

    gc.collect()
    gc.freeze()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Forked:
    """What the launcher uses of `subprocess.Popen`, for a process that was not started but forked."""

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str] | None = None, start_new_session: bool = False
    ) -> None:
        self.returncode: int | None = None
        self.pid = _fork(lambda: _as_worker(list(words), env or {}))

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 3600)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0)
            time.sleep(_PAUSE)
        return code


def start_launcher(words: Sequence[str], console: Path) -> Forked:
    """`pentatron train WORDS...`; what it says goes to the file."""

    def live() -> int:
        os.setsid()
        descriptor = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        stand_in: Any = SimpleNamespace(Popen=Forked, TimeoutExpired=subprocess.TimeoutExpired)
        processes_module.subprocess = stand_in
        return main(["train", *words])

    launcher = Forked.__new__(Forked)
    launcher.returncode, launcher.pid = None, _fork(live)
    return launcher


def start_fresh(words: Sequence[str], console: Path) -> "subprocess.Popen[bytes]":
    """The same as a user starts it."""
    with console.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "pentatron", "train", *words],
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def children_of(pid: int) -> list[int]:
    """In the order in which they were started: that of the ranks."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_running(pid: int) -> bool:
    """A process that is dead and only waited for is not. One of ours that ended is not left to be waited for."""
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _fork(live: Callable[[], int]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _end(live)
    return pid


def _end(live: Callable[[], int]) -> NoReturn:
    code = 1
    try:
        code = live()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _as_worker(words: list[str], environment: Mapping[str, str]) -> int:
    os.setsid()
    # Handlers of the launcher are not those of a worker.
    for number in WATCHED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    return main(words[words.index("train") :])
