"""What the settings say about batch sizes and about the lengths of schedules, in samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pentatron.layout.batch import BatchPlan, constant, linear_ramp, written_steps
from pentatron.settings.declaration import flag_of
from pentatron.settings.settings import Draft, Settings, unset
from pentatron.text import counted


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
    return Spans(_warmup_samples(s, plan, decay), decay, _wsd(s, plan, decay), total)


def _warmup_samples(s: Settings, plan: BatchPlan, decay: int) -> float:
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


# How long a run is, and its schedules with it.
#
# Several settings say one thing in steps, samples or shares. A flag is stronger than a file; two flags
# contradict each other. A file may be one that a run has saved, with what was derived beside what it was
# derived from: there the latter counts.


def plan_so_far(draft: Draft) -> BatchPlan | None:
    """None where there is no plan; the rules say why."""
    if unset(draft.global_batch_size) and not draft.step_batch_size_schedule:
        return None
    try:
        return plan_of(draft)
    except ValueError:
        return None


def _written(draft: Draft, *names: str) -> list[str]:
    """Of settings that say the same in different words, those the user wrote; the others lose their value."""
    said = [name for name in names if draft.given(name) and getattr(draft, name) not in (None, ())]
    flags = [name for name in said if draft.source(name).startswith("flag ")]
    strongest = flags or said
    for name in said:
        if name not in strongest:
            # One of them is a plain number, of which 0 is nothing.
            nothing = {"step_batch_size_schedule": (), "rampup_batch_size": (), "lr_warmup_iters": 0}
            draft.derive(f"{flag_of(strongest[0])} is given", **{name: nothing.get(name)})
    return strongest


def _contradiction(draft: Draft, said: list[str], what: str) -> list[str]:
    """Two settings that say different things: a problem between flags, a notice about the weaker, first, one of a file."""
    first, second = (f"{flag_of(name)} {_plain(getattr(draft, name))}" for name in said[:2])
    if draft.source(said[0]).startswith("flag "):
        return [f"{first} and {second} both {what}; give one of them"]
    draft.notices.append(f"{second} is there to {what}, so {first} is not used")
    return []


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def settle_stepwise_batch(draft: Draft) -> list[str]:
    """With sizes written out, the global batch is the last of them: what validation and the layout go by."""
    others = ("global_batch_size", "rank_batch_size", "rampup_batch_size")
    if not draft.step_batch_size_schedule:
        return []
    said = _written(draft, *others, "step_batch_size_schedule")
    if draft.given("step_batch_size_schedule") and "step_batch_size_schedule" not in said:
        return []
    plan = plan_so_far(draft)
    size = None if plan is None else plan.changes[-1][1]
    problems: list[str] = []
    for name in said[:-1]:
        if name != "global_batch_size" or getattr(draft, name) != size:
            problems += _contradiction(draft, [name, said[-1]], "say how large a batch is")
    if problems:
        return problems
    for name, nothing in (("rank_batch_size", None), ("rampup_batch_size", ())):
        draft.derive("--step-batch-size-schedule", **{name: nothing})
    draft.derive("the last of --step-batch-size-schedule", global_batch_size=size)
    return []


def derive_length(draft: Draft) -> list[str]:
    """Derives the length of the run, its schedules and the save interval; returns the problems met on the way.

    With `--epochs` over data that only the run can count, all this stays open until the data is.
    """
    plan = plan_so_far(draft)
    problems = _samples(draft, plan) + _epochs(draft, plan)
    if draft.skip_train and unset(draft.train_iters) and draft.epochs is None:
        draft.derive("nothing is trained (--skip-train)", train_iters=0)
    problems += _decay(draft)
    if draft.min_lr > draft.lr and not draft.given("min_lr"):
        draft.derive(f"a tenth of --lr; the preset has {draft.min_lr}", min_lr=draft.lr / 10)
    _weight_decay(draft)
    if unset(draft.save_interval) and not unset(draft.train_iters):
        often = max(1, min(draft.train_iters, max(100, draft.train_iters // 10)))
        draft.derive("a tenth of the run, at least 100 steps", save_interval=often)
    return problems + _warmup(draft, plan)


def _samples(draft: Draft, plan: BatchPlan | None) -> list[str]:
    """Whole steps: what is left over at the end is not trained on."""
    said = _written(draft, "train_iters", "train_samples")
    samples = draft.train_samples
    if samples is None or plan is None:
        return []
    steps = plan.steps_within(samples)
    if len(said) == 2 and draft.train_iters != steps:
        problems = _contradiction(draft, said, "say how long the run is")
        if problems:
            return problems
    if steps == 0:
        return [
            f"--train-samples {samples} are fewer than the {plan.size_at(0)} samples of the first step; give more, or a "
            f"smaller batch"
        ]
    left_over = samples - plan.samples_after(steps)
    rest = f"; {left_over} are left over" if left_over else ""
    draft.derive(f"steps of {samples} samples{rest}", train_iters=steps)
    return []


def _epochs(draft: Draft, plan: BatchPlan | None) -> list[str]:
    """The nearer of two limits ends the run; a number of steps nobody typed is no limit."""
    if stronger := _typed_over(draft, ("train_iters", "train_samples"), "epochs"):
        draft.derive(f"{flag_of(stronger)} is given", epochs=None)
    epochs = draft.epochs
    if epochs is None or plan is None:
        return []
    if draft.is_synthetic and draft.dataset_size is not None:
        _end_first(draft, *_of_made_samples(epochs, draft.dataset_size, plan))
    elif draft.epoch_samples is not None:
        limit = plan.steps_within(epochs * draft.epoch_samples)
        in_words = f"{counted(epochs, 'epoch')} of {counted(draft.epoch_samples, 'sample')}"
        if limit == 0:
            draft.wrong["epochs"] = (
                f"--epochs {epochs}: {in_words} cannot fill the {plan.size_at(0)} samples of the first step; give more "
                f"epochs, or a smaller batch"
            )
            return [draft.wrong["epochs"]]
        _end_first(draft, limit, in_words)
    return []


def _typed_over(draft: Draft, names: Sequence[str], other: str) -> str:
    """Which of these is a flag, where the other one is there and none: it comes from a file, perhaps one that a run has saved."""
    flags = [
        name for name in names if draft.source(name).startswith("flag ") and getattr(draft, name) is not None
    ]
    weaker = getattr(draft, other) is not None and not draft.source(other).startswith("flag ")
    return flags[0] if flags and weaker else ""


def _of_made_samples(epochs: int, size: int, plan: BatchPlan) -> tuple[int, str]:
    """Steps, and where they come from."""
    if plan.is_constant:
        per_epoch = max(1, size // plan.size_at(0))
        return epochs * per_epoch, f"{counted(epochs, 'epoch')} of {counted(per_epoch, 'step')}"
    limit = max(1, plan.steps_within(epochs * size))
    return limit, f"{counted(epochs, 'epoch')} ({counted(limit, 'step')} of changing size)"


def _end_first(draft: Draft, limit: int, in_words: str) -> None:
    steps, by_samples = draft.train_iters, draft.train_samples is not None
    name = "train_samples" if by_samples else "train_iters"
    nobodys_wish = steps is None or not (draft.given("train_iters") or by_samples)
    if not nobodys_wish and not _typed_over(draft, ("epochs",), name):
        if limit == steps:
            return
        if limit > steps:
            draft.notices.append(
                f"training stops after {counted(steps, 'step')}: {flag_of(name)} ends it before {in_words}"
            )
            return
        draft.notices.append(
            f"training stops after {counted(limit, 'step')}: {in_words}, before {flag_of(name)} {getattr(draft, name)}"
        )
        in_words = f"{in_words}, before {steps} steps"
    draft.derive(in_words, train_iters=limit)
    if by_samples:
        draft.derive(in_words, train_samples=None)


def _decay(draft: Draft) -> list[str]:
    problems: list[str] = []
    for what in ("lr_decay", "lr_wsd_decay"):
        said = _written(draft, f"{what}_iters", f"{what}_samples")
        if len(said) == 2:
            problems += _contradiction(draft, said, "set the decay")
    if draft.lr_decay_samples is None and draft.lr_decay_iters is None:
        if draft.train_samples is not None:
            draft.derive("train-samples", lr_decay_samples=draft.train_samples)
        elif not unset(draft.train_iters):
            draft.derive("train-iters", lr_decay_iters=max(1, draft.train_iters))
    return problems


def _weight_decay(draft: Draft) -> None:
    if draft.weight_decay_incr_style == "constant":
        return
    for name in ("start_weight_decay", "end_weight_decay"):
        if getattr(draft, name) is None:
            draft.derive("weight-decay", **{name: draft.weight_decay})


def _warmup(draft: Draft, plan: BatchPlan | None) -> list[str]:
    """However it was said, how many whole steps it has is shown."""
    said = _written(draft, "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")
    if plan is None or (draft.lr_decay_iters is None and draft.lr_decay_samples is None):
        return []
    decay = draft.lr_decay_samples or plan.samples_after(draft.lr_decay_iters or 0)
    fraction, samples = draft.lr_warmup_fraction, draft.lr_warmup_samples
    steps, reason = None, ""
    if fraction is not None:
        steps, reason = plan.steps_within(int(fraction * decay)), f"{fraction} × {decay} samples"
    elif samples is not None:
        steps, reason = plan.steps_within(samples), f"steps of {samples} samples"
    both_others = samples is not None and fraction is not None
    if len(said) > 1 and (both_others or draft.lr_warmup_iters != steps):
        problems = _contradiction(draft, said, "set the warm-up")
        if problems:
            return problems
    tenth = plan.steps_within(decay) // 10
    if steps is not None:
        draft.derive(reason, lr_warmup_iters=steps)
    elif not draft.given("lr_warmup_iters") and draft.lr_warmup_iters > tenth:
        # A short run made from a preset or an entry point's defaults must not be all warm-up.
        draft.derive("a tenth of the run", lr_warmup_iters=tenth)
    return []
