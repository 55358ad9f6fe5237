"""Attention between queries, keys and values."""

from pentatron.nn.attention import DotProductAttention

__all__ = ["DotProductAttention"]
