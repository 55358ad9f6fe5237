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

from pentatron.parallel.whereabouts import Call, Whereabouts

# The last step, which the training thread writes itself: it is exact also for a rank that is killed.
_STEP_BYTES = 16
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
    # Seconds of the longest step but the first.
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
        step = int(text[:_STEP_BYTES])
        found = json.loads(text[_STEP_BYTES:].decode())
        call = found.pop("waits_in")
        found["step"] = max(step, found["step"])
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
        self._stop = threading.Event()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._file, _BYTES)
        where.when_step_is_done = None if synced else self._write_step
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self.where.begin_at(self.where.step)
        self.beat()
        self._thread.start()

    def _write_step(self, step: int) -> None:
        """Called by the thread that trains."""
        with suppress(OSError):
            os.pwrite(self._file, str(step).encode().ljust(_STEP_BYTES), 0)

    def beat(self) -> None:
        self._pulse += 1
        told = {**self._about, **self.where.to_json(), "pulse": self._pulse}
        text = json.dumps(told).encode().ljust(_BYTES - _STEP_BYTES)
        if self.synced:
            text = str(self.where.step).encode().ljust(_STEP_BYTES) + text
        # A disk that is full or gone must not end a run.
        with suppress(OSError):
            os.pwrite(self._file, text, 0 if self.synced else _STEP_BYTES)
            if self.synced:
                os.fsync(self._file)

    def _run(self) -> None:
        while not self._stop.wait(self.pause):
            self.beat()
            if self.at_pulse is not None:
                self.at_pulse()

    def close(self) -> None:
        """A rank that ends in good order leaves no file."""
        self._stop.set()
        self.where.when_step_is_done = None
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
