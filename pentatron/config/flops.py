"""Floating-point operations of a training step: matmuls forward and backward, attention counted causally."""

from pentatron.config.model import NO_EXPERTS, MoEConfig, TransformerConfig
from pentatron.config.moe_layers import inner_widths, moe_layers
from pentatron.config.parameters import attention_sizes, matrices_of
from pentatron.config.windows import window_of, windowed_layers

_MULTIPLY_ADD_FORWARD_BACKWARD = 6  # 2 per multiply-add, once forward and twice backward
# The share of its peak that a GPU reaches, and the TFLOP/s taken for a GPU that is not known.
_USUAL_SHARE, _USUAL_PEAK = 0.5, 300.0


def step_flops(config: TransformerConfig, batch: int, sequence: int, moe: MoEConfig = NO_EXPERTS) -> float:
    """FLOPs of one step over `batch` sequences; no recompute, embedding, router, softmax or norm is counted.

    Attention counts what a layer's window lets a token see. Where documents end is data, so masks between them are not subtracted.
    """
    hidden, attention = config.hidden_size, attention_sizes(config)
    attended = attention.linear_proj.inputs
    sparse = 0 if moe.num_experts is None else sum(moe_layers(moe.moe_layer_freq, config.num_layers))
    mlps = hidden * inner_widths(config, moe, sparse) * matrices_of(config)
    projections = attention.linear_qkv.multiplications + attention.linear_proj.multiplications
    per_token = mlps + config.num_layers * projections + hidden * config.padded_vocab_size
    return (
        _MULTIPLY_ADD_FORWARD_BACKWARD * batch * (sequence * per_token + _pairs(config, sequence) * attended)
    )


def layer_seconds(config: TransformerConfig, moe: MoEConfig, samples: int, peak: float | None) -> float:
    """About how long a GPU computes one layer of a micro-batch, forward and backward; `peak` in TFLOP/s."""
    flops = step_flops(config, samples, config.seq_length, moe)
    return flops / config.num_layers / ((peak or _USUAL_PEAK) * 1e12 * _USUAL_SHARE)


def _pairs(config: TransformerConfig, sequence: int) -> int:
    """Twice the pairs of tokens that all layers compare in a sequence: once for the weights, once for what they weigh."""
    layers, before = config.num_layers, window_of(config.window_size, None, 1, 1)
    if before is None:
        return layers * sequence * sequence
    windows, seen = sum(windowed_layers(config.window_attn_skip_freq, layers)), min(before + 1, sequence)
    # A band of this width below the diagonal; the first tokens have less behind them.
    return (layers - windows) * sequence * sequence + windows * seen * (2 * sequence - seen)
