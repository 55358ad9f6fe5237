"""Worker processes of one start of a job, the signals the launcher receives, and the failures of ranks."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from pentatron.files import rename

# Limit for reaping killed processes: one in an uninterruptible I/O wait ends only when the device responds.
_REAPING_SECONDS = 10.0


@dataclass
class Process:
    """The process of one rank. `code`: its exit code once it has ended, negative for a signal."""

    rank: int
    handle: "subprocess.Popen[bytes]"
    code: int | None = None
    ended_at: float = 0.0
    # Whether the launcher killed it because of another rank.
    was_killed: bool = False

    @property
    def pid(self) -> int:
        return self.handle.pid

    def poll(self) -> None:
        """Polls the process; at its end kills its process group, which has the data loader workers."""
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
        # Every rank leads a process group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


# With this variable Python adds neither the current folder nor that of the script to its path.
SAFE_PATH = "PYTHONSAFEPATH"


def environment_of(words: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of `python WORDS...`. A script may import from its folder."""
    is_script = not words[0].startswith("-")
    hidden = SAFE_PATH if is_script and not sys.flags.safe_path else None
    return {name: value for name, value in environment.items() if name != hidden}


def python_command(words: Sequence[str]) -> list[str]:
    """Returns the command for `python WORDS...` that imports nothing from the current folder.

    `-m` and `-c` would put it first on the path. A script keeps its own folder on the path.
    """
    is_safe = words[0] in ("-m", "-c") or sys.flags.safe_path
    return [sys.executable, *(["-P"] if is_safe else []), *words]


