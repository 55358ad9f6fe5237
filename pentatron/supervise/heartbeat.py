"""Heartbeat of a rank: a small file with a counter and the rank's position in the run.

A thread writes it periodically. A process that is stopped or never releases the GIL stops writing; one that
hangs writes the same position. The file has no timestamps: readers use their own clock, as clocks of machines
may differ.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.files import fsync
from pentatron.parallel.rank_status import PendingCall, RankStatus

# Header: step, first step and whether the run folder is locked. The training thread writes it at once, so
# that it is exact even if the rank is killed.
_EXACT_BYTES = 48
_BYTES = 8192


@dataclass(kw_only=True)
class Heartbeat(RankStatus):
    """Content of a heartbeat file: the status of a rank. `pulse` counts the writes."""

    rank: int
    pid: int
    host: str
    pulse: int


def heartbeat_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.beat"


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Returns None without a file, or while it is being written."""
    try:
        text = path.read_bytes()
        step, began, opened = map(int, text[:_EXACT_BYTES].split())
        content = json.loads(text[_EXACT_BYTES:].decode())
        call = content.pop("waits_in")
        content |= {"step": step, "began": began, "opened": bool(opened)}
        return Heartbeat(waits_in=None if call is None else PendingCall(*call), **content)
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(eq=False)
class HeartbeatWriter:
    """Writes this rank's heartbeat to `path` every `pause` seconds.

    `synced`: calls fsync, for readers on other machines. `on_beat` is called after each write, by the same
    thread.
    """

    path: Path
    rank: int
    host: str
    status: RankStatus
    pause: float
    synced: bool = False
    on_beat: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self._about: dict[str, Any] = {"rank": self.rank, "pid": os.getpid(), "host": self.host}
        self._pulse = 0
        # Whether the last heartbeat could be written.
        self.last_write_succeeded = True
        self._stop = threading.Event()
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._file, _BYTES)
        if not self.synced:
            self.status.on_step_done = self.status.on_opened = self._write_exact
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self.status.begin_at(self.status.step)
        self.beat()
        self._thread.start()

    def _exact(self) -> bytes:
        status = self.status
        return f"{status.step} {status.began} {int(status.opened)}".encode().ljust(_EXACT_BYTES)

    def _write_exact(self) -> None:
        # Runs in the training thread.
        with suppress(OSError):
            os.pwrite(self._file, self._exact(), 0)

    def beat(self) -> None:
        self._pulse += 1
        content = {**self._about, **self.status.to_json(), "pulse": self._pulse}
        text = json.dumps(content).encode().ljust(_BYTES - _EXACT_BYTES)
        if self.synced:
            text = self._exact() + text
        self.last_write_succeeded = False
        # A full or unmounted disk must not end the run.
        with suppress(OSError):
            os.pwrite(self._file, text, 0 if self.synced else _EXACT_BYTES)
            if self.synced:
                fsync(self._file)
            self.last_write_succeeded = True

    def _run(self) -> None:
        while not self._stop.wait(self.pause):
            self.beat()
            if self.on_beat is not None:
                self.on_beat()

    def close(self) -> None:
        """Stops the thread and removes the file."""
        self._stop.set()
        self.status.on_step_done = self.status.on_opened = None
        self._thread.join(timeout=5)
        with suppress(OSError):
            os.close(self._file)
            self.path.unlink()


@contextmanager
def running_heartbeat(writer: HeartbeatWriter | None) -> Iterator[None]:
    """Context manager that runs the heartbeat. After an error the file stays, for the failure report."""
    if writer is not None:
        writer.start()
    yield
    if writer is not None:
        writer.close()
