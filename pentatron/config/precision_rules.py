"""Rules and notices about number formats, loss scales and the rule of updates."""

from collections.abc import Callable, Mapping
from typing import Any

from pentatron.config.draft import Draft, Facts
from pentatron.config.entry import GRAD_SCALER
from pentatron.config.run import table

Values = Mapping[str, Any]
Reason = Callable[[Draft, Facts], str]


def _precision(v: Values, facts: Facts) -> str | None:
    return "--fp16 and --bf16 exclude each other; choose one" if v["fp16"] and v["bf16"] else None


def _smallest_scale(v: Values, facts: Facts) -> str | None:
    first, least = v["initial_loss_scale"], v["min_loss_scale"]
    if first >= least or v["loss_scale"]:
        return None
    return f"--initial-loss-scale {first:g} is below --min-loss-scale {least:g}; raise the first or lower the second"


PRECISION_RULES = (_precision, _smallest_scale)


def _of_the_search(name: str) -> Reason:
    def reason(draft: Draft, facts: Facts) -> str:
        if not draft.source(name).startswith("flag") and draft[name] == GRAD_SCALER.get(name):
            # What a program brings along and a run has written down is nobody's wish.
            return ""
        if draft["loss_scale"]:
            return f"the loss scale stays as it is (--loss-scale {draft['loss_scale']:g})"
        return "" if draft["fp16"] else "no loss scale is looked for without --fp16"

    return reason


def _nothing_scaled(draft: Draft, facts: Facts) -> str:
    search = "the loss scale is found on the way" if draft["fp16"] else "the loss is not scaled"
    return f"0 stands for none, so {search}" if draft["loss_scale"] == 0 else ""


def _not_adam(draft: Draft, facts: Facts) -> str:
    other = draft["optimizer"]
    return f"--optimizer {other} has no such number" if other != "adam" else ""


def _no_momentum(draft: Draft, facts: Facts) -> str:
    return "--optimizer adam has moments of its own (--adam-beta1)" if draft["optimizer"] != "sgd" else ""


IDLE_OF_PRECISION: dict[str, Reason] = {
    **{n: _of_the_search(n) for n in table() if "loss_scale" in n or n == "hysteresis"},
    "loss_scale": _nothing_scaled,
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_eps"), _not_adam),
    "sgd_momentum": _no_momentum,
}
