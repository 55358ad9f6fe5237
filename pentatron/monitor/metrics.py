"""`metrics.jsonl`: one JSON object a step, flushed, so that a reader or a crash never meets half a line."""

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pentatron.files import numbered, rename, write_file
from pentatron.monitor.recorder import AppendedFile, Recorder
from pentatron.monitor.report import StepReport
from pentatron.text import parse_json

# Fields that are numbers wherever they are: readers compute with them.
_NUMBERS = frozenset(
    {
        *(
            "loss",
            "validation_loss",
            "test_loss",
            "learning_rate",
            "gradient_norm",
            "loss_scale",
            "tokens",
            "consumed_samples",
        ),
        *("seconds", "tokens_per_second", "global_batch_size", "teraflops_per_device", "memory_bytes"),
    }
)
# No number of a run is larger; sums and powers of such numbers are finite in double precision.
_LARGEST = 1e39
_LARGEST_STEP = 2**53


class Metrics(list[dict[str, Any]]):
    """The rows of a metrics file. `damaged`: how many lines are not rows."""

    damaged = 0


def damaged_lines(count: int) -> str:
    return f"metrics.jsonl: {count} line{' is' if count == 1 else 's are'} damaged and {'was' if count == 1 else 'were'} skipped"


class MetricsFile(Recorder):
    name = "metrics.jsonl"

    def __init__(
        self, path: Path, resumed_step: int, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        """Steps after the resumed one were lost with the interrupted run and are computed again: their lines go."""
        rows = read_metrics(path)
        if rows.damaged:
            kept_as = numbered(path, ".damaged-")
            rename(path, kept_as)
            tell(f"note: {damaged_lines(rows.damaged)}; the file as it was is {kept_as.name}")
        write_file(path, "".join(_line(row) for row in rows if row["step"] <= resumed_step).encode())
        self._file = AppendedFile(path, tell)
        # The last row and where it begins: what is known of its step later is added to it.
        self._last: dict[str, Any] = {}
        self._last_at = 0

    def record(self, report: StepReport, validation: float | None) -> None:
        row = metrics_row(report)
        self.write(row if validation is None else {**row, "validation_loss": validation})

    def left_out(self, step: int, consumed_samples: int) -> None:
        self.write({"step": step, "left_out": True, "consumed_samples": consumed_samples})

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        """A validation in the middle of the run, at the same step, has been told already and stays."""
        if self._last.get("step") != step:
            return
        row = {**{f"{name}_loss": loss for name, loss in losses.items()}, **self._last}
        self.write(row, instead_of=self._last_at)

    def write(self, row: Mapping[str, Any], instead_of: int | None = None) -> None:
        self._last_at = self._file.write(_line(row), instead_of)
        self._last = dict(row)

    def close(self) -> None:
        self._file.close()


def metrics_row(report: StepReport) -> dict[str, Any]:
    return {
        "step": report.step,
        "loss": report.loss,
        "learning_rate": report.learning_rate,
        "gradient_norm": report.gradient_norm,
        "tokens": report.tokens,
        "consumed_samples": report.consumed_samples,
        "seconds": round(report.seconds, 6),
        "tokens_per_second": round(report.tokens_per_second, 1),
        "global_batch_size": report.global_batch_size,
        "teraflops_per_device": round(report.teraflops_per_device, 6),
        "memory_bytes": report.memory_bytes,
        **({"loss_scale": report.loss_scale} if report.loss_scale != 1.0 else {}),
        **({"skipped": True} if report.is_skipped else {}),
        **({"reported": dict(report.reported)} if report.reported else {}),
        **({} if report.experts is None else report.experts.as_metrics()),
        **({} if report.ranks is None else report.ranks.as_metrics()),
    }


def _line(row: Mapping[str, Any]) -> str:
    """JSON has no word for numbers that are none, as the norm of a step that overflowed: they are left out."""
    said = {name: v for name, v in row.items() if not isinstance(v, float) or math.isfinite(v)}
    return json.dumps(said) + "\n"


def read_metrics(path: Path) -> Metrics:
    """The rows of a metrics file; lines that a crash cut short or a disk damaged are left out and counted."""
    rows = Metrics()
    if not path.exists():
        return rows
    with path.open("rb") as file:
        for line in file:
            row = parse_row(line)
            if row is None:
                rows.damaged += 1
            else:
                rows.append(row)
    return rows


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The row of a line; None: it is damaged. What is left has a step, and numbers where readers expect them."""
    try:
        row = parse_json(line.decode())
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    step = row.get("step")
    if type(step) is not int or not 0 <= step < _LARGEST_STEP:
        return None
    if not all(_is_number(value) for name, value in row.items() if name in _NUMBERS):
        return None
    return row if _are_of_ranks(row.get("ranks", {})) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _are_of_ranks(found: object) -> bool:
    """Lists of numbers by name, one number for each rank."""
    return isinstance(found, dict) and all(
        isinstance(numbers, list) and numbers and all(map(_is_number, numbers)) for numbers in found.values()
    )


# Reads a metrics file while it grows: only what is new, and only what a view needs of it.


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
