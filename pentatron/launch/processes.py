"""The processes of one attempt: started together, signalled together, and none of them left behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

# For processes that were killed with SIGKILL and are waited for; one that waits for a dead disk ends when that answers.
_REAPING_SECONDS = 10.0


@dataclass
class Process:
    """One rank. `code` is its exit code once it has ended (minus the number of the signal that killed it)."""

    rank: int
    handle: "subprocess.Popen[bytes]"
    code: int | None = None
    ended_at: float = 0.0
    # Ended by us, because of another rank.
    was_killed: bool = False

    @property
    def pid(self) -> int:
        return self.handle.pid

    def look(self) -> None:
        """Notices an end; whatever the rank had started (readers of data) ends with it."""
        if self.code is None and (code := self.handle.poll()) is not None:
            self.code, self.ended_at = code, time.time()
            self._signal_group(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                self.handle.send_signal(number)

    def kill(self) -> None:
        if self.code is None:
            self.was_killed = True
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        # Every rank leads a group of its own.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


SAFE_PATH = "PYTHONSAFEPATH"


def environment_of(words: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """What `python WORDS...` inherits. The variable by which a command guards its other processes would hide a script's own folder."""
    is_script = not words[0].startswith("-")
    hidden = SAFE_PATH if is_script and not sys.flags.safe_path else None
    return {name: value for name, value in environment.items() if name != hidden}


def python_command(words: Sequence[str]) -> list[str]:
    """`python WORDS...`, for a process that imports nothing from the current folder.

    `-m` and `-c` would put that folder first on the path. A script's own folder is there for what lies beside the script, in workers as in
    one process.
    """
    is_safe = words[0] in ("-m", "-c") or sys.flags.safe_path
    return [sys.executable, *(["-P"] if is_safe else []), *words]


@contextmanager
def started(
    python_words: Sequence[str],
    environment: Mapping[str, str],
    of_each: Sequence[Mapping[str, str]],
    listener: socket.socket,
) -> Iterator[list[Process]]:
    """`python WORDS...` once for each rank; after the block none of them lives. The first one inherits the socket.

    They lead sessions of their own, so that Ctrl-C reaches the launcher alone, which passes it on once.
    """
    processes: list[Process] = []
    inherited = environment_of(python_words, environment)
    try:
        for rank, own in enumerate(of_each):
            handle = subprocess.Popen(
                python_command(python_words),
                env={**inherited, **own},
                start_new_session=True,
                pass_fds=(listener.fileno(),) if rank == 0 else (),
            )
            processes.append(Process(rank, handle))
        yield processes
    finally:
        end_all(processes)


def end_all(processes: Sequence[Process]) -> None:
    for process in processes:
        process.look()
        process.kill()
    deadline = time.monotonic() + _REAPING_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.handle.wait(max(0.0, deadline - time.monotonic()))
        process.look()


@dataclass
class Signals:
    """What the launcher was told by signals, to be passed on."""

    received: list[signal.Signals] = field(default_factory=list)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))

    @property
    def first(self) -> signal.Signals | None:
        return self.received[0] if self.received else None

    @property
    def is_impatient(self) -> bool:
        """A second Ctrl-C is a person who wants out; schedulers repeat their signals and mean the first."""
        return signal.SIGINT in self.received[1:]


@contextmanager
def listening(numbers: Sequence[signal.Signals]) -> Iterator[Signals]:
    """Signals are kept instead of ending this process."""
    signals = Signals()
    before = {number: signal.signal(number, signals) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
