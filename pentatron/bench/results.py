"""Results of a benchmark: measurements of a run, `summary.csv`, and the table on the terminal."""

import csv
import io
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pentatron.bench import plot_results
from pentatron.bench.candidates import Candidate
from pentatron.errors import UserError
from pentatron.files import next_numbered_name, rename, write_file
from pentatron.monitor.metrics import read_metrics
from pentatron.monitor.view import LEAST_UTILISATION, MOST_COMMUNICATION
from pentatron.settings.run_config import RunConfig
from pentatron.text import format_significant, in_mib

COLUMNS = (
    *("layout", "status", "reason", "processes", "data", "tensor", "context", "pipeline", "expert"),
    *("zero_stage", "sequence_parallel", "pipeline_schedule", "micro_batch_size", "micro_batches"),
    *("global_batch_size", "seq_length", "steps", "step_seconds", "samples_per_second", "tokens_per_second"),
    *("memory_mib_per_rank", "memory_mib_of_ranks", "communication_share", "collective_share"),
    *("pipeline_wait_share", "gpu_utilisation", "teraflops_per_process", "mfu", "device", "precision"),
    "command",
)
# Columns that are settings.
_SETTINGS = ("zero_stage", "micro_batch_size", "global_batch_size", "seq_length")
# Digits of the measured columns.
_DIGITS = {
    "step_seconds": 6, "samples_per_second": 3, "tokens_per_second": 1, "communication_share": 4, "collective_share": 4,
    "pipeline_wait_share": 4, "gpu_utilisation": 1, "teraflops_per_process": 6, "mfu": 4,
}  # fmt: skip
Status = Literal["ok", "failed", "refused", "not run"]
_MIB = 2**20


@dataclass(frozen=True)
class Measured:
    """Measurements of a run: rates of the median step, and shares of the time of all ranks (None: unknown).

    `collective_share`: time in collectives that no computation overlapped. `pipeline_wait_share`: waiting for
    pipeline messages, which includes the bubble.
    """

    step_seconds: float
    samples_per_second: float
    tokens_per_second: float
    memory_bytes: Sequence[int]
    collective_share: float | None
    pipeline_wait_share: float | None
    gpu_utilisation: float | None
    steps: int

    @property
    def communication_share(self) -> float | None:
        if self.collective_share is None or self.pipeline_wait_share is None:
            return None
        return self.collective_share + self.pipeline_wait_share


def measure(metrics: Path, warmup: int, batch: int) -> Measured:
    """Reads the measurements from metrics, without the first `warmup` steps. `batch`: samples per step."""
    rows = [row for row in read_metrics(metrics) if row["step"] > warmup and "seconds" in row]
    if not rows:
        raise UserError(f"{metrics} has no step after the {warmup} of the warm-up")
    seconds = statistics.median(row["seconds"] for row in rows)
    tokens = statistics.median(row["tokens"] for row in rows)
    ranks = [row["ranks"] for row in rows if "ranks" in row]

    def total(name: str) -> float:
        return sum(sum(r.get(name, ())) for r in ranks)

    busy, collectives, messages = map(total, ("busy_seconds", "collective_seconds", "message_seconds"))
    # Without timers of the computation the shares are unknown.
    whole = busy + collectives + messages if any("busy_seconds" in r for r in ranks) else 0.0
    percentages = [p for r in ranks for p in r.get("gpu_utilisation", ())]
    return Measured(
        step_seconds=seconds,
        samples_per_second=batch / seconds,
        tokens_per_second=tokens / seconds,
        memory_bytes=[max(of_rank) for of_rank in zip(*(r["memory_bytes"] for r in ranks))],
        collective_share=collectives / whole if whole else None,
        pipeline_wait_share=messages / whole if whole else None,
        gpu_utilisation=statistics.mean(percentages) if percentages else None,
        steps=len(rows),
    )


@dataclass(frozen=True)
class Row:
    """The result of one layout. `config` is None if the rules refused it, `measured` if it did not finish."""

    candidate: Candidate
    status: Status
    processes: int
    command: str
    reason: str = ""
    config: RunConfig | None = None
    measured: Measured | None = None
    teraflops: float | None = None
    mfu: float | None = None
    device: str = ""

    def cells(self) -> dict[str, Any]:
        """Returns the values by column, without those that are unknown."""
        layout, config, m = self.candidate, self.config, self.measured
        cells: dict[str, Any] = {
            **{name: getattr(self, name) for name in ("status", "reason", "processes", "command")},
            **{axis: getattr(layout, axis) for axis in ("data", "tensor", "context", "pipeline", "expert")},
            "layout": layout.name,
        }
        if config is not None:
            cells |= {
                **{name: getattr(config.settings, name) for name in _SETTINGS},
                "sequence_parallel": int(config.parallel.sequence_parallel),
                "pipeline_schedule": config.parallel.pipeline_schedule if config.grid.pipeline > 1 else None,
                "micro_batches": config.accumulation,
                "precision": config.precision.name,
            }
        if m is not None:
            memory = [round(size / _MIB, 1) for size in m.memory_bytes]
            numbers = {name: getattr(m, name) for name in _DIGITS if hasattr(m, name)}
            numbers |= {"teraflops_per_process": self.teraflops, "mfu": self.mfu}
            cells |= {n: round(value, _DIGITS[n]) for n, value in numbers.items() if value is not None}
            cells |= {"memory_mib_per_rank": max(memory), "memory_mib_of_ranks": " ".join(map(str, memory))}
            cells |= {"steps": m.steps, "device": self.device}
        return {name: value for name, value in cells.items() if value is not None}


