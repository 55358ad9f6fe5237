"""Which layers have experts, as `--moe-layer-freq` says it: every N-th, or a list written with + and *."""

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
