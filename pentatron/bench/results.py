"""The rows of a sweep: `summary.csv`, and the table on the terminal."""

import csv
import io
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pentatron.bench import plot_results
from pentatron.bench.candidates import Candidate
from pentatron.errors import UserError
from pentatron.files import numbered, rename, write_file
from pentatron.monitor.metrics import read_metrics
from pentatron.monitor.view import LEAST_UTILISATION, MOST_COMMUNICATION
from pentatron.settings.run import RunConfig
from pentatron.text import in_digits, in_mib

# What the metrics of a finished run say about its layout.


@dataclass(frozen=True)
class Measured:
    """Rates are of the median step. Shares are of the seconds of all ranks; None: not measured.

    `collective_share`: standing still in collectives that no computation hid; `message_share`: waiting for messages of a
    pipeline, which includes its bubble.
    """

    step_seconds: float
    samples_per_second: float
    tokens_per_second: float
    memory_bytes: Sequence[int]
    collective_share: float | None
    message_share: float | None
    utilisation: float | None
    steps: int

    @property
    def communication_share(self) -> float | None:
        if self.collective_share is None or self.message_share is None:
            return None
        return self.collective_share + self.message_share


def measure(metrics: Path, warmup: int, batch: int) -> Measured:
    """From the steps after the first `warmup`."""
    rows = [row for row in read_metrics(metrics) if row["step"] > warmup and "seconds" in row]
    if not rows:
        raise UserError(f"{metrics} has no step after the {warmup} of the warm-up")
    seconds = statistics.median(row["seconds"] for row in rows)
    tokens = statistics.median(row["tokens"] for row in rows)
    ranks = [row["ranks"] for row in rows if "ranks" in row]
    busy = _total(ranks, "busy_seconds")
    collectives, messages = _total(ranks, "collective_seconds"), _total(ranks, "message_seconds")
    # Seconds that do not add up to anything would be a share of nothing.
    whole = busy + collectives + messages if any("busy_seconds" in r for r in ranks) else 0.0
    percentages = [p for r in ranks for p in r.get("gpu_utilisation", ())]
    return Measured(
        step_seconds=seconds,
        samples_per_second=batch / seconds,
        tokens_per_second=tokens / seconds,
        memory_bytes=[max(of_rank) for of_rank in zip(*(r["memory_bytes"] for r in ranks))],
        collective_share=collectives / whole if whole else None,
        message_share=messages / whole if whole else None,
        utilisation=statistics.mean(percentages) if percentages else None,
        steps=len(rows),
    )


def _total(ranks: Sequence[dict[str, Any]], name: str) -> float:
    return sum(sum(r.get(name, ())) for r in ranks)


Status = Literal["ok", "failed", "refused", "not run"]

