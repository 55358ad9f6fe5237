"""Reads a metrics file while it grows: only what is new, and only what a view needs of it."""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pentatron.monitor.metrics import parse_row

_RECENT_STEPS = 20
_RECENT_RANKS = 5


@dataclass
class Followed:
    """What is known of a run so far. `step` is its last one, `recent` the last that were trained, `ranks` the last that tell
    of every rank. `damaged`: where lines begin that are not rows."""

    step: int = 0

    losses: dict[int, float] = field(default_factory=dict)
    validations: dict[int, float] = field(default_factory=dict)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))
    ranks: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_RECENT_RANKS))
    damaged: set[int] = field(default_factory=set)

    def add(self, row: dict[str, Any]) -> None:
        """A row replaces one of the same step: the last row is written again when a validation follows."""
        for kept in (self.recent, self.ranks):
            if kept and kept[-1]["step"] == row["step"]:
                kept.pop()
        self.step = int(row["step"])
        if "validation_loss" in row:
            self.validations[row["step"]] = row["validation_loss"]
        if "loss" not in row:
            # Left out, or no number.
            return
        self.recent.append(row)
        self.losses[row["step"]] = row["loss"]
        if "memory_bytes" in row.get("ranks", ()):
            self.ranks.append(row)


class Follower:
    """`poll` takes in what was written since the last time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen = Followed()
        # Where the last complete line begins, and which file it was.
        self._last_line = 0
        self._file = -1

    def poll(self) -> Followed:
        if not self.path.exists():
            return self.seen
        with self.path.open("rb") as file:
            status = self.path.stat()
            if status.st_ino != self._file or status.st_size < self._last_line:
                # Another run in the same folder, or the same one resumed from an earlier step.
                self.seen, self._last_line, self._file = Followed(), 0, status.st_ino
            file.seek(self._last_line)
            begins = self._last_line
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._take(line, begins)
                # The last line is read again the next time: it may have been written anew by then.
                self._last_line, begins = begins, begins + len(line)
        return self.seen

    def _take(self, line: bytes, begins: int) -> None:
        row = parse_row(line)
        # A view needs to know how long a step took.
        if row is None or ("loss" in row and "seconds" not in row):
            self.seen.damaged.add(begins)
            return
        self.seen.damaged.discard(begins)
        self.seen.add(row)
