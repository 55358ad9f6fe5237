"""Which layers have fp8 matmuls."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pentatron.config.parallel import PrecisionConfig

# Sides of the matrices that GPUs multiply in fp8.
FP8_MULTIPLE = 16


def fp8_layers(precision: "PrecisionConfig", layers: int) -> range:
    """Of so many, counted from 0."""
    if precision.fp8_format is None:
        return range(0)
    if not precision.first_last_layers_bf16:
        return range(layers)
    return range(precision.num_layers_at_start_in_bf16, layers - precision.num_layers_at_end_in_bf16)
