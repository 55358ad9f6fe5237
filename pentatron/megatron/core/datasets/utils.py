"""Reading the words that name data."""

from collections.abc import Sequence

from pentatron.megatron.core.datasets.gpt_dataset import Blend
from pentatron.settings.data_paths import Blend as OwnBlend


def get_blend_from_list(blend: Sequence[str] | None) -> Blend | None:
    """`P1 P2 …` or `W1 P1 W2 P2 …` as prefixes and weights."""
    if not blend:
        return None
    parsed = OwnBlend.parse(blend)
    return list(parsed.prefixes), None if parsed.weights is None else list(parsed.weights)
