"""What the settings say about batch sizes and about the lengths of schedules, in samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pentatron.layout.batch_plan import BatchPlan, constant, linear_ramp, written_steps

Values = Mapping[str, Any]


def plan_of(values: Values) -> BatchPlan:
    """Raises `ValueError` with a sentence where the settings make no plan."""
    steps, ramp, full = (
        values["step_batch_size_schedule"],
        values["rampup_batch_size"],
        values["global_batch_size"],
    )
    if steps:
        try:
            return written_steps(steps, values["seq_length"])
        except ValueError as error:
            raise ValueError(f"--step-batch-size-schedule {' '.join(steps)}: {error}") from None
    if not ramp:
        return constant(full)
    written = f"--rampup-batch-size {' '.join(map(str, ramp))}"
    if len(ramp) != 3:
        raise ValueError(f"{written} must be three numbers: START INCREMENT SAMPLES, such as 16 16 5859375")
    try:
        return linear_ramp(*ramp, full)
    except ValueError as error:
        raise ValueError(f"{written}: {error}") from None


@dataclass(frozen=True)
class Spans:
    """In samples: of the warm-up, until the end of the decay, of the decay at the end of WSD, of the whole run."""

    warmup: float
    decay: int
    wsd: int
    total: int


def spans_of(values: Values, plan: BatchPlan) -> Spans:
    """Steps are those of the plan: a warm-up of 100 steps ends after 100 steps, however small these are."""
    total = values["train_samples"] or plan.samples_after(max(1, values["train_iters"]))
    decay = values["lr_decay_samples"] or plan.samples_after(values["lr_decay_iters"])
    return Spans(_warmup(values, plan, decay), decay, _wsd(values, plan, decay), total)


def _warmup(values: Values, plan: BatchPlan, decay: int) -> float:
    if values["lr_warmup_fraction"] is not None:
        return float(values["lr_warmup_fraction"] * decay)
    if values["lr_warmup_samples"] is not None:
        return float(values["lr_warmup_samples"])
    return plan.samples_after(values["lr_warmup_iters"])


def _wsd(values: Values, plan: BatchPlan, decay: int) -> int:
    if values["lr_wsd_decay_samples"] is not None:
        return int(values["lr_wsd_decay_samples"])
    if values["lr_wsd_decay_iters"] is None:
        return 0
    # The last steps, not the first ones, which may be smaller. More steps than there are come out longer than the decay.
    before = plan.steps_within(decay) - values["lr_wsd_decay_iters"]
    return decay - plan.samples_after(before) if before >= 0 else decay - before
