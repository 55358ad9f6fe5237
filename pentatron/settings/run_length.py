"""Derives batch sizes and the lengths of the run and its schedules from steps, samples and epochs."""

from collections.abc import Sequence
from dataclasses import dataclass

from pentatron.layout.batch import BatchSizeSchedule, constant, linear_ramp, parse_batch_steps
from pentatron.settings.declaration import flag_of
from pentatron.settings.settings import Draft, Settings, is_unset
from pentatron.text import format_count


def batch_plan_of(s: Settings) -> BatchSizeSchedule:
    """Returns the batch sizes of the run.

    Raises `ValueError` with a message for an invalid ramp-up or schedule.
    """
    steps, ramp, full = s.step_batch_size_schedule, s.rampup_batch_size, s.global_batch_size
    if not steps and not ramp:
        return constant(full)
    written = f"--step-batch-size-schedule {' '.join(steps)}"
    if not steps:
        written = f"--rampup-batch-size {' '.join(map(str, ramp))}"
        if len(ramp) != 3:
            numbers = "three numbers: START INCREMENT SAMPLES, such as 16 16 5859375"
            raise ValueError(f"{written} must be {numbers}")
    try:
        return parse_batch_steps(steps, s.seq_length) if steps else linear_ramp(*ramp, full)
    except ValueError as error:
        raise ValueError(f"{written}: {error}") from None


@dataclass(frozen=True)
class ScheduleLengths:
    """Lengths in samples: the warm-up, the end of the decay, the decay at the end of WSD, the whole run."""

    warmup: float
    decay: int
    wsd: int
    total: int


def schedule_lengths_of(s: Settings, plan: BatchSizeSchedule) -> ScheduleLengths:
    """Converts the lengths of the schedules to samples. Steps have the batch sizes of the plan."""
    total = s.train_samples or plan.samples_after(max(1, s.train_iters))
    decay = s.lr_decay_samples or plan.samples_after(s.lr_decay_iters or 0)
    warmup: float = plan.samples_after(s.lr_warmup_iters)
    if s.lr_warmup_fraction is not None:
        warmup = float(s.lr_warmup_fraction * decay)
    elif s.lr_warmup_samples is not None:
        warmup = float(s.lr_warmup_samples)
    return ScheduleLengths(warmup, decay, _wsd(s, plan, decay), total)


def _wsd(s: Settings, plan: BatchSizeSchedule, decay: int) -> int:
    if s.lr_wsd_decay_samples is not None or s.lr_wsd_decay_iters is None:
        return s.lr_wsd_decay_samples or 0
    # Counts the last steps, because the first ones may be smaller. If the WSD decay exceeds the whole decay,
    # the result does too; a rule reports it.
    before = plan.steps_within(decay) - s.lr_wsd_decay_iters
    return decay - plan.samples_after(before) if before >= 0 else decay - before


# --- derivation ---
#
# Several settings give the same length in steps, samples or fractions. A flag overrides a file, and two flags
# contradict each other. In the saved file of a run, given values take precedence over values derived from
# them.


def batch_plan_or_none(draft: Draft) -> BatchSizeSchedule | None:
    """Returns the batch plan, or None if there is none, which the rules report."""
    if is_unset(draft.global_batch_size) and not draft.step_batch_size_schedule:
        return None
    try:
        return batch_plan_of(draft)
    except ValueError:
        return None


def _select_given(draft: Draft, *names: str) -> list[str]:
    """Returns which of several redundant settings are given.

    If some are flags, those of a file are cleared.
    """
    given = [name for name in names if draft.given(name) and getattr(draft, name) not in (None, ())]
    selected = [name for name in given if draft.by_flag(name)] or given
    # These settings are not optional.
    cleared = {"step_batch_size_schedule": (), "rampup_batch_size": (), "lr_warmup_iters": 0}
    for name in given:
        if name not in selected:
            draft.derive(f"{flag_of(selected[0])} is given", **{name: cleared.get(name)})
    return selected


