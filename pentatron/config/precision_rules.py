"""Rules and notices about number formats, loss scales and the rule of updates."""

from collections.abc import Callable, Mapping
from math import gcd
from typing import Any

from pentatron.config.decisions import FP8_MULTIPLE
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


def _beside_fp8(v: Values, facts: Facts) -> str | None:
    if v["fp8_format"] is None or v["bf16"]:
        return None
    return f"--fp8 {v['fp8_format']} is for matmuls of models in bf16; add --bf16, or leave it out"


def _fp8_on_a_cpu(v: Values, facts: Facts) -> str | None:
    """What is known without a look at the device; whether a GPU has such matmuls is asked where it is (`require_fp8`)."""
    if v["fp8_format"] is None or v["device"] != "cpu":
        return None
    return f"--fp8 {v['fp8_format']} needs a GPU with fp8 matmuls, and --device cpu has none; leave one of them out"


def _fp8_tokens(v: Values, facts: Facts) -> str | None:
    """Gradients of weights are sums over the tokens of a micro-batch."""
    if v["fp8_format"] is None:
        return None
    length, ranks = v["seq_length"], v["context_parallel_size"]
    shared = f" / {ranks} context ranks" if ranks > 1 else ""
    for name in ("micro_batch_size", "eval_micro_batch_size"):
        size = v[name] or v["micro_batch_size"]
        tokens = size * length // ranks
        if tokens % FP8_MULTIPLE:
            fitting = FP8_MULTIPLE // gcd(FP8_MULTIPLE, length // ranks)
            return (
                f"--fp8 {v['fp8_format']} needs a multiple of {FP8_MULTIPLE} tokens in a micro-batch, and {size} × {length}{shared} is "
                f"{tokens}; take a multiple of {fitting} for --{name.replace('_', '-')}, or one of {FP8_MULTIPLE * ranks} for --seq-length"
            )
    return None


def _fp8_layers(v: Values, facts: Facts) -> str | None:
    if v["fp8_format"] is None or not v["first_last_layers_bf16"]:
        return None
    first, last, layers = v["num_layers_at_start_in_bf16"], v["num_layers_at_end_in_bf16"], v["num_layers"]
    if first + last < layers or v["fp8_output_layer"]:
        return None
    return (
        f"--first-last-layers-bf16 with {first} first and {last} last layers leaves none of {layers} for --fp8; lower "
        f"--num-layers-at-start-in-bf16 or --num-layers-at-end-in-bf16, or leave --fp8 out"
    )


PRECISION_RULES = (_precision, _smallest_scale, _beside_fp8, _fp8_on_a_cpu, _fp8_tokens, _fp8_layers)


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
