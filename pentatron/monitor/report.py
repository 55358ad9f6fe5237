"""Reports of a step: its metrics, those of all ranks and of experts, and Megatron-LM's log line."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pentatron.text import duration, in_mib

if TYPE_CHECKING:
    import torch

# --- ranks and experts ---


@dataclass(frozen=True)
class RankReport:
    """Times, memory and utilisation of all ranks in one step, in rank order.

    `collectives` and `messages`: seconds spent waiting in collectives and pipeline messages; the rest of the
    step is computation. Empty if not measurable, as is `utilisation`. `pending_messages`: number of pending
    messages of each rank.
    """

    seconds: Sequence[float]
    collectives: Sequence[float]
    messages: Sequence[float]
    memory_bytes: Sequence[int]
    utilisation: Sequence[float]
    pending_messages: Sequence[int] = ()

    def as_metrics(self) -> dict[str, Any]:
        rows = zip(self.seconds, self.collectives, self.messages)
        fields: dict[str, Any] = {
            "busy_seconds": [round(max(0.0, step - c - m), 6) for step, c, m in rows],
            "collective_seconds": [round(s, 6) for s in self.collectives],
            "message_seconds": [round(s, 6) for s in self.messages],
            "memory_bytes": list(self.memory_bytes),
            "gpu_utilisation": list(self.utilisation),
        }
        return {"ranks": {name: numbers for name, numbers in fields.items() if numbers}}


def gpu_utilisation(device: "torch.device") -> float | None:
    """GPU utilisation in percent as reported by the driver, or None if unavailable."""
    if device.type == "cuda":
        # Imported here, as readers of reports do not need torch.
        import torch

        # pynvml may be missing, or the driver not answer; exception types differ between versions.
        with contextlib.suppress(Exception):
            return float(torch.cuda.utilization(device))
    return None


_LARGEST_EXPONENT = 20.0


@dataclass(frozen=True)
class ExpertReport:
    """Load of the experts: of the busiest relative to the mean, number of idle ones, tokens by layer."""

    losses: Mapping[str, float]
    imbalance: float
    idle: int
    by_layer: Mapping[int, Sequence[int]]

    def by_name(self) -> dict[str, float]:
        """Returns the losses under Megatron-LM's names."""
        return {name.replace("aux_loss", "load_balancing_loss"): v for name, v in self.losses.items()}

    def fields(self) -> list[str]:
        return [f"{name}: {value:.2f}" for name, value in self.by_name().items()]

    def as_metrics(self) -> dict[str, Any]:
        by_layer = {str(layer): counts for layer, counts in self.by_layer.items()}
        fields = {"expert_imbalance": round(self.imbalance, 4), "idle_experts": self.idle}
        return {**self.by_name(), **fields, **({"tokens_per_expert": by_layer} if by_layer else {})}


# Prefix of the log line of an error.
ERROR_PREFIX = "error: "


@dataclass(frozen=True)
class StepReport:
    """Metrics of one step."""

    step: int
    total_steps: int
    loss: float
    learning_rate: float
    next_learning_rate: float
    gradient_norm: float
    tokens: int
    consumed_samples: int
    global_batch_size: int
    seconds: float
    memory_bytes: int
    # FLOPs of the step on all devices.
    flops: float
    devices: int
    consumed_tokens: int = 0
    experts: ExpertReport | None = None
    loss_scale: float = 1.0
    # Overflow in half precision: the step had no update.
    is_skipped: bool = False
    is_nan: bool = False
    # Only in measured steps.
    ranks: RankReport | None = None
    # Samples of the run that were not trained on.
    skipped_samples: int = 0
    # Peak TFLOP/s of one device, if known.
    peak_teraflops: float | None = None
    # Further memory metrics of this rank, under their names in TensorBoard.
    memory: Mapping[str, float] = field(default_factory=dict)
    # Metrics returned by a user's loss function.
    reported: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def teraflops_per_device(self) -> float:
        return self.flops / self.seconds / self.devices / 1e12


