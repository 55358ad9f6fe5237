"""Attention."""

from pentatron.nn.attention import SelfAttention
from pentatron.nn.spec import SelfAttentionSubmodules

__all__ = ["SelfAttention", "SelfAttentionSubmodules"]