def write_summary(file: Path, rows: Sequence[Row]) -> None:
    """Writes `summary.csv`.

    It is rewritten after every layout, so that an aborted sweep keeps its results.
    """
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.cells() for row in rows)
    write_file(file, out.getvalue().encode())


# Columns of the table beside the layout, with their widths; `GPU` only on GPUs.
_TABLE = {
    "samples/s": 9, "tokens/s": 9, "step": 8, "MiB/rank": 8, "comm.": 6, "GPU": 5, "TFLOP/s": 8, "MFU": 6,
}  # fmt: skip


class Table:
    """Formats rows for the terminal one by one; the column width follows from the names of all layouts."""

    def __init__(self, names: Sequence[str], on_gpu: bool) -> None:
        self.width = max([len("layout"), *map(len, names)])
        self.columns = {name: width for name, width in _TABLE.items() if on_gpu or name != "GPU"}

    def header(self) -> str:
        return self._joined("layout", {name: name for name in _TABLE})

    def line(self, row: Row) -> str:
        name, m = row.candidate.name, row.measured
        if m is None:
            return f"{name:<{self.width}}  {row.status}: {row.reason}"
        seconds = m.step_seconds
        cells = {
            "samples/s": f"{m.samples_per_second:,.1f}",
            "tokens/s": f"{m.tokens_per_second:,.0f}",
            "step": f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s",
            "MiB/rank": in_mib(max(m.memory_bytes)),
            "comm.": _percent(m.communication_share),
            "GPU": "-" if m.gpu_utilisation is None else f"{m.gpu_utilisation:.0f}%",
            "TFLOP/s": "-" if row.teraflops is None else format_significant(row.teraflops),
            "MFU": _percent(row.mfu),
        }
        return self._joined(name, cells)

    def _joined(self, name: str, cells: Mapping[str, str]) -> str:
        return "  ".join([f"{name:<{self.width}}", *(f"{cells[n]:>{w}}" for n, w in self.columns.items())])


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def summary_lines(rows: Sequence[Row]) -> list[str]:
    """Summarizes the results: the fastest and the leanest layout, communication and GPU utilisation."""
    finished = [(row, row.measured) for row in rows if row.measured is not None]
    if not finished:
        return ["no layout completed"]
    fastest, speed = max(finished, key=lambda pair: pair[1].tokens_per_second)
    leanest, memory = min(finished, key=lambda pair: max(pair[1].memory_bytes))
    lines = [
        f"fastest: {fastest.candidate.name} with {speed.tokens_per_second:,.0f} tokens/s",
        f"least memory: {leanest.candidate.name} with {in_mib(max(memory.memory_bytes))} MiB on its fullest rank",
    ]
    shares = [m.communication_share for _, m in finished if m.communication_share is not None]
    used = [m.gpu_utilisation for _, m in finished if m.gpu_utilisation is not None]
    met = {
        f"communication below {MOST_COMMUNICATION:.0%} of the step": [
            x <= MOST_COMMUNICATION for x in shares
        ],
        f"GPU utilisation above {LEAST_UTILISATION:.0%}": [p / 100 > LEAST_UTILISATION for p in used],
    }
    return lines + [f"{aim}, the usual aim: {sum(x)} of {len(x)} layouts" for aim, x in met.items() if x]


@dataclass(frozen=True)
class ResultsFolder:
    """The folder of a benchmark's results."""

    path: Path

    @property
    def summary(self) -> Path:
        return self.path / "summary.csv"

    def run(self, layout: str) -> Path:
        """Returns the run folder of a layout."""
        return self.path / "runs" / layout.replace(" ", "-")

    def metrics(self, layout: str) -> Path:
        return self.run(layout) / "metrics.jsonl"

    def output(self, layout: str) -> Path:
        """Returns the folder for stdout and stderr of the processes of a layout."""
        return self.path / "output" / layout.replace(" ", "-")

    def open(self) -> Path | None:
        """Creates the folder; returns where an existing one was moved to."""
        moved = None
        try:
            if self.path.is_dir() and any(self.path.iterdir()):
                if not self.summary.exists() and not (self.path / "plot_results.py").exists():
                    kept = "contains files that are not a benchmark's, so it is not moved aside"
                    raise UserError(f"{self.path} {kept}; choose another folder with --out")
                path = self.path.resolve()
                moved = next_numbered_name(path, ".")
                rename(path, moved)
            self.path.mkdir(parents=True, exist_ok=True)
            # Copied, so that the results can be drawn on a machine without this package.
            shutil.copyfile(plot_results.__file__, self.path / "plot_results.py")
        except OSError as error:
            problem = f"the folder {self.path} cannot be used for results ({error.strerror})"
            raise UserError(f"{problem}; choose another with --out") from None
        return moved
