"""Specs of the layers of GPT-like models."""

from pentatron.megatron.core.transformer.transformer_config import TransformerConfig, core_of
from pentatron.models import layer_specs
from pentatron.models.layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from pentatron.nn.spec import TransformerBlockSubmodules
from pentatron.settings.model import TransformerConfig as OwnConfig


def get_gpt_decoder_block_spec(
    config: TransformerConfig | OwnConfig,
    use_transformer_engine: bool,
    normalization: str | None = None,
    qk_l2_norm: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """Every layer of the model, those with experts and those without; a stage takes the layers it holds."""
    return layer_specs.get_gpt_decoder_block_spec(
        core_of(config), use_transformer_engine, normalization, qk_l2_norm, vp_stage
    )


__all__ = [
    "get_gpt_decoder_block_spec",
    "get_gpt_layer_local_spec",
    "get_gpt_layer_with_transformer_engine_spec",
]
