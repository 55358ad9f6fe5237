"""One worker process of `pentatron bench`: `pentatron train` with its output in a file."""

import os
import re
import secrets
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pentatron.cli.main import run_guarded
from pentatron.cli.train import train
from pentatron.parallel.rendezvous import SECRET
from pentatron.settings.entry_points import EntryPoint

# Imported before the processes are forked, so that they share it.


@dataclass(frozen=True)
class BenchJob:
    """A layout to run. `port` is that of the rendezvous on this machine, `secret` authenticates its ranks."""

    words: Sequence[str]
    entry: EntryPoint
    processes: int
    port: int
    folder: Path
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    def output(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.txt"


def run_rank(job: BenchJob, rank: int) -> None:
    """Entry point of a forked process."""
    with job.output(rank).open("w", encoding="utf-8") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job.processes))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.port), SECRET: job.secret}
    # Marks the process as supervised, so that it exits with its parent.
    os.environ["TORCHELASTIC_RUN_ID"] = "pentatron-bench"
    try:
        code = run_guarded(lambda: train(job.words, job.entry, ()))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips interpreter shutdown, which threads of a process group with lost peers can abort.
    os._exit(code)


_LOST = "lost contact with another rank"
# An error sentence of pentatron, or the end of a traceback.
_REASON = re.compile(r"pentatron: |[\w.]*(Error|Exception):")


def reason_of_failure(job: BenchJob, otherwise: str | None = None) -> str | None:
    """Returns the last error of the first rank that failed by itself; `otherwise` if all only lost contact
    with another."""
    errors = []
    for rank in range(job.processes):
        file = job.output(rank)
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        lines = [line.strip() for line in text.splitlines() if _REASON.match(line)]
        if lines:
            errors.append((lines[-1].removeprefix("pentatron: "), rank))
    causes = [(line, rank) for line, rank in errors if _LOST not in line]
    for line, rank in causes or ([] if otherwise else errors):
        return line if line.startswith("rank ") else f"rank {rank}: {line}" if job.processes > 1 else line
    return otherwise
