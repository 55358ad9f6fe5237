"""Megatron's names for the numbers of a step, as TensorBoard and Weights & Biases show them."""

from collections.abc import Mapping
from dataclasses import dataclass

from pentatron.monitor.report import StepReport, perplexity


@dataclass(frozen=True)
class Choices:
    """Which of the numbers beyond the usual ones are wanted."""

    timers: bool = False
    memory: bool = False
    world_size: int | None = None
    perplexity: bool = False


@dataclass(frozen=True)
class Scalar:
    name: str
    value: float
    # Drawn over the samples consumed, instead of over the steps.
    over_samples: bool = False


def scalars(report: StepReport, validation: float | None, choices: Choices) -> list[Scalar]:
    """In the order of Megatron's writer."""
    # As in the log, and as Megatron has it: the rate after the step, which the next one will have.
    both = {"learning-rate": report.next_learning_rate, "batch-size": float(report.global_batch_size)}
    if not report.is_skipped:
        both |= {"lm loss": report.loss, **report.reported}
        both |= report.experts.by_name() if report.experts else {}
    both |= {"loss-scale": report.loss_scale, "grad-norm": report.gradient_norm}
    found = [
        scalar
        for name, value in both.items()
        for scalar in (Scalar(name, value), Scalar(f"{name} vs samples", value, over_samples=True))
    ]
    if report.skipped_samples:
        found.append(Scalar("skipped-train-samples", float(report.skipped_samples)))
    if choices.world_size is not None:
        found.append(Scalar("world-size", float(choices.world_size)))
    if choices.memory:
        found.append(Scalar("mem-max-allocated-bytes", float(report.memory_bytes)))
        found += [Scalar(name, value) for name, value in report.memory.items()]
    if choices.timers:
        found.append(Scalar("throughput", report.teraflops_per_device))
        found.append(Scalar("iteration-time", report.seconds))
    found.append(Scalar("tokens-per-second", report.tokens_per_second))
    if validation is not None:
        found += _of_set("validation", validation, choices.perplexity)
    return found


def of_evaluation(losses: Mapping[str, float], choices: Choices) -> list[Scalar]:
    """Of the sets that are evaluated after the last step, over the steps."""
    found = [s for name, loss in losses.items() for s in _of_set(name, loss, choices.perplexity)]
    return [scalar for scalar in found if not scalar.over_samples]


def _of_set(name: str, loss: float, with_perplexity: bool) -> list[Scalar]:
    values = {f"lm loss {name}": loss}
    if with_perplexity:
        values[f"lm loss {name} ppl"] = perplexity(loss)
    return [
        scalar
        for name, value in values.items()
        for scalar in (Scalar(name, value), Scalar(f"{name} vs samples", value, over_samples=True))
    ]