def _contradicts(draft: Draft, given: list[str], what: str) -> bool:
    """Reports two contradicting settings: a problem for flags, a notice if the first is from a file.

    Returns whether it is a problem.
    """
    values = (getattr(draft, name) for name in given[:2])
    words = (" ".join(map(str, value)) if isinstance(value, tuple) else value for value in values)
    first, second = (f"{flag_of(name)} {word}" for name, word in zip(given, words))
    if draft.by_flag(given[0]):
        draft.problems.append(f"{first} and {second} both {what}; give one of them")
    else:
        draft.notices.append(f"{second} is used to {what}, so {first} is ignored")
    return draft.by_flag(given[0])


def derive_stepwise_batch(draft: Draft) -> bool:
    """Derives the global batch size as the last of --step-batch-size-schedule.

    Validation and the checks of the layout use that size. Returns False if other settings contradict it.
    """
    name = "step_batch_size_schedule"
    if not draft.step_batch_size_schedule:
        return True
    given = _select_given(draft, "global_batch_size", "rank_batch_size", "rampup_batch_size", name)
    if draft.given(name) and name not in given:
        return True
    plan = batch_plan_or_none(draft)
    size = None if plan is None else plan.changes[-1][1]
    others = [o for o in given[:-1] if o != "global_batch_size" or draft.global_batch_size != size]
    refused = [_contradicts(draft, [other, given[-1]], "set the batch size") for other in others]
    if any(refused):
        return False
    draft.derive("--step-batch-size-schedule", rank_batch_size=None, rampup_batch_size=())
    draft.derive("the last of --step-batch-size-schedule", global_batch_size=size)
    return True