def progress_line(report: StepReport, eta_seconds: float) -> str:
    """Formats one step for output without a progress bar."""
    losses = f"loss {report.loss:7.4f}  lr {report.learning_rate:.2e}"
    speed = f"{report.tokens_per_second:7.0f} tokens/s  {in_mib(report.memory_bytes, '5.0f')} MiB"
    return f"step {report.step:>5}/{report.total_steps}  {losses}  {speed}  left {duration(eta_seconds)}"


def perplexity(loss: float) -> float:
    """Perplexity of a loss, bounded: for a large loss it has too many digits."""
    return math.exp(min(_LARGEST_EXPONENT, loss))


# --- Megatron-LM's log line ---


class LogLines:
    """Log lines averaged over the steps since the last one.

    The first step gets a line and also counts in the next one.
    """

    def __init__(self, interval: int, throughput: bool) -> None:
        self.interval, self.throughput = interval, throughput
        self._reports: list[StepReport] = []
        self._is_first = True

    def after(self, report: StepReport, now: datetime) -> str | None:
        """Returns the line after this step, or None if none is due."""
        self._reports.append(report)
        due = report.step % self.interval == 0
        line = log_line(self._reports, now, self.throughput) if due or self._is_first else None
        self._is_first = False
        self._reports = [] if due else self._reports
        return line


def log_line(reports: list[StepReport], now: datetime, throughput: bool) -> str:
    """Formats means over the given steps. Our fields come last, so parsers of Megatron-LM's line work."""
    last = reports[-1]
    seconds = sum(r.seconds for r in reports) / len(reports)
    fields = [f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {last.step:8d}/{last.total_steps:8d}"]
    fields.append(f"consumed samples: {last.consumed_samples:12d}")
    fields += [f"skipped samples: {last.skipped_samples:12d}"] if last.skipped_samples else []
    fields.append(f"elapsed time per iteration (ms): {seconds * 1000:.1f}")
    fields += [f"throughput per GPU (TFLOP/s/GPU): {_teraflops(reports):.1f}"] if throughput else []
    fields.append(f"learning rate: {last.next_learning_rate:.6E}")
    fields.append(f"global batch size: {last.global_batch_size:5d}")
    # Skipped steps are excluded: a NaN loss would make the mean NaN.
    updated = [r for r in reports if not r.is_skipped]
    if updated:
        fields += [f"{name}: {value:.6E}" for name, value in _losses(updated).items()]
        fields += last.experts.fields() if last.experts else ()
    fields += [
        f"loss scale: {last.loss_scale:.1f}",
        f"grad norm: {last.gradient_norm:.3f}",
        f"number of skipped iterations: {sum(r.is_skipped for r in reports):3d}",
        f"number of nan iterations: {sum(r.is_nan for r in reports):3d}",
        f"tokens/s: {sum(r.tokens for r in reports) / sum(r.seconds for r in reports):.0f}",
    ]
    if last.peak_teraflops:
        fields.append(f"MFU: {100 * _teraflops(reports) / last.peak_teraflops:.1f} %")
    fields.append(f"memory (MiB): {in_mib(last.memory_bytes, '.0f')}")
    if experts := last.experts:
        fields += [f"busiest expert: {experts.imbalance:.2f} x mean", f"idle experts: {experts.idle}"]
    return " | ".join(fields) + " |"


def _losses(reports: list[StepReport]) -> dict[str, float]:
    """Means of the loss and of metrics of the loss function, each over the steps that report it."""
    values: dict[str, list[float]] = {}
    for report in reports:
        for name, value in {"lm loss": report.loss, **report.reported}.items():
            values.setdefault(name, []).append(value)
    return {name: sum(series) / len(series) for name, series in values.items()}


def _teraflops(reports: list[StepReport]) -> float:
    """TFLOP/s per device over steps of different sizes."""
    return sum(r.flops for r in reports) / sum(r.seconds for r in reports) / reports[-1].devices / 1e12
