"""Recorders of a run's metrics: interface, wrapper for failures, performance summary, `progress.txt`."""

import io
import json
import math
import os
import statistics
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from pentatron.files import fsync, write_file
from pentatron.monitor.report import StepReport
from pentatron.text import one_line, redact


class RecorderUnavailable(Exception):
    """A recorder cannot record, for a reason that is not a mistake of the user and may be temporary."""


class Recorder:
    """Interface of recorders. The base class records nothing."""

    # Name in messages.
    name = "a recorder"

    def record(self, report: StepReport, validation: float | None) -> None:
        """Called after every step. `validation` is the loss of an evaluation after the step, if any."""

    def left_out(self, step: int, consumed_samples: int) -> None:
        """Called instead of `record` for a step that was not trained (--iterations-to-skip)."""

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        """Called after the last step with the losses on the `validation` and `test` sets, if any."""

    def saved(self, step: int) -> None:
        """Called after every checkpoint."""

    def close(self) -> None:
        """Called at the end of the run, even if it failed."""


class AppendedFile:
    """A file that lines are appended to during the run.

    If it was deleted or replaced, it is created again and `tell` gets a message: otherwise lines would go to
    an unlinked inode.
    """

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        self.path, self._tell = path, tell
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")

    def write(self, text: str, instead_of: int | None = None) -> int:
        """Appends text and flushes it; returns its offset. Truncates the file to `instead_of` first."""
        is_recreated = not self._is_same_file()
        if is_recreated:
            self._file.close()
            self._file = self.path.open("a", encoding="utf-8", errors="backslashreplace")
        elif instead_of is not None:
            self._file.truncate(instead_of)
        offset = self._file.seek(0, io.SEEK_END)
        self._file.write(text)
        self._file.flush()
        if is_recreated:
            lost = "it was created again and contains only lines from here on"
            self._tell(f"note: {self.path} was deleted or replaced during the run; {lost}")
        return offset

    def close(self) -> None:
        self._file.close()

    def _is_same_file(self) -> bool:
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        except (FileNotFoundError, ValueError):
            # ValueError: the file is closed, as it could not be opened again.
            return False


# --- recorders that may fail ---


