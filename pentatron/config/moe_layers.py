"""Which layers have experts, as `--moe-layer-freq` says it: every N-th, or a list written with + and *."""

from collections.abc import Mapping
from typing import Any

from pentatron.config.layer_pattern import layer_pattern


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


def inner_widths(settings: Mapping[str, Any], sparse_layers: int) -> int:
    """Of the feed-forward parts of all layers together, as one token sees them: of experts, those it is sent to."""
    dense = settings["num_layers"] * settings["ffn_hidden_size"]
    if settings["num_experts"] is None:
        return int(dense)
    sparse = settings["moe_router_topk"] * settings["moe_ffn_hidden_size"]
    sparse += settings["moe_shared_expert_intermediate_size"] or 0
    return int(dense + sparse_layers * (sparse - settings["ffn_hidden_size"]))
