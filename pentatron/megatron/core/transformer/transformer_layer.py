"""A layer."""

from pentatron.nn.spec import TransformerLayerSubmodules
from pentatron.nn.transformer_layer import TransformerLayer

__all__ = ["TransformerLayer", "TransformerLayerSubmodules"]