@contextmanager
def start_workers(
    python_words: Sequence[str],
    environment: Mapping[str, str],
    of_each: Sequence[Mapping[str, str]],
    listener: socket.socket,
) -> Iterator[list[Process]]:
    """Starts `python WORDS...` once per rank; kills them at the end of the block. Rank 0 inherits the socket.

    Each has its own session, so that Ctrl-C reaches only the launcher, which forwards it once.
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
        kill_all(processes)


def kill_all(processes: Sequence[Process]) -> None:
    for process in processes:
        process.poll()
        process.kill()
    deadline = time.monotonic() + _REAPING_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.handle.wait(max(0.0, deadline - time.monotonic()))
        process.poll()


@dataclass
class ReceivedSignals:
    """Signals that the launcher has received, to be forwarded."""

    received: list[signal.Signals] = field(default_factory=list)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(number))

    @property
    def first(self) -> signal.Signals | None:
        return self.received[0] if self.received else None

    @property
    def is_impatient(self) -> bool:
        """Whether Ctrl-C was pressed again. Schedulers repeat other signals."""
        return signal.SIGINT in self.received[1:]


# --- failures ---

_LONGEST_CRASH = 40


@dataclass(frozen=True)
class Failure:
    """The failure of a rank.

    `kind`: from the rank's own record, or set by the launcher. `text`: its traceback, if any. `message`: the
    complete message about a hang.
    """

    rank: int
    code: int
    at: float
    kind: str = ""
    text: str = ""
    message: str = ""

    def sentence(self, ranks: int, when: str) -> str:
        return self.message or f"rank {self.rank} of {ranks} {self.how} {when}".rstrip()

    @property
    def is_consequence(self) -> bool:
        """Whether another rank caused the failure."""
        return self.kind in ("lost", "killed")

    @property
    def how(self) -> str:
        if self.kind in _DESCRIPTIONS:
            return _DESCRIPTIONS[self.kind]
        if self.code >= 0:
            return f"failed with exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"was killed by {name}{_HINTS.get(-self.code, '')}"

    @property
    def _order(self) -> tuple[int, float]:
        """Sort key: causes before consequences, then by time, as failures may be noticed in any order."""
        ranking = {"early": 2, "silent": 2, "lost": 3, "killed": 4}
        # A signal comes first, except SIGABRT, with which NCCL reports a timeout caused by another rank.
        by_signal = self.code < 0 and self.code != -signal.SIGABRT
        return ranking.get(self.kind, 0 if by_signal else 1), self.at


_DESCRIPTIONS = {
    "hung": "hung",
    "silent": "did not respond to the others and was killed",
    "unfinished": "ended with exit code 0 and unfinished work",
    "early": "exited before the others, without an error",
}
_HINTS: dict[int, str] = {
    signal.SIGABRT: " (NCCL does that when a collective waits longer than --distributed-timeout-minutes)",
    signal.SIGKILL: " (the system does that when memory runs out; `pentatron plan` shows what a run needs)",
}


def rank_file(job: Path, rank: int, kind: str) -> Path:
    """Returns a file in the job's folder.

    Kinds are `failure` (the record of a rank), `crash` and `stacks` (traces by faulthandler), and the markers
    `working` and `done`.
    """
    return job / f"rank-{rank}.{kind}"


def write_record(job: Path, rank: int, kind: str, text: str, at: float) -> None:
    """Writes the failure record of a rank, with an atomic rename."""
    path = rank_file(job, rank, "failure")
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({"kind": kind, "text": text, "at": at}), encoding="utf-8")
    rename(partial, path)


def mark_working(job: Path, rank: int) -> None:
    """Creates the file that `mark_done` renames: a new file might not fit on a full disk by then."""
    rank_file(job, rank, "working").touch()


def mark_done(job: Path, rank: int) -> None:
    """Records that a rank has completed its work."""
    rename(rank_file(job, rank, "working"), rank_file(job, rank, "done"))


def unfinished_ranks(processes: Sequence[Process], job: Path) -> list[Failure]:
    """Returns failures of ranks that exited with code 0 but did not record the end of their work."""
    unfinished = (process for process in processes if not rank_file(job, process.rank, "done").exists())
    return [Failure(process.rank, 1, process.ended_at, "unfinished") for process in unfinished]


def find_failures(processes: Sequence[Process], job: Path) -> list[Failure]:
    """Returns the failures of a job, with the cause first."""
    failures = [_failure(process, job) for process in processes if process.code]
    if failures and all(failure.is_consequence for failure in failures):
        # All ranks lost the connection to another one: the cause is the first that exited without an error.
        exited = (process for process in processes if process.code == 0)
        if (first := min(exited, key=lambda process: process.ended_at, default=None)) is not None:
            failures.append(Failure(first.rank, 0, first.ended_at, "early"))
        elif any(failure.kind == "lost" for failure in failures):
            # Without one, the cause is the rank that did not respond and had to be killed.
            failures = [replace(f, kind="silent") if f.kind == "killed" else f for f in failures]
    return sorted(failures, key=lambda failure: failure._order)


def _failure(process: Process, job: Path) -> Failure:
    assert process.code is not None
    record = _read_record(rank_file(job, process.rank, "failure"))
    if record is not None:
        return Failure(process.rank, process.code, record["at"], record["kind"], record["text"])
    # Killed by the launcher, unless it ended in another way before.
    killed = process.was_killed and process.code == -signal.SIGKILL
    kind, text = ("killed", "") if killed else ("", _crash_stack(rank_file(job, process.rank, "crash")))
    return Failure(process.rank, process.code, process.ended_at, kind, text)


def read_if_possible(path: Path) -> str:
    """Returns the text of a file; an empty string if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _crash_stack(path: Path) -> str:
    """Returns the stack trace that faulthandler wrote at a crash, of the current thread if that is marked."""
    text = read_if_possible(path).strip()
    current = re.search(r"(?s)\A.*?Current thread.*?(?=\n\n|\Z)", text)
    lines = (current[0] if current else text).splitlines()
    return "\n".join(lines[:_LONGEST_CRASH])


def append_tracebacks(failures: Sequence[Failure], folder: Path, attempt: int) -> list[Path]:
    """Appends the traceback of each rank to its file in the run folder."""
    paths = []
    for failure in (failure for failure in failures if failure.text):
        folder.mkdir(exist_ok=True)
        path = folder / f"rank-{failure.rank:05d}.log"
        moment = datetime.fromtimestamp(failure.at).isoformat(sep=" ", timespec="milliseconds")
        with path.open("a", encoding="utf-8") as file:
            file.write(
                f"{moment}, attempt {attempt + 1}: rank {failure.rank} {failure.how}\n{failure.text.rstrip()}\n\n"
            )
        paths.append(path)
    return paths
