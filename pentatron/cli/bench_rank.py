"""One process of a layout that is measured: `pentatron train`, with its output in a file."""

import os
import secrets
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pentatron.cli.main import guarded
from pentatron.cli.train import train
from pentatron.settings.entry import EntryPoint

# Imported here, before the processes are forked, rather than in each of them.
from pentatron.train import session as _session  # noqa: F401


@dataclass(frozen=True)
class Job:
    """`port` is the meeting point on this machine, `secret` what its ranks know and no other process does."""

    words: Sequence[str]
    entry: EntryPoint
    processes: int
    port: int
    folder: Path
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    def output(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.txt"


def work(job: Job, rank: int) -> None:
    """The body of a forked process."""
    with job.output(rank).open("w", encoding="utf-8") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.processes),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(job.processes),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
        PENTATRON_JOB_SECRET=job.secret,
        # Says that somebody watches over this process: it ends with its parent.
        TORCHELASTIC_RUN_ID="pentatron-bench",
    )
    try:
        code = guarded(lambda: train(job.words, job.entry, ()))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # No clean-up of the interpreter: threads of a process group that lost its peers can abort it.
    os._exit(code)


_LOST = "lost contact with another rank"


def reason_of_failure(job: Job, otherwise: str | None = None) -> str | None:
    """The last words of the rank that failed by itself, on one line; `otherwise` if all only missed another."""
    said = []
    for rank in range(job.processes):
        file = job.output(rank)
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        lines = [line.strip() for line in text.splitlines() if _is_reason(line)]
        if lines:
            said.append((lines[-1].removeprefix("pentatron: "), rank))
    own = [(line, rank) for line, rank in said if _LOST not in line]
    for line, rank in own or ([] if otherwise else said):
        return line if line.startswith("rank ") else f"rank {rank}: {line}" if job.processes > 1 else line
    return otherwise


def _is_reason(line: str) -> bool:
    """A sentence of ours, or the end of a traceback."""
    if line.startswith("pentatron: "):
        return True
    name, colon, _ = line.partition(":")
    return (
        bool(colon)
        and name.replace(".", "").replace("_", "").isalnum()
        and name.endswith(("Error", "Exception"))
    )
