"""The MLP."""

from pentatron.nn.mlp import MLP
from pentatron.nn.spec import MLPSubmodules

__all__ = ["MLP", "MLPSubmodules"]
