"""Configuration and parts of transformer layers."""

from pentatron.megatron.core.transformer.spec_utils import ModuleSpec, build_module
from pentatron.megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["ModuleSpec", "TransformerConfig", "build_module"]
