"""Which rank of a job failed first, and how: what the ranks wrote down, and how their processes ended."""

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pentatron.files import rename
from pentatron.launch.processes import Process

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
