"""Runs `pentatron train` with ranks forked from this process instead of eight new interpreters.

All else is the product's: its launcher, its supervisor, its workers and their files. This process computes
nothing and starts no thread before it forks.
"""

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.harness.forked import Forked, as_python, fork_workers_too, send_to
from tests.harness.zygote import preload

_PR_SET_CHILD_SUBREAPER = 36


def prepare_to_fork() -> None:
    """Imports what every process needs, and becomes the subreaper of orphaned processes."""
    preload()
    import pentatron.cli.train
    import pentatron.supervise.supervisor  # noqa: F401

    gc.collect()
    gc.freeze()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start_launcher(words: Sequence[str], console: Path) -> Forked:
    """Starts `pentatron train WORDS...` with its output in `console`."""

    def live() -> int:
        send_to(console, 1)
        send_to(console, 2)
        fork_workers_too()
        return as_python(["-m", "pentatron", "train", *words])

    return Forked.of(live, session=True)


def start_fresh(words: Sequence[str], console: Path) -> "subprocess.Popen[bytes]":
    """Starts `pentatron train WORDS...` in a new interpreter, as a user does."""
    with console.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "pentatron", "train", *words],
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def children_of(pid: int) -> list[int]:
    """Returns the children in the order in which they were started, which is that of the ranks."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not.

    Reaps the process if it is an ended child of this one.
    """
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
