"""What one step or one validation has to say, and how it reads in the log."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pentatron.monitor.ranks import RankReport

# Megatron's names for the losses of routers.
_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}


@dataclass(frozen=True)
class ExpertReport:
    """How busy the experts were: the busiest in units of an equal share, how many got nothing, and by layer."""

    losses: Mapping[str, float]
    imbalance: float
    idle: int
    by_layer: Mapping[int, Sequence[int]]

    def fields(self) -> list[str]:
        return [f"{_NAMES[name]}: {value:.2f}" for name, value in self.losses.items()]

    def as_metrics(self) -> dict[str, Any]:
        found: dict[str, Any] = {_NAMES[name]: value for name, value in self.losses.items()}
        found |= {"expert_imbalance": round(self.imbalance, 4), "idle_experts": self.idle}
        if self.by_layer:
            found["tokens_per_expert"] = {str(layer): counts for layer, counts in self.by_layer.items()}
        return found


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
    teraflops_per_device: float
    experts: ExpertReport | None = None
    loss_scale: float = 1.0
    # An overflow in half precision: the weights were left as they are.
    is_skipped: bool = False
    is_nan: bool = False
    # Of all ranks, in the steps that are measured.
    ranks: RankReport | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def log_line(report: StepReport, now: datetime, throughput: bool) -> str:
    """Megatron's line, with tokens/s and memory added at its end; parsers of the former still work."""
    fields = [
        f" [{now:%Y-%m-%d %H:%M:%S.%f}] iteration {report.step:8d}/{report.total_steps:8d}",
        f"consumed samples: {report.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {report.seconds * 1000:.1f}",
    ]
    if throughput:
        fields.append(f"throughput per GPU (TFLOP/s/GPU): {report.teraflops_per_device:.1f}")
    fields += [
        f"learning rate: {report.next_learning_rate:.6E}",
        f"global batch size: {report.global_batch_size:5d}",
        f"lm loss: {report.loss:.6E}",
        *(report.experts.fields() if report.experts else ()),
        "loss scale: 1.0",
        f"grad norm: {report.gradient_norm:.3f}",
        f"number of skipped iterations: {0:3d}",
        f"number of nan iterations: {0:3d}",
        f"tokens/s: {report.tokens_per_second:.0f}",
        f"memory (MiB): {report.memory_bytes / 2**20:.0f}",
    ]
    if report.experts is not None:
        fields.append(f"busiest expert: {report.experts.imbalance:.2f} x mean")
        fields.append(f"idle experts: {report.experts.idle}")
    return " | ".join(fields) + " |"


def short_line(report: StepReport, eta_seconds: float) -> str:
    """One step for people, where there is no terminal to draw a bar in."""
    return (
        f"step {report.step:>5}/{report.total_steps}  loss {report.loss:7.4f}  lr {report.learning_rate:.2e}  "
        f"{report.tokens_per_second:7.0f} tokens/s  {report.memory_bytes / 2**20:5.0f} MiB  "
        f"left {duration(eta_seconds)}"
    )


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
