"""`progress.txt`: what became of a job over its restarts, one line an event."""

import io
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from pentatron.files import sync
from pentatron.monitor.recorder import Recorder
from pentatron.monitor.report import StepReport
from pentatron.text import one_line, redacted

_TIME = "%Y-%m-%d %H:%M:%S"
STARTED, _SAVED = "Starting job", "Saved checkpoint"


def append_event(path: Path, job_id: str, devices: int, *words: str, now: datetime | None = None) -> None:
    """As Megatron writes it, where readers take words by their place: a job without a number has an empty one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (
        f"{now or datetime.now():{_TIME}}",
        f"Job ID: {one_line(redacted(job_id))}",
        f"# GPUs: {devices}",
        *map(redacted, words),
    )
    with path.open("ab+") as file:
        # A line that a crash cut short must not swallow this one.
        file.seek(max(0, file.seek(0, io.SEEK_END) - 1))
        begin = "" if file.read(1) in (b"", b"\n") else "\n"
        file.write((begin + "\t".join(line) + "\n").encode(errors="backslashreplace"))
        sync(file)


class ProgressFile(Recorder):
    name = "progress.txt"

    def __init__(
        self, path: Path, job_id: str, devices: int, flops_before: float, tokens_before: int = 0
    ) -> None:
        """`flops_before` and `tokens_before` are those of the run until the step this job goes on from."""
        self.path, self.job_id, self.devices = path, job_id, devices
        self._seconds_before = earlier_seconds(path)
        self._flops_before, self._flops = flops_before, 0.0
        self._tokens = tokens_before
        self._began = datetime.now()
        self._write(self._began, STARTED)

    def record(self, report: StepReport, validation: float | None) -> None:
        self._flops += report.flops
        self._tokens = report.consumed_tokens

    def saved(self, step: int) -> None:
        now = datetime.now()
        seconds = max((now - self._began).total_seconds(), 1e-3)
        total = self._flops_before + self._flops
        self._write(
            now,
            _SAVED,
            f"Iteration: {step}",
            f"Job throughput: {self._rate(self._flops, seconds):.1f} TFLOP/s/GPU",
            f"Cumulative throughput: {self._rate(total, seconds + self._seconds_before):.1f} TFLOP/s/GPU",
            f"Floating-point operations: {total:.2e}",
            f"Tokens (in billions): {self._tokens / 1e9:.2f}",
        )

    def _rate(self, flops: float, seconds: float) -> float:
        return flops / seconds / self.devices / 1e12

    def _write(self, now: datetime, *words: str) -> None:
        append_event(self.path, self.job_id, self.devices, *words, now=now)


def earlier_seconds(path: Path) -> float:
    """From the start of every job in the file to its last checkpoint: what came after that was lost."""
    total, began, last = 0.0, math.inf, -math.inf
    for moment, event in _events(path):
        if event == STARTED:
            total += max(0.0, last - began)
            began, last = moment, -math.inf
        elif event == _SAVED:
            last = moment
    return total + max(0.0, last - began)


def _events(path: Path) -> Iterator[tuple[float, str]]:
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.split("\t")
        try:
            yield datetime.strptime(words[0], _TIME).timestamp(), words[3]
        except (ValueError, IndexError):
            # Cut short by a crash, or somebody's own note.
            continue
