"""Positions."""

from pentatron.nn.rope import RotaryEmbedding

__all__ = ["RotaryEmbedding"]
