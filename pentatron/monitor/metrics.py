"""`metrics.jsonl`: one JSON object a step, flushed, so that a reader or a crash never meets half a line."""

import io
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pentatron.config.parsing import parse_json
from pentatron.monitor.recorder import Recorder
from pentatron.monitor.report import StepReport


class MetricsFile(Recorder):
    name = "metrics.jsonl"

    def __init__(self, path: Path, resumed_step: int) -> None:
        """Steps after the resumed one were lost with the interrupted run and are computed again: their lines go."""
        kept = [row for row in read_metrics(path) if row["step"] <= resumed_step]
        replacement = path.with_name(f".{path.name}.new")
        replacement.write_text("".join(_line(row) for row in kept), encoding="utf-8")
        replacement.replace(path)
        self._file = path.open("a", encoding="utf-8")
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
        self._file.truncate(self._last_at)
        self.write(row)

    def write(self, row: Mapping[str, Any]) -> None:
        self._last, self._last_at = dict(row), self._file.seek(0, io.SEEK_END)
        self._file.write(_line(row))
        self._file.flush()

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


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a metrics file; a line cut short by a crash is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield parse_json(line)
            except ValueError:
                continue
