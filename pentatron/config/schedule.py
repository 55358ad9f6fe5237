"""What the settings say about batch sizes and about the lengths of schedules, in samples."""

from dataclasses import dataclass

from pentatron.config.settings import Settings
from pentatron.layout.batch_plan import BatchPlan, constant, linear_ramp, written_steps


def plan_of(s: Settings) -> BatchPlan:
    """Raises `ValueError` with a sentence where the settings make no plan."""
    steps, ramp, full = (
        s.step_batch_size_schedule,
        s.rampup_batch_size,
        s.global_batch_size,
    )
    if steps:
        try:
            return written_steps(steps, s.seq_length)
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


def spans_of(s: Settings, plan: BatchPlan) -> Spans:
    """Steps are those of the plan: a warm-up of 100 steps ends after 100 steps, however small these are."""
    total = s.train_samples or plan.samples_after(max(1, s.train_iters))
    decay = s.lr_decay_samples or plan.samples_after(s.lr_decay_iters or 0)
    return Spans(_warmup(s, plan, decay), decay, _wsd(s, plan, decay), total)


def _warmup(s: Settings, plan: BatchPlan, decay: int) -> float:
    if s.lr_warmup_fraction is not None:
        return float(s.lr_warmup_fraction * decay)
    if s.lr_warmup_samples is not None:
        return float(s.lr_warmup_samples)
    return plan.samples_after(s.lr_warmup_iters)


def _wsd(s: Settings, plan: BatchPlan, decay: int) -> int:
    if s.lr_wsd_decay_samples is not None:
        return int(s.lr_wsd_decay_samples)
    if s.lr_wsd_decay_iters is None:
        return 0
    # The last steps, not the first ones, which may be smaller. More steps than there are come out longer than the decay.
    before = plan.steps_within(decay) - s.lr_wsd_decay_iters
    return decay - plan.samples_after(before) if before >= 0 else decay - before
