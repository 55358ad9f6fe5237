"""Rules about number formats and loss scales."""

from math import gcd

from pentatron.config.settings import Settings
from pentatron.devices import FP8_MULTIPLE


def _precision(s: Settings) -> str | None:
    return "--fp16 and --bf16 exclude each other; choose one" if s.fp16 and s.bf16 else None


def _smallest_scale(s: Settings) -> str | None:
    first, least = s.initial_loss_scale, s.min_loss_scale
    if first >= least or s.loss_scale:
        return None
    return f"--initial-loss-scale {first:g} is below --min-loss-scale {least:g}; raise the first or lower the second"


def _beside_fp8(s: Settings) -> str | None:
    if s.fp8_format is None or s.bf16:
        return None
    return f"--fp8 {s.fp8_format} is for matmuls of models in bf16; add --bf16, or leave it out"


def _fp8_on_a_cpu(s: Settings) -> str | None:
    """What is known without a look at the device; whether a GPU has such matmuls is asked where it is (`require_fp8`)."""
    if s.fp8_format is None or s.device != "cpu":
        return None
    return (
        f"--fp8 {s.fp8_format} needs a GPU with fp8 matmuls, and --device cpu has none; leave one of them out"
    )


def _fp8_tokens(s: Settings) -> str | None:
    """Gradients of weights are sums over the tokens of a micro-batch."""
    if s.fp8_format is None:
        return None
    length, ranks = s.seq_length, s.context_parallel_size
    shared = f" / {ranks} context ranks" if ranks > 1 else ""
    for name in ("micro_batch_size", "eval_micro_batch_size"):
        size = getattr(s, name) or s.micro_batch_size
        tokens = size * length // ranks
        if tokens % FP8_MULTIPLE:
            fitting = FP8_MULTIPLE // gcd(FP8_MULTIPLE, length // ranks)
            return (
                f"--fp8 {s.fp8_format} needs a multiple of {FP8_MULTIPLE} tokens in a micro-batch, and {size} × {length}{shared} is "
                f"{tokens}; take a multiple of {fitting} for --{name.replace('_', '-')}, or one of {FP8_MULTIPLE * ranks} for --seq-length"
            )
    return None


def _fp8_layers(s: Settings) -> str | None:
    if s.fp8_format is None or not s.first_last_layers_bf16:
        return None
    first, last, layers = s.num_layers_at_start_in_bf16, s.num_layers_at_end_in_bf16, s.num_layers
    if first + last < layers or s.fp8_output_layer:
        return None
    return (
        f"--first-last-layers-bf16 with {first} first and {last} last layers leaves none of {layers} for --fp8; lower "
        f"--num-layers-at-start-in-bf16 or --num-layers-at-end-in-bf16, or leave --fp8 out"
    )


PRECISION_RULES = (_precision, _smallest_scale, _beside_fp8, _fp8_on_a_cpu, _fp8_tokens, _fp8_layers)