COLUMNS = (
    *("layout", "status", "reason", "processes", "data", "tensor", "context", "pipeline", "expert"),
    *("zero_stage", "sequence_parallel", "pipeline_schedule", "micro_batch_size", "micro_batches"),
    *("global_batch_size", "seq_length", "steps", "step_seconds", "samples_per_second", "tokens_per_second"),
    *("memory_mib_per_rank", "memory_mib_of_ranks", "communication_share", "collective_share"),
    *(
        "pipeline_wait_share",
        "gpu_utilisation",
        "teraflops_per_process",
        "mfu",
        "device",
        "precision",
        "command",
    ),
)
_MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One layout. `config` is there unless the rules refused it, `measured` if it ran to its end."""

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
        """By column; what is not known is left out."""
        c = self.candidate
        found: dict[str, Any] = {
            "layout": c.name,
            "status": self.status,
            "reason": self.reason,
            "processes": self.processes,
            "data": c.data,
            "tensor": c.tensor,
            "context": c.context,
            "pipeline": c.pipeline,
            "expert": c.expert,
            "command": self.command,
        }
        if self.config is not None:
            found |= _settings(self.config)
        if self.measured is not None:
            found |= _numbers(self.measured) | {
                "teraflops_per_process": _rounded(self.teraflops, 6),
                "mfu": _rounded(self.mfu, 4),
                "device": self.device,
            }
        return {name: value for name, value in found.items() if value is not None}


def _settings(config: RunConfig) -> dict[str, Any]:
    return {
        "zero_stage": config.parallel.zero_stage,
        "sequence_parallel": int(config.parallel.sequence_parallel),
        "pipeline_schedule": config.parallel.pipeline_schedule if config.grid.pipeline > 1 else None,
        "micro_batch_size": config.train.micro_batch_size,
        "micro_batches": config.accumulation,
        "global_batch_size": config.train.global_batch_size,
        "seq_length": config.model.seq_length,
        "precision": config.precision.name,
    }


def _numbers(measured: Measured) -> dict[str, Any]:
    memory = [round(size / _MIB, 1) for size in measured.memory_bytes]
    return {
        "steps": measured.steps,
        "step_seconds": round(measured.step_seconds, 6),
        "samples_per_second": round(measured.samples_per_second, 3),
        "tokens_per_second": round(measured.tokens_per_second, 1),
        "memory_mib_per_rank": max(memory),
        "memory_mib_of_ranks": " ".join(map(str, memory)),
        "communication_share": _rounded(measured.communication_share, 4),
        "collective_share": _rounded(measured.collective_share, 4),
        "pipeline_wait_share": _rounded(measured.message_share, 4),
        "gpu_utilisation": _rounded(measured.utilisation, 1),
    }


def _rounded(number: float | None, digits: int) -> float | None:
    return None if number is None else round(number, digits)


def write_summary(file: Path, rows: Sequence[Row]) -> None:
    """Written anew after every layout: what was measured is there whatever happens next."""
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.cells() for row in rows)
    write_file(file, out.getvalue().encode())


# --- the table ---


class Table:
    """Rows come one by one, so the width of the first column is settled before."""

    def __init__(self, names: Sequence[str], on_gpu: bool) -> None:
        self.width = max([len("layout"), *map(len, names)])
        self.on_gpu = on_gpu

    def header(self) -> str:
        columns = f"{'layout':<{self.width}}  {'samples/s':>9}  {'tokens/s':>9}  {'step':>8}  {'MiB/rank':>8}  {'comm.':>6}"
        return columns + (f"  {'GPU':>5}" if self.on_gpu else "") + f"  {'TFLOP/s':>8}  {'MFU':>6}"

    def line(self, row: Row) -> str:
        name, m = f"{row.candidate.name:<{self.width}}", row.measured
        if m is None:
            return f"{name}  {row.status}: {row.reason}"
        cells = [
            f"{m.samples_per_second:>9,.1f}",
            f"{m.tokens_per_second:>9,.0f}",
            f"{_seconds(m.step_seconds):>8}",
            f"{in_mib(max(m.memory_bytes), '>8,.0f')}",
            f"{_percent(m.communication_share):>6}",
            *([f"{'-' if m.utilisation is None else f'{m.utilisation:.0f}%':>5}"] if self.on_gpu else []),
            f"{'-' if row.teraflops is None else in_digits(row.teraflops):>8}",
            f"{_percent(row.mfu):>6}",
        ]
        return "  ".join([name, *cells])


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def conclusions(rows: Sequence[Row]) -> list[str]:
    """What to take home from the table."""
    good = [(row, row.measured) for row in rows if row.measured is not None]
    if not good:
        return ["no layout ran to its end"]
    fastest, its = max(good, key=lambda pair: pair[1].tokens_per_second)
    leanest, least = min(good, key=lambda pair: max(pair[1].memory_bytes))
    found = [
        f"fastest: {fastest.candidate.name} with {its.tokens_per_second:,.0f} tokens/s",
        f"least memory: {leanest.candidate.name} with {in_mib(max(least.memory_bytes))} MiB on its fullest rank",
    ]
    shares = [(row, m.communication_share) for row, m in good if m.communication_share is not None]
    above = [row.candidate.name for row, share in shares if share > MOST_COMMUNICATION]
    if shares:
        found.append(
            f"communication below {MOST_COMMUNICATION:.0%} of the step, the usual aim: {len(shares) - len(above)} of "
            f"{len(shares)} layouts"
        )
    used = [m.utilisation for _, m in good if m.utilisation is not None]
    if used:
        enough = sum(percent / 100 > LEAST_UTILISATION for percent in used)
        found.append(
            f"GPU utilisation above {LEAST_UTILISATION:.0%}, the usual aim: {enough} of {len(used)} layouts"
        )
    return found


# The folder of a sweep's results; that of an earlier sweep is kept.


@dataclass(frozen=True)
class ResultsFolder:
    path: Path

    @property
    def summary(self) -> Path:
        return self.path / "summary.csv"

    def run(self, layout: str) -> Path:
        """Where a layout trains: its settings, log and metrics."""
        return self.path / "runs" / layout.replace(" ", "-")

    def output(self, layout: str) -> Path:
        """What its processes said."""
        return self.path / "output" / layout.replace(" ", "-")

    def open(self) -> Path | None:
        """Makes the folder; returns where an earlier one went."""
        moved = None
        try:
            if self.path.is_dir() and any(self.path.iterdir()):
                moved = self._move_aside()
            self.path.mkdir(parents=True, exist_ok=True)
            # Beside the results, so that they can be drawn where this package is not installed.
            shutil.copyfile(plot_results.__file__, self.path / "plot_results.py")
        except OSError as error:
            raise UserError(
                f"the folder {self.path} cannot be used for results ({error.strerror}); name another with --out"
            ) from None
        return moved

    def _move_aside(self) -> Path:
        if not self.summary.exists() and not (self.path / "plot_results.py").exists():
            raise UserError(
                f"{self.path} holds other files than a benchmark's, so it is not moved aside; name another folder with --out"
            )
        whole = self.path.resolve()
        aside = numbered(whole, ".")
        rename(whole, aside)
        return aside
