"""The performance summary: what a run reached, in a file for later analysis."""

import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pentatron.files import write_file
from pentatron.monitor.recorder import Recorder
from pentatron.monitor.report import StepReport

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
