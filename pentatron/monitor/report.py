"""What one step or one validation has to say, and how it reads in the log."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pentatron.monitor.ranks import RankReport
from pentatron.text import duration, in_mib

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