class TolerantRecorder(Recorder):
    """Wraps a recorder whose failure must not stop training: reports the first one, then disables it."""

    def __init__(self, name: str, make: Callable[[], Recorder], tell: Callable[[str], None]) -> None:
        self.name, self.tell = name, tell
        # Does nothing until `make` succeeds.
        self._recorder = Recorder()

        def start() -> None:
            self._recorder = make()

        self._try(start)

    def record(self, report: StepReport, validation: float | None) -> None:
        self._try(lambda: self._recorder.record(report, validation))

    def evaluated(self, step: int, losses: Mapping[str, float]) -> None:
        self._try(lambda: self._recorder.evaluated(step, losses))

    def saved(self, step: int) -> None:
        self._try(lambda: self._recorder.saved(step))

    def close(self) -> None:
        self._try(self._recorder.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (OSError, RecorderUnavailable) as error:
            self._recorder = Recorder()
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            self.tell(f"warning: {self.name} fails ({reason}); training continues without it")


# --- performance summary ---


# Steps that are not measured: they select and compile kernels and allocate memory.
_WARMUP_STEPS = 2


class PerformanceSummary(Recorder):
    """Writes throughput, step times and memory of a run to a JSON file."""

    name = "performance_summary.json"

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        """`about`: fields that describe the run and its hardware."""
        self.path, self.about = path, about
        self._seen = 0
        self._first: StepReport | None = None
        self._last: StepReport | None = None
        # Of every measured step: seconds, tokens, samples and FLOPs.
        self._measured: list[tuple[float, int, int, float]] = []

    def record(self, report: StepReport, validation: float | None) -> None:
        self._seen += 1
        self._first, self._last = self._first or report, report
        if self._seen > _WARMUP_STEPS:
            self._measured.append((report.seconds, report.tokens, report.global_batch_size, report.flops))

    def close(self) -> None:
        if self._first is not None and self._last is not None:
            summary = self._summary(self._first, self._last)
            write_file(self.path, f"{json.dumps(summary, indent=2)}\n".encode())

    def _summary(self, first: StepReport, last: StepReport) -> dict[str, Any]:
        # JSON cannot represent NaN and inf.
        first_loss, last_loss = (loss if math.isfinite(loss) else None for loss in (first.loss, last.loss))
        summary = {**self.about, "steps": self._seen, "first_step": first.step, "last_step": last.step}
        summary |= {"first_loss": first_loss, "last_loss": last_loss}
        summary |= {"first_step_seconds": round(first.seconds, 6), "peak_memory_bytes": last.memory_bytes}
        summary["measured_steps"] = len(self._measured)
        if not self._measured:
            return {**summary, "remark": f"the first {_WARMUP_STEPS} steps are not measured"}
        all_seconds, all_tokens, all_samples, all_flops = zip(*self._measured)
        total, tokens, peak = sum(all_seconds), sum(all_tokens), last.peak_teraflops
        teraflops = sum(all_flops) / total / last.devices / 1e12
        mean, median = total / len(all_seconds), statistics.median(all_seconds)
        seconds = {"mean": mean, "median": median, "fastest": min(all_seconds), "slowest": max(all_seconds)}
        return {
            **summary,
            "step_seconds": {name: round(value, 6) for name, value in seconds.items()},
            "samples_per_second": round(sum(all_samples) / total, 3),
            "tokens_per_second": round(tokens / total, 1),
            "tokens_per_second_per_device": round(tokens / total / last.devices, 1),
            "teraflops_per_device": round(teraflops, 4),
            "model_flops_utilisation": round(teraflops / peak, 4) if peak else None,
            "peak_teraflops_per_device": peak,
        }


# --- `progress.txt`: the events of a job over its restarts, one per line ---


_TIME = "%Y-%m-%d %H:%M:%S"
STARTED, _SAVED = "Starting job", "Saved checkpoint"


def append_event(path: Path, job_id: str, devices: int, *words: str, now: datetime | None = None) -> None:
    """Appends a line in Megatron-LM's format.

    Its readers use positions: a job without a number has an empty one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    job = f"Job ID: {one_line(redact(job_id))}"
    line = (f"{now or datetime.now():{_TIME}}", job, f"# GPUs: {devices}", *map(redact, words))
    with path.open("ab+") as file:
        # Starts a new line if a crash left a partial one.
        file.seek(max(0, file.seek(0, io.SEEK_END) - 1))
        newline = "" if file.read(1) in (b"", b"\n") else "\n"
        file.write((newline + "\t".join(line) + "\n").encode(errors="backslashreplace"))
        fsync(file)


class ProgressFile(Recorder):
    """Writes the start of a job and its checkpoints to `progress.txt`."""

    name = "progress.txt"

    def __init__(
        self, path: Path, job_id: str, devices: int, flops_before: float, tokens_before: int = 0
    ) -> None:
        """`flops_before` and `tokens_before`: of the run up to the step this job resumes from."""
        self.path, self.job_id, self.devices = path, job_id, devices
        self._seconds_before = earlier_seconds(path)
        self._flops_before, self._flops, self._tokens = flops_before, 0.0, tokens_before
        self._start = datetime.now()
        self._write(self._start, STARTED)

    def record(self, report: StepReport, validation: float | None) -> None:
        self._flops += report.flops
        self._tokens = report.consumed_tokens

    def saved(self, step: int) -> None:
        now = datetime.now()
        seconds = max((now - self._start).total_seconds(), 1e-3)
        total = self._flops_before + self._flops
        rate = self._flops / seconds / self.devices / 1e12
        cumulative_rate = total / (seconds + self._seconds_before) / self.devices / 1e12
        self._write(
            now,
            _SAVED,
            f"Iteration: {step}",
            f"Job throughput: {rate:.1f} TFLOP/s/GPU",
            f"Cumulative throughput: {cumulative_rate:.1f} TFLOP/s/GPU",
            f"Floating-point operations: {total:.2e}",
            f"Tokens (in billions): {self._tokens / 1e9:.2f}",
        )

    def _write(self, now: datetime, *words: str) -> None:
        append_event(self.path, self.job_id, self.devices, *words, now=now)


def earlier_seconds(path: Path) -> float:
    """Total time of earlier jobs in the file, each until its last checkpoint: later progress was lost."""
    total, start, last_save = 0.0, math.inf, -math.inf
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.splitlines():
        words = line.split("\t")
        try:
            moment, event = datetime.strptime(words[0], _TIME).timestamp(), words[3]
        except (ValueError, IndexError):
            # A partial line of a crash, or a user's note.
            continue
        if event == STARTED:
            total += max(0.0, last_save - start)
            start, last_save = moment, -math.inf
        elif event == _SAVED:
            last_save = moment
    return total + max(0.0, last_save - start)
