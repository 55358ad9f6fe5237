"""A sign of life of every rank, in a small file: that its process runs, and where in the run it is.

A thread writes it now and then; a process that is stopped, or never lets go of the interpreter, writes no more, and one that hangs goes on
writing the same place. Whoever reads takes the time by its own clock, so that clocks may jump and machines may disagree.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.files import sync
from pentatron.parallel.rank_status import Call, Whereabouts

# The last step, the one it began from and whether the run's folder is ours: the training thread writes them itself, so that they are exact also for a rank
# that is killed.
_EXACT_BYTES = 48
_BYTES = 8192


@dataclass(frozen=True)
class Beat:
    """What a rank's file says. `pulse` counts how often it was written."""

    rank: int
    pid: int
    host: str
    pulse: int
    step: int
    began: int
    phase: str
    calls: int
    counts: dict[str, int]
    waits_in: Call | None
    opened: bool
    # Seconds of the first step (0 while it is not done), and of the longest of the others.
    first_step: float
    longest_step: float

    @property
    def place(self) -> tuple[int, str, int]:
        """Changes as long as the rank gets on."""
        return self.step, self.phase, self.calls


def beat_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.beat"


def read_beat(path: Path) -> Beat | None:
    """None if there is none yet, or if it is being written."""
    try:
        text = path.read_bytes()
        step, began, opened = map(int, text[:_EXACT_BYTES].split())
        found = json.loads(text[_EXACT_BYTES:].decode())
        call = found.pop("waits_in")
        found |= {"step": step, "began": began, "opened": bool(opened)}
        return Beat(waits_in=None if call is None else Call(*call), **found)
    except (OSError, ValueError, KeyError, TypeError):
        return None


class Heart:
    """Writes this rank's beats into `path`, every `pause` seconds.

    `synced`: for readers on other machines, who see only what is on the disk. `at_pulse` is called each time, by the same thread.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        host: str,
        where: Whereabouts,
        pause: float,
        synced: bool = False,
        at_pulse: Callable[[], None] | None = None,
    ) -> None:
        self.path, self.where, self.pause, self.synced, self.at_pulse = path, where, pause, synced, at_pulse
        self._about: dict[str, Any] = {"rank": rank, "pid": os.getpid(), "host": host}
        self._pulse = 0
        # Whether the last beat could be written.
        self.is_heard = True
        self._stop = threading.Event()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._file, _BYTES)
        if not synced:
            where.when_step_is_done, where.when_opened = self._write_exact, self._write_exact
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self.where.begin_at(self.where.step)
        self.beat()
        self._thread.start()

    def _exact(self) -> bytes:
        return f"{self.where.step} {self.where.began} {int(self.where.opened)}".encode().ljust(_EXACT_BYTES)

    def _write_exact(self) -> None:
        """Called by the thread that trains."""
        with suppress(OSError):
            os.pwrite(self._file, self._exact(), 0)

    def beat(self) -> None:
        self._pulse += 1
        told = {**self._about, **self.where.to_json(), "pulse": self._pulse}
        text = json.dumps(told).encode().ljust(_BYTES - _EXACT_BYTES)
        if self.synced:
            text = self._exact() + text
        self.is_heard = False
        # A disk that is full or gone must not end a run.
        with suppress(OSError):
            os.pwrite(self._file, text, 0 if self.synced else _EXACT_BYTES)
            if self.synced:
                sync(self._file)
            self.is_heard = True

    def _run(self) -> None:
        while not self._stop.wait(self.pause):
            self.beat()
            if self.at_pulse is not None:
                self.at_pulse()

    def close(self) -> None:
        """A rank that ends in good order leaves no file."""
        self._stop.set()
        self.where.when_step_is_done = self.where.when_opened = None
        self._thread.join(timeout=5)
        with suppress(OSError):
            os.close(self._file)
            self.path.unlink()


@contextmanager
def beating(heart: Heart | None) -> Iterator[None]:
    """A rank that fails leaves its last beat, for whoever looks for the reason."""
    if heart is None:
        yield
        return
    heart.start()
    yield
    heart.close()
