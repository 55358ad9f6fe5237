"""Needs of optimizer, schedules and precision."""

from pentatron.config.entry import GRAD_SCALER
from pentatron.config.needs.need import Need, Settings, unless

DECAY = unless(
    lambda s: s.lr_decay_style != "constant", "the learning rate does not decay (--lr-decay-style constant)"
)


def decay_or_fraction(s: Settings) -> str:
    """A decay, or a warm-up given as a share of it."""
    return DECAY(s) if s.lr_warmup_fraction is None else ""


WSD = unless(
    lambda s: s.lr_decay_style == "WSD",
    lambda s: f"only --lr-decay-style WSD has such a decay, not {s.lr_decay_style}",
)
WARMUP = unless(
    lambda s: s.lr_warmup_iters or s.lr_warmup_samples or s.lr_warmup_fraction,
    "there is no warm-up (--lr-warmup-iters)",
)


def one_weight_decay(s: Settings) -> str:
    """A weight decay that is not given by both of its ends."""
    ends = s.given("start_weight_decay") and s.given("end_weight_decay")
    changes = s.weight_decay_incr_style != "constant" and ends
    return "--start-weight-decay and --end-weight-decay say what it is" if changes else ""


def changing_weight_decay(s: Settings) -> str:
    """A weight decay with two different ends."""
    start, end = s.start_weight_decay, s.end_weight_decay
    same = s.weight_decay_incr_style != "constant" and start == end
    return f"it begins and ends at {start} (--start-weight-decay, --end-weight-decay)" if same else ""


def growing_batch(s: Settings) -> str:
    """A ramp-up that begins below the global batch size."""
    ramp = s.rampup_batch_size
    same = bool(ramp) and ramp[0] == s.global_batch_size
    return "it begins at the global batch size, so every batch has that size" if same else ""


ADAM = unless(lambda s: s.optimizer == "adam", lambda s: f"--optimizer {s.optimizer} has no such number")
SGD = unless(lambda s: s.optimizer == "sgd", "--optimizer adam has moments of its own (--adam-beta1)")


def loss_scale_search(name: str) -> Need:
    """A loss scale that is searched for in fp16. A value that programs bring by default gets no notice."""

    def check(s: Settings) -> str:
        if not s.source(name).startswith("flag") and getattr(s, name) == GRAD_SCALER.get(name):
            return ""
        if s.loss_scale:
            return f"the loss scale stays as it is (--loss-scale {s.loss_scale:g})"
        return "" if s.fp16 else "no loss scale is looked for without --fp16"

    return check


def nonzero_loss_scale(s: Settings) -> str:
    """A loss scale other than 0."""
    search = "the loss scale is found on the way" if s.fp16 else "the loss is not scaled"
    return f"0 stands for none, so {search}" if s.loss_scale == 0 else ""
