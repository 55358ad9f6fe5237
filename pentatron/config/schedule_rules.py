"""Rules about batch sizes that change, the length of a run and its schedules."""

from pentatron.config.data_sources import counted_by_the_run, names_files, without_epochs
from pentatron.config.draft import Facts
from pentatron.config.layout_rules import Rule, Values
from pentatron.config.schedule import Spans, plan_of, spans_of
from pentatron.config.sft_rules import named_text
from pentatron.errors import UserError
from pentatron.layout.batch_plan import BatchPlan


def _plan(v: Values, facts: Facts) -> str | None:
    if not v["rampup_batch_size"] and not v["step_batch_size_schedule"]:
        return None
    if v["global_batch_size"] is None and not v["step_batch_size_schedule"]:
        return None
    try:
        plan_of(v)
    except ValueError as error:
        return str(error)
    return None


def _how_long(v: Values, facts: Facts) -> str | None:
    if v["train_iters"] is not None or v["train_samples"] is not None:
        return None
    if v["epochs"] is not None:
        if counted_by_the_run(v) or named_text(v["data_path"] or ()):
            # Text that nobody counts is the matter of another rule.
            return None
        try:
            why = without_epochs(v)
        except UserError:
            # Another rule is about the words that name data.
            return None
        if not why and facts.launcher and names_files(v):
            # The ranks count their files together.
            return None
        return f"how many steps --epochs {v['epochs']} are is not known: {why or 'no data is read'}; give --train-iters instead"
    return "the length of the run is unknown; give --train-iters"


def _lengths(v: Values, facts: Facts) -> tuple[BatchPlan, Spans] | None:
    """None where other rules have something to say first."""
    if v["train_iters"] is None or v["global_batch_size"] is None or _plan(v, facts) is not None:
        return None
    if v["lr_decay_iters"] is None and v["lr_decay_samples"] is None:
        return None
    plan = plan_of(v)
    return plan, spans_of(v, plan)


def _warmup(v: Values, facts: Facts) -> str | None:
    lengths = _lengths(v, facts)
    if lengths is None or lengths[1].warmup < lengths[1].decay:
        return None
    if v["lr_warmup_samples"] is None and v["lr_decay_samples"] is None:
        return (
            f"--lr-warmup-iters {v['lr_warmup_iters']} must be smaller than the {v['lr_decay_iters']} steps of the decay "
            f"(--lr-decay-iters or --train-iters)"
        )
    return (
        f"a warm-up of {lengths[1].warmup:.0f} samples must be shorter than the {lengths[1].decay} samples of the decay "
        f"(--lr-decay-samples, --lr-decay-iters or the length of the run)"
    )


def _wsd(v: Values, facts: Facts) -> str | None:
    if v["lr_decay_style"] != "WSD":
        return None
    if v["lr_wsd_decay_iters"] is None and v["lr_wsd_decay_samples"] is None:
        return "--lr-decay-style WSD needs to know how long its decay is; give --lr-wsd-decay-iters or --lr-wsd-decay-samples"
    lengths = _lengths(v, facts)
    if lengths is None:
        return None
    plan, spans = lengths
    if spans.warmup >= spans.decay or spans.warmup + spans.wsd <= spans.decay:
        return None
    if v["lr_wsd_decay_samples"] is not None:
        return (
            f"--lr-wsd-decay-samples {spans.wsd} and the warm-up of {spans.warmup:.0f} do not fit into the {spans.decay} "
            f"samples until the end of the decay; use {spans.decay - int(spans.warmup)} or fewer"
        )
    steps = plan.steps_within(spans.decay)
    return (
        f"--lr-wsd-decay-iters {v['lr_wsd_decay_iters']} and the warm-up of {v['lr_warmup_iters']} do not fit into the {steps} "
        f"steps until the end of the decay; use {steps - v['lr_warmup_iters']} or fewer"
    )


def _min_lr(v: Values, facts: Facts) -> str | None:
    for name in ("min_lr", "lr_warmup_init"):
        if v[name] > v["lr"]:
            flag = f"--{name.replace('_', '-')}"
            return f"{flag} {v[name]} is above --lr {v['lr']}; lower the first or raise the second"
    return None


def _weight_decay(v: Values, facts: Facts) -> str | None:
    ends = [n for n in ("start_weight_decay", "end_weight_decay") if v[n] is not None]
    if v["weight_decay_incr_style"] != "constant" or not ends:
        return None
    return (
        f"--{ends[0].replace('_', '-')} {v[ends[0]]} is for a weight decay that changes; give "
        f"--weight-decay-incr-style linear or cosine, or --weight-decay instead"
    )


def _whose_schedule(v: Values, facts: Facts) -> str | None:
    if not (v["override_opt_param_scheduler"] and v["use_checkpoint_opt_param_scheduler"]):
        return None
    return (
        "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other; "
        "give one of them"
    )


SCHEDULE_RULES: tuple[Rule, ...] = (
    _plan,
    _how_long,
    _warmup,
    _wsd,
    _min_lr,
    _weight_decay,
    _whose_schedule,
)
