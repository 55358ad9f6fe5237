"""Which layers have experts, as `--moe-layer-freq` says it: every N-th, or a list written with + and *."""

from typing import TYPE_CHECKING

from pentatron.config.layer_pattern import layer_pattern

if TYPE_CHECKING:
    from pentatron.config.model import MoEConfig, TransformerConfig


def moe_layers(frequency: str, num_layers: int) -> tuple[bool, ...]:
    """For every layer, whether it has experts. Raises ValueError with a sentence for what cannot be read."""
    found = layer_pattern("--moe-layer-freq", frequency, num_layers, "[0]*1+[1]*26")
    if found == 0:
        raise ValueError("--moe-layer-freq 0 gives no layer experts; use 1 or more")
    if isinstance(found, int):
        return tuple(number % found == 0 for number in range(num_layers))
    if not any(found):
        raise ValueError(
            f"--moe-layer-freq {frequency} gives no layer experts; write a 1 for each that has them"
        )
    return tuple(bool(entry) for entry in found)


def inner_widths(model: "TransformerConfig", moe: "MoEConfig", sparse_layers: int) -> int:
    """Of the feed-forward parts of all layers together, as one token sees them: of experts, those it is sent to."""
    dense = model.num_layers * model.ffn_hidden_size
    if moe.num_experts is None:
        return int(dense)
    sparse = moe.moe_router_topk * moe.moe_ffn_hidden_size
    sparse += moe.moe_shared_expert_intermediate_size or 0
    return int(dense + sparse_layers * (sparse - model.ffn_hidden_size))
