"""Settings of batch sizes and schedules that cannot change anything in a run."""

from pentatron.config.draft import Draft, Facts


def no_decay(draft: Draft, facts: Facts) -> str:
    constant = draft["lr_decay_style"] == "constant"
    return "the learning rate does not decay (--lr-decay-style constant)" if constant else ""


def _no_decay_nor_fraction(draft: Draft, facts: Facts) -> str:
    return no_decay(draft, facts) if draft["lr_warmup_fraction"] is None else ""


def _not_wsd(draft: Draft, facts: Facts) -> str:
    style = draft["lr_decay_style"]
    return "" if style == "WSD" else f"only --lr-decay-style WSD has such a decay, not {style}"


def _no_warmup(draft: Draft, facts: Facts) -> str:
    none = not (draft["lr_warmup_iters"] or draft["lr_warmup_samples"] or draft["lr_warmup_fraction"])
    return "there is no warm-up (--lr-warmup-iters)" if none else ""


def _both_ends_given(draft: Draft, facts: Facts) -> str:
    ends = ("start_weight_decay", "end_weight_decay")
    changes = draft["weight_decay_incr_style"] != "constant" and all(draft.given(name) for name in ends)
    return "--start-weight-decay and --end-weight-decay say what it is" if changes else ""


def _no_change(draft: Draft, facts: Facts) -> str:
    start, end = draft["start_weight_decay"], draft["end_weight_decay"]
    same = draft["weight_decay_incr_style"] != "constant" and start == end
    return f"it begins and ends at {start} (--start-weight-decay, --end-weight-decay)" if same else ""


def _no_ramp(draft: Draft, facts: Facts) -> str:
    ramp = draft["rampup_batch_size"]
    same = bool(ramp) and ramp[0] == draft["global_batch_size"]
    return "it begins at the global batch size, so every batch has that size" if same else ""


IDLE_OF_SCHEDULES = {
    "min_lr": no_decay,
    **dict.fromkeys(("lr_decay_iters", "lr_decay_samples"), _no_decay_nor_fraction),
    **dict.fromkeys(("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"), _not_wsd),
    "lr_warmup_init": _no_warmup,
    "weight_decay": _both_ends_given,
    "weight_decay_incr_style": _no_change,
    "rampup_batch_size": _no_ramp,
}
