"""Writes and reads `metrics.jsonl`: one JSON object per step, flushed after each."""

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pentatron.files import next_numbered_name, rename, write_file
from pentatron.monitor.recorder import AppendedFile, Recorder
from pentatron.monitor.report import StepReport
from pentatron.text import parse_json

# Fields of a report in a row, in their order, and the digits of those that are rounded.
_ROW = (
    "step loss learning_rate gradient_norm tokens consumed_samples seconds tokens_per_second "
    "global_batch_size teraflops_per_device memory_bytes".split()
)
_DIGITS = {"seconds": 6, "tokens_per_second": 1, "teraflops_per_device": 6}
# Fields that must be numbers, as readers compute with them.
_NUMBERS = {*_ROW, "validation_loss", "test_loss", "loss_scale"}
# Limit of values: beyond any run, and small enough that sums and squares are finite in double precision.
_LARGEST = 1e39
_LARGEST_STEP = 2**53


class Metrics(list[dict[str, Any]]):
    """The rows of a metrics file. `damaged`: number of invalid lines."""

    damaged = 0


def damaged_lines(count: int) -> str:
    return f"metrics.jsonl: {count} line{' is' if count == 1 else 's are'} damaged and {'was' if count == 1 else 'were'} skipped"


class MetricsFile(Recorder):
    """Appends a row per step to `metrics.jsonl`."""

    name = "metrics.jsonl"

    def __init__(self, path: Path, resumed_step: int, tell: Callable[[str], None] = lambda _: None) -> None:
        """Removes rows after the resumed step.

        They were lost with the interrupted run and are computed again.
        """
        rows = read_metrics(path)
        if rows.damaged:
            backup = next_numbered_name(path, ".damaged-")
            rename(path, backup)
            tell(f"note: {damaged_lines(rows.damaged)}; the original file is {backup.name}")
        write_file(path, "".join(_line(row) for row in rows if row["step"] <= resumed_step).encode())
        self._file = AppendedFile(path, tell)
        # The last row and its offset: results that are known later are added to it.
        self._last: dict[str, Any] = {}
        self._last_offset = 0

    def record(self, report: StepReport, validation: float | None) -> None:
        self.write(metrics_row(report) | ({} if validation is None else {"validation_loss": validation}))

    def left_out(self, step: int, consumed_samples: int) -> None:
        self.write({"step": step, "left_out": True, "consumed_samples": consumed_samples})

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        """Adds the losses of the final evaluation to the row of its step. Values already there are kept."""
        if self._last.get("step") != step:
            return
        row = {**{f"{name}_loss": loss for name, loss in losses.items()}, **self._last}
        self.write(row, instead_of=self._last_offset)

    def write(self, row: Mapping[str, Any], instead_of: int | None = None) -> None:
        self._last_offset = self._file.write(_line(row), instead_of)
        self._last = dict(row)

    def close(self) -> None:
        self._file.close()


def metrics_row(report: StepReport) -> dict[str, Any]:
    return {
        **{name: getattr(report, name) for name in _ROW},
        **{name: round(getattr(report, name), digits) for name, digits in _DIGITS.items()},
        **({"loss_scale": report.loss_scale} if report.loss_scale != 1.0 else {}),
        **({"skipped": True} if report.is_skipped else {}),
        **({"reported": dict(report.reported)} if report.reported else {}),
        **({} if report.experts is None else report.experts.as_metrics()),
        **({} if report.ranks is None else report.ranks.as_metrics()),
    }


def _line(row: Mapping[str, Any]) -> str:
    """Returns a row as a JSON line, without NaN and inf, which JSON cannot represent."""
    finite = {name: v for name, v in row.items() if not isinstance(v, float) or math.isfinite(v)}
    return json.dumps(finite) + "\n"


def read_metrics(path: Path) -> Metrics:
    """Reads a metrics file. Invalid lines, from a crash or disk damage, are skipped and counted."""
    if not path.exists():
        return Metrics()
    with path.open("rb") as file:
        parsed = [parse_row(line) for line in file]
    rows = Metrics(row for row in parsed if row is not None)
    rows.damaged = parsed.count(None)
    return rows


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Parses a line; None if it is invalid. A valid row has a step, and numbers where readers expect them."""
    try:
        row = parse_json(line.decode())
    except ValueError:
        return None
    step = row.get("step") if isinstance(row, dict) else None
    if type(step) is not int or not 0 <= step < _LARGEST_STEP:
        return None
    is_valid = all(_is_number(value) for name, value in row.items() if name in _NUMBERS)
    return row if is_valid and _is_per_rank(row.get("ranks", {})) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _is_per_rank(value: object) -> bool:
    """Whether this is a dictionary of non-empty lists of numbers, one per rank."""
    lists = value.values() if isinstance(value, dict) else [None]
    return all(isinstance(numbers, list) and numbers and all(map(_is_number, numbers)) for numbers in lists)


# --- following a growing metrics file ---


_RECENT_STEPS = 20
_RECENT_RANKS = 5


@dataclass
class RunMetrics:
    """Metrics of a run so far.

    `step`: last step. `recent`: last trained steps. `ranks`: last rows with values of all ranks. `damaged`:
    offsets of invalid lines.
    """

    step: int = 0
    losses: dict[int, float] = field(default_factory=dict)
    validations: dict[int, float] = field(default_factory=dict)
    recent: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))
    ranks: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_RECENT_RANKS))
    damaged: set[int] = field(default_factory=set)

    def add(self, row: dict[str, Any]) -> None:
        """Adds a row, replacing one of the same step: an evaluation rewrites the last row."""
        self.step = row["step"]
        for rows in (self.recent, self.ranks):
            if rows and rows[-1]["step"] == self.step:
                rows.pop()
        if "validation_loss" in row:
            self.validations[self.step] = row["validation_loss"]
        # Without a loss, the step was skipped, or its loss is NaN or inf.
        if "loss" in row:
            self.recent.append(row)
            self.losses[self.step] = row["loss"]
            if "memory_bytes" in row.get("ranks", ()):
                self.ranks.append(row)


class MetricsFollower:
    """Reads rows appended to a metrics file since the last `poll`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen = RunMetrics()
        # Offset of the last complete line, and the inode of the file.
        self._last_offset = 0
        self._inode = -1

    def poll(self) -> RunMetrics:
        if not self.path.exists():
            return self.seen
        with self.path.open("rb") as file:
            status = self.path.stat()
            if status.st_ino != self._inode or status.st_size < self._last_offset:
                # Another run in the folder, or this run resumed from an earlier step.
                self.seen, self._last_offset, self._inode = RunMetrics(), 0, status.st_ino
            file.seek(self._last_offset)
            offset = self._last_offset
            for line in file:
                if not line.endswith(b"\n"):
                    break
                row = parse_row(line)
                # The view needs the duration of trained steps.
                if row is None or ("loss" in row and "seconds" not in row):
                    self.seen.damaged.add(offset)
                else:
                    self.seen.damaged.discard(offset)
                    self.seen.add(row)
                # The last line is read again next time, as it may have been rewritten.
                self._last_offset, offset = offset, offset + len(line)
        return self.seen
