"""What the metrics of a finished run say about its layout."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.errors import UserError
from pentatron.monitor.metrics import read_metrics


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
