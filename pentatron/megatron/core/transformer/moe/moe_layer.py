"""A layer of experts."""

from pentatron.nn.moe import MoE as MoELayer

__all__ = ["MoELayer"]
