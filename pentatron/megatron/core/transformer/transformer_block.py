"""The layers of a model."""

from pentatron.nn.spec import TransformerBlockSubmodules

__all__ = ["TransformerBlockSubmodules"]
