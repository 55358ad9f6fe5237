"""The processes of one attempt: started together, signalled together, and none of them left behind."""

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


# Which rank of a job failed first, and how: what the ranks wrote down, and how their processes ended.


# How a rank's account of its end is called in the job's folder, what faulthandler wrote when it crashed, and that it works or came to its end.
_RECORD, _CRASH = "rank-{rank}.failure", "rank-{rank}.crash"
_WORKING, _DONE = "rank-{rank}.working", "rank-{rank}.done"
_LONGEST_CRASH = 40


@dataclass(frozen=True)
class Failure:
    """A rank that ended as it should not. `kind` is what it wrote down itself; `text` is its traceback, if there is one."""

    rank: int
    code: int
    at: float
    kind: str = ""
    text: str = ""
    # Of a hang: all that is to be said of it.
    story: str = ""

    def sentence(self, ranks: int, when: str) -> str:
        return self.story or f"rank {self.rank} of {ranks} {self.how} {when}".rstrip()

    @property
    def is_consequence(self) -> bool:
        """It ended because another rank did, or because we ended it."""
        return self.kind in ("lost", "killed")

    @property
    def how(self) -> str:
        if self.kind == "hung":
            return "hung"
        if self.kind == "silent":
            return "did not answer the others, and was ended"
        if self.kind == "unfinished":
            return "ended with exit code 0 and unfinished work"
        if self.kind == "early":
            return "ended before the others were done, without an error"
        if self.code >= 0:
            return f"failed with exit code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"was killed by {name}{_HINTS.get(-self.code, '')}"

    @property
    def _place(self) -> tuple[int, float]:
        """A rank that vanishes makes others fail, in whatever order that is noticed."""
        if self.kind in ("lost", "killed"):
            return (4 if self.kind == "killed" else 3), self.at
        if self.kind in ("early", "silent"):
            return 2, self.at
        if self.code == -signal.SIGABRT:
            return 1, self.at
        return (0 if self.code < 0 else 1), self.at


_HINTS = {
    int(
        signal.SIGABRT
    ): " (NCCL does that when a collective waits longer than --distributed-timeout-minutes)",
    int(
        signal.SIGKILL
    ): " (the system does that when memory runs out; `pentatron plan` shows what a run needs)",
}


def record_path(job: Path, rank: int) -> Path:
    return job / _RECORD.format(rank=rank)


def crash_path(job: Path, rank: int) -> Path:
    return job / _CRASH.format(rank=rank)


def write_record(job: Path, rank: int, kind: str, text: str, at: float) -> None:
    """Of a rank that fails; a half-written one is never read."""
    path = record_path(job, rank)
    half = path.with_suffix(".part")
    half.write_text(json.dumps({"kind": kind, "text": text, "at": at}), encoding="utf-8")
    rename(half, path)


def begin_work(job: Path, rank: int) -> None:
    """The file that `end_work` renames: a disk that is full by then has no room for a new one."""
    (job / _WORKING.format(rank=rank)).touch()


def end_work(job: Path, rank: int) -> None:
    """Records that a rank came to the end of its work."""
    rename(job / _WORKING.format(rank=rank), job / _DONE.format(rank=rank))


def unfinished(processes: Sequence[Process], job: Path) -> list[Failure]:
    """Of ranks that ended without an error: those that have not recorded that they came to the end of their work."""
    return [
        Failure(process.rank, 1, process.ended_at, "unfinished")
        for process in processes
        if not (job / _DONE.format(rank=process.rank)).exists()
    ]


def failures_of(processes: Sequence[Process], job: Path) -> list[Failure]:
    """What failed, the first one first."""
    found = [_failure(process, job) for process in processes if process.code]
    if found and all(failure.is_consequence for failure in found):
        # Everybody lost somebody: whoever left first, in silence.
        quiet = [process for process in processes if process.code == 0]
        if quiet:
            left = min(quiet, key=lambda process: process.ended_at)
            found.append(Failure(left.rank, 0, left.ended_at, "early"))
        elif any(failure.kind == "lost" for failure in found):
            # Or whoever stayed when the others gave up waiting.
            found = [replace(f, kind="silent") if f.kind == "killed" else f for f in found]
    return sorted(found, key=lambda failure: failure._place)


def _failure(process: Process, job: Path) -> Failure:
    assert process.code is not None
    record = _read(record_path(job, process.rank))
    if record is not None:
        return Failure(process.rank, process.code, record["at"], record["kind"], record["text"])
    # By us, unless it was faster to end in another way.
    if process.was_killed and process.code == -signal.SIGKILL:
        return Failure(process.rank, process.code, process.ended_at, "killed")
    return Failure(process.rank, process.code, process.ended_at, text=_crash(crash_path(job, process.rank)))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _crash(path: Path) -> str:
    """The stacks that a crash left: of this thread, mostly, as the others only wait."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
    current = re.search(r"(?s)\A.*?Current thread.*?(?=\n\n|\Z)", text)
    lines = (current[0] if current else text).splitlines()
    return "\n".join(lines[:_LONGEST_CRASH])


def keep_records(failures: Sequence[Failure], folder: Path, attempt: int) -> list[Path]:
    """Adds what each rank said to its own file in the run's folder."""
    kept = []
    for failure in failures:
        if not failure.text:
            continue
        folder.mkdir(exist_ok=True)
        path = folder / f"rank-{failure.rank:05d}.log"
        moment = datetime.fromtimestamp(failure.at).isoformat(sep=" ", timespec="milliseconds")
        with path.open("a", encoding="utf-8") as file:
            file.write(
                f"{moment}, attempt {attempt + 1}: rank {failure.rank} {failure.how}\n{failure.text.rstrip()}\n\n"
            )
        kept.append(path)
    return kept
