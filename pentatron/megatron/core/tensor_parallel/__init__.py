"""Layers and functions of the tensor axis."""

from pentatron.megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from pentatron.megatron.core.tensor_parallel.data import broadcast_data
from pentatron.megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "broadcast_data",
    "vocab_parallel_cross_entropy",
]
