"""What one step or one validation has to say, and how it reads in the log."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pentatron.text import duration, in_mib

if TYPE_CHECKING:
    import torch

# What every rank of a run was busy with in a step: whose turn it was to be slow, and who holds how much.


@dataclass(frozen=True)
class RankReport:
    """Seconds, bytes and percentages of one step, in the order of the ranks.

    `collectives` and `messages` are the seconds a rank stood still for others; what is left of the step it was busy.
    They are empty where that cannot be measured, as are the percentages. `unheard`: how many sentences a rank has to say.
    """

    seconds: Sequence[float]
    collectives: Sequence[float]
    messages: Sequence[float]
    memory_bytes: Sequence[int]
    utilisation: Sequence[float]
    unheard: Sequence[int] = ()

    def as_metrics(self) -> dict[str, Any]:
        rows = zip(self.seconds, self.collectives, self.messages)
        found: dict[str, Any] = {
            "busy_seconds": [round(max(0.0, step - c - m), 6) for step, c, m in rows],
            "collective_seconds": [round(s, 6) for s in self.collectives],
            "message_seconds": [round(s, 6) for s in self.messages],
            "memory_bytes": list(self.memory_bytes),
            "gpu_utilisation": list(self.utilisation),
        }
        return {"ranks": {name: numbers for name, numbers in found.items() if numbers}}


def gpu_utilisation(device: "torch.device") -> float | None:
    """Percent of the last moments in which the GPU computed, as its driver says; None where nobody can be asked."""
    if device.type != "cuda":
        return None
    # Whoever only reads reports need not wait for torch.
    import torch

    try:
        return float(torch.cuda.utilization(device))
    except Exception:
        # The library that asks the driver is missing, or the driver does not answer: every version fails in its way.
        return None


# Megatron's names for the losses of routers.
_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}

_LARGEST_EXPONENT = 20.0


@dataclass(frozen=True)
class ExpertReport:
    """How busy the experts were: the busiest in units of an equal share, how many got nothing, and by layer."""

    losses: Mapping[str, float]
    imbalance: float
    idle: int
    by_layer: Mapping[int, Sequence[int]]

    def by_name(self) -> dict[str, float]:
        return {_NAMES[name]: value for name, value in self.losses.items()}

    def fields(self) -> list[str]:
        return [f"{name}: {value:.2f}" for name, value in self.by_name().items()]

    def as_metrics(self) -> dict[str, Any]:
        found: dict[str, Any] = {**self.by_name()}
        found |= {"expert_imbalance": round(self.imbalance, 4), "idle_experts": self.idle}
        if self.by_layer:
            found["tokens_per_expert"] = {str(layer): counts for layer, counts in self.by_layer.items()}
        return found


# How a line of the log begins that says what a run failed with.
FAILED = "error: "


@dataclass(frozen=True)
class StepReport:
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
    # Of the whole step, on all devices.
    flops: float
    devices: int
    consumed_tokens: int = 0
    experts: ExpertReport | None = None
    loss_scale: float = 1.0
    # An overflow in half precision: the weights were left as they are.
    is_skipped: bool = False
    is_nan: bool = False
    # Of all ranks, in the steps that are measured.
    ranks: RankReport | None = None
    # Samples of the run that were read and not trained on.
    skipped_samples: int = 0
    # What one device could do at best, where that is known.
    peak_teraflops: float | None = None
    # Further figures of this rank's memory, under the names viewers show them by.
    memory: Mapping[str, float] = field(default_factory=dict)
    # What a user's loss function reports, by its own names.
    reported: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def teraflops_per_device(self) -> float:
        return self.flops / self.seconds / self.devices / 1e12


def short_line(report: StepReport, eta_seconds: float) -> str:
    """One step for people, where there is no terminal to draw a bar in."""
    return (
        f"step {report.step:>5}/{report.total_steps}  loss {report.loss:7.4f}  lr {report.learning_rate:.2e}  "
        f"{report.tokens_per_second:7.0f} tokens/s  {in_mib(report.memory_bytes, '5.0f')} MiB  "
        f"left {duration(eta_seconds)}"
    )


def perplexity(loss: float) -> float:
    """Of a large loss it says no more than the loss, and its digits fill the line: there it stays what it is."""
    return math.exp(min(_LARGEST_EXPONENT, loss))


# Megatron's line, every so many steps.


class LogLines:
    """Numbers of the steps since the last line; the first step of a run gets a line that counts in the next one too."""

    def __init__(self, interval: int, throughput: bool) -> None:
        self.interval, self.throughput = interval, throughput
        self._since: list[StepReport] = []
        self._is_first = True

    def after(self, report: StepReport, now: datetime) -> str | None:
        """The line that is due after this step, if one is."""
        self._since.append(report)
        due = report.step % self.interval == 0
        line = log_line(self._since, now, self.throughput) if due or self._is_first else None
        self._is_first = False
        if due:
            self._since = []
        return line


def log_line(reports: list[StepReport], now: datetime, throughput: bool) -> str:
    """Means over the given steps. Ours stand at the end, so that what reads Megatron's line reads this one."""
    last = reports[-1]
    seconds = sum(r.seconds for r in reports) / len(reports)
    fields = [
        f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {last.step:8d}/{last.total_steps:8d}",
        f"consumed samples: {last.consumed_samples:12d}",
    ]
    if last.skipped_samples:
        fields.append(f"skipped samples: {last.skipped_samples:12d}")
    fields.append(f"elapsed time per iteration (ms): {seconds * 1000:.1f}")
    if throughput:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {_teraflops(reports):.1f}")
    fields += [
        f"learning rate: {last.next_learning_rate:.6E}",
        f"global batch size: {last.global_batch_size:5d}",
    ]
    # A step that left the weights alone, because its numbers were none, would make the mean none as well.
    advanced = [r for r in reports if not r.is_skipped]
    if advanced:
        fields += [f"{name}: {value:.6E}" for name, value in _losses(advanced).items()]
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
    if last.experts is not None:
        fields.append(f"busiest expert: {last.experts.imbalance:.2f} x mean")
        fields.append(f"idle experts: {last.experts.idle}")
    return " | ".join(fields) + " |"


def _losses(reports: list[StepReport]) -> dict[str, float]:
    """The loss, and what a loss function reports; a name is averaged over the steps that have it."""
    values: dict[str, list[float]] = {}
    for report in reports:
        for name, value in {"lm loss": report.loss, **report.reported}.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def _teraflops(reports: list[StepReport]) -> float:
    """Of one device; steps may differ in their size."""
    return sum(r.flops for r in reports) / sum(r.seconds for r in reports) / reports[-1].devices / 1e12
