"""What keeps the numbers of a run: a file, a viewer's folder, a service."""

import io
import json
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from pentatron.files import sync, write_file
from pentatron.monitor.report import StepReport
from pentatron.text import one_line, redacted


class RecorderDown(Exception):
    """It cannot record, for a reason that is not the user's mistake and may pass."""


class Recorder:
    # What a message calls it.
    name = "a recorder"

    def record(self, report: StepReport, validation: float | None) -> None:
        """After every step; `validation` is the loss of the evaluation that followed it, if one did."""

    def left_out(self, step: int, consumed_samples: int) -> None:
        """In place of `record`, for a step that was not trained (--iterations-to-skip)."""

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        """After the last step: the losses on the `validation` and the `test` set, as far as there are any."""

    def saved(self, step: int) -> None:
        """After every checkpoint."""

    def close(self) -> None:
        """At the end of the run, also of one that failed."""


class AppendedFile:
    """A file that lines are added to for as long as the run lasts.

    One that was deleted or replaced meanwhile is made again, and `tell` gets a line: without that, lines would go to an inode without
    a name.
    """

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self.path, self._tell = path, tell
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")

    def write(self, text: str, instead_of: int | None = None) -> int:
        """Adds a text and flushes it; returns where it begins. What lies from `instead_of` on is removed first."""
        made_again = not self._is_there()
        if made_again:
            self._file.close()
            self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        elif instead_of is not None:
            self._file.truncate(instead_of)
        place = self._file.seek(0, io.SEEK_END)
        self._file.write(text)
        self._file.flush()
        if made_again:
            self._tell(
                f"note: {self.path} was deleted or replaced during the run; it was made again, and has what comes from here on"
            )
        return place

    def close(self) -> None:
        self._file.close()

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False
        except ValueError:
            # Closed, as it could not be opened again.
            return False


# Recorders that are not the run's own may fail: a full disk or a service that is down is no reason to stop
# training.


class Lenient(Recorder):
    """Around such a recorder. Its first failure is told, and from then on it is left alone."""

    def __init__(self, name: str, make: Callable[[], Recorder], tell: Callable[[str], None]) -> None:
        self.name, self.tell = name, tell
        self._recorder: Recorder | None = None

        def start() -> None:
            self._recorder = make()

        self._try(start)

    def record(self, report: StepReport, validation: float | None) -> None:
        if self._recorder is not None:
            recorder = self._recorder
            self._try(lambda: recorder.record(report, validation))

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        if self._recorder is not None:
            recorder = self._recorder
            self._try(lambda: recorder.evaluated(step, losses))

    def saved(self, step: int) -> None:
        if self._recorder is not None:
            recorder = self._recorder
            self._try(lambda: recorder.saved(step))

    def close(self) -> None:
        if self._recorder is not None:
            self._try(self._recorder.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (OSError, RecorderDown) as error:
            self._recorder = None
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            self.tell(f"warning: {self.name} fails ({reason}); training goes on without it")


# The performance summary: what a run reached, in a file for later analysis.


# Kernels are chosen, compiled and memory is claimed in the first steps.
_WARM_UP = 2


class PerformanceSummary(Recorder):
    name = "performance_summary.json"

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """`about`: what ran where."""
        self.path, self.about = path, about
        self._seconds: list[float] = []
        self._tokens = self._samples = 0
        self._flops = 0.0
        self._seen = 0
        self._first: StepReport | None = None
        self._last: StepReport | None = None

    def record(self, report: StepReport, validation: float | None) -> None:
        self._seen += 1
        self._first, self._last = self._first or report, report
        if self._seen <= _WARM_UP:
            return
        self._seconds.append(report.seconds)
        self._tokens += report.tokens
        self._samples += report.global_batch_size
        self._flops += report.flops

    def close(self) -> None:
        if self._first is None or self._last is None:
            return
        write_file(self.path, f"{json.dumps(self.summary(), indent=2)}\n".encode())

    def summary(self) -> dict[str, Any]:
        assert self._first is not None and self._last is not None
        found = {
            **self.about,
            "steps": self._seen,
            "first_step": self._first.step,
            "last_step": self._last.step,
            "first_loss": _sound(self._first.loss),
            "last_loss": _sound(self._last.loss),
            "first_step_seconds": round(self._first.seconds, 6),
            "peak_memory_bytes": self._last.memory_bytes,
        }
        if not self._seconds:
            return {**found, "measured_steps": 0, "remark": f"the first {_WARM_UP} steps are not measured"}
        total = sum(self._seconds)
        ordered = sorted(self._seconds)
        teraflops = self._flops / total / self._last.devices / 1e12
        peak = self._last.peak_teraflops
        return {
            **found,
            "measured_steps": len(self._seconds),
            "step_seconds": {
                "mean": round(total / len(ordered), 6),
                "median": round(statistics.median(ordered), 6),
                "fastest": round(ordered[0], 6),
                "slowest": round(ordered[-1], 6),
            },
            "samples_per_second": round(self._samples / total, 3),
            "tokens_per_second": round(self._tokens / total, 1),
            "tokens_per_second_per_device": round(self._tokens / total / self._last.devices, 1),
            "teraflops_per_device": round(teraflops, 4),
            "model_flops_utilisation": round(teraflops / peak, 4) if peak else None,
            "peak_teraflops_per_device": peak,
        }


def _sound(loss: float) -> float | None:
    """JSON has no word for a number that is none."""
    return loss if math.isfinite(loss) else None


# `progress.txt`: what became of a job over its restarts, one line an event.


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