def derive_length(draft: Draft) -> None:
    """Derives the length of the run, its schedules and the save interval.

    With `--epochs` over data that is not counted yet, all of these stay unset. Problems are added to those of
    the draft.
    """
    plan = batch_plan_or_none(draft)
    _samples(draft, plan)
    _epochs(draft, plan)
    if draft.skip_train and draft.epochs is None:
        draft.fill("nothing is trained (--skip-train)", train_iters=0)
    _decay(draft)
    if draft.min_lr > draft.lr and not draft.given("min_lr"):
        draft.derive(f"a tenth of --lr; the preset has {draft.min_lr}", min_lr=draft.lr / 10)
    if draft.weight_decay_incr_style != "constant":
        ends = dict.fromkeys(("start_weight_decay", "end_weight_decay"), draft.weight_decay)
        draft.fill("weight-decay", **ends)
    if not is_unset(draft.train_iters):
        interval = max(1, min(draft.train_iters, max(100, draft.train_iters // 10)))
        draft.fill("a tenth of the run, at least 100 steps", save_interval=interval)
    _warmup(draft, plan)


def _samples(draft: Draft, plan: BatchSizeSchedule | None) -> None:
    """Derives the steps of --train-samples. Samples that do not fill a step at the end are not used."""
    given = _select_given(draft, "train_iters", "train_samples")
    samples = draft.train_samples
    if samples is None or plan is None:
        return
    steps = plan.steps_within(samples)
    differ = len(given) == 2 and draft.train_iters != steps
    if differ and _contradicts(draft, given, "set the length of the run"):
        return
    if steps == 0:
        fewer = f"--train-samples {samples} are fewer than the {plan.size_at(0)} samples of the first step"
        draft.problems.append(f"{fewer}; give more, or a smaller batch")
        return
    left_over = samples - plan.samples_after(steps)
    rest = f"; {left_over} are not used" if left_over else ""
    draft.derive(f"steps of {samples} samples{rest}", train_iters=steps)


def _epochs(draft: Draft, plan: BatchSizeSchedule | None) -> None:
    """Derives the steps of --epochs. If the length is given too, the run ends at the smaller of the two."""
    if flag := _overriding_flag(draft, ("train_iters", "train_samples"), "epochs"):
        draft.derive(f"{flag_of(flag)} is given", epochs=None)
    epochs = draft.epochs
    if epochs is None or plan is None:
        return
    in_epochs = format_count(epochs, "epoch")
    if draft.is_synthetic and draft.dataset_size is not None:
        if plan.is_constant:
            per_epoch = max(1, draft.dataset_size // plan.size_at(0))
            limit, in_words = epochs * per_epoch, f"{in_epochs} of {format_count(per_epoch, 'step')}"
        else:
            limit = max(1, plan.steps_within(epochs * draft.dataset_size))
            in_words = f"{in_epochs} ({format_count(limit, 'step')} of changing size)"
    elif draft.epoch_samples is not None:
        limit = plan.steps_within(epochs * draft.epoch_samples)
        in_words = f"{in_epochs} of {format_count(draft.epoch_samples, 'sample')}"
    else:
        return
    if limit == 0:
        too_few = f"{in_words} cannot fill the {plan.size_at(0)} samples of the first step"
        draft.wrong["epochs"] = f"--epochs {epochs}: {too_few}; give more epochs, or a smaller batch"
        draft.problems.append(draft.wrong["epochs"])
    else:
        _limit_length(draft, limit, in_words)


def _overriding_flag(draft: Draft, names: Sequence[str], other: str) -> str:
    """Returns the first of `names` given by a flag, if `other` has a value that is not from a flag."""
    if getattr(draft, other) is None or draft.by_flag(other):
        return ""
    return next((n for n in names if draft.by_flag(n) and getattr(draft, n) is not None), "")


def _limit_length(draft: Draft, limit: int, in_words: str) -> None:
    """Ends the run after `limit` steps, unless a given length ends it before.

    A notice names the one that is used.
    """
    steps, by_samples = draft.train_iters, draft.train_samples is not None
    name = "train_samples" if by_samples else "train_iters"
    is_given = steps is not None and (draft.given("train_iters") or by_samples)
    if is_given and not _overriding_flag(draft, ("epochs",), name):
        ends = f"{flag_of(name)} ends it before {in_words}"
        if limit < steps:
            ends = f"{in_words}, before {flag_of(name)} {getattr(draft, name)}"
            in_words = f"{in_words}, before {steps} steps"
        if limit != steps:
            draft.notices.append(f"training stops after {format_count(min(limit, steps), 'step')}: {ends}")
        if limit >= steps:
            return
    draft.derive(in_words, train_iters=limit)
    if by_samples:
        draft.derive(in_words, train_samples=None)


def _decay(draft: Draft) -> None:
    """Derives the length of the learning rate decay."""
    for what in ("lr_decay", "lr_wsd_decay"):
        given = _select_given(draft, f"{what}_iters", f"{what}_samples")
        if len(given) == 2:
            _contradicts(draft, given, "set the decay")
    if draft.lr_decay_iters is None:
        draft.fill("train-samples", lr_decay_samples=draft.train_samples)
    if draft.lr_decay_samples is None and not is_unset(draft.train_iters):
        draft.fill("train-iters", lr_decay_iters=max(1, draft.train_iters))


def _warmup(draft: Draft, plan: BatchSizeSchedule | None) -> None:
    """Derives the whole steps of the warm-up, however it is given."""
    given = _select_given(draft, "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")
    if plan is None or (draft.lr_decay_iters is None and draft.lr_decay_samples is None):
        return
    decay = draft.lr_decay_samples or plan.samples_after(draft.lr_decay_iters or 0)
    fraction, samples = draft.lr_warmup_fraction, draft.lr_warmup_samples
    steps, reason = None, ""
    if fraction is not None:
        steps, reason = plan.steps_within(int(fraction * decay)), f"{fraction} × {decay} samples"
    elif samples is not None:
        steps, reason = plan.steps_within(samples), f"steps of {samples} samples"
    both = samples is not None and fraction is not None
    differ = len(given) > 1 and (both or draft.lr_warmup_iters != steps)
    if differ and _contradicts(draft, given, "set the warm-up"):
        return
    tenth = plan.steps_within(decay) // 10
    if steps is not None:
        draft.derive(reason, lr_warmup_iters=steps)
    elif not draft.given("lr_warmup_iters") and draft.lr_warmup_iters > tenth:
        # The default warm-up of a preset or entry point may be longer than a short run.
        draft.derive("a tenth of the run", lr_warmup_iters=tenth)
