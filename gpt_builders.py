"""Builders of GPT-like models, for `model_provider`."""

from types import SimpleNamespace

from pentatron.megatron.core.models.gpt import GPTModel
from pentatron.megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from pentatron.megatron.core.transformer import ModuleSpec, TransformerConfig
from pentatron.megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from pentatron.megatron.core.transformer.transformer_config import core_of
from pentatron.megatron.state import ProcessGroups
from pentatron.megatron.training.arguments import core_transformer_config_from_args
from pentatron.models.layer_specs import user_spec
from pentatron.settings.core_config import arguments
from pentatron.settings.run_config import RunConfig


def gpt_builder(
    args: RunConfig | SimpleNamespace,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
    pg_collection: ProcessGroups | None = None,
) -> GPTModel:
    """Builds a model of the given architecture; `args` is `get_args()` or a resolved configuration."""
    args = arguments(args) if isinstance(args, RunConfig) else args
    if config is None:
        config = core_transformer_config_from_args(args)
    chosen = user_spec(core_of(config)) or _spec(args, config, vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=chosen,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def _spec(
    args: SimpleNamespace, config: TransformerConfig, vp_stage: int | None
) -> ModuleSpec | TransformerBlockSubmodules:
    """Returns one spec for all layers, or a spec per layer if there are experts.

    Experts may be in some of the layers only.
    """
    use_te = args.transformer_impl == "transformer_engine"
    if args.num_experts:
        return get_gpt_decoder_block_spec(
            config, use_te, normalization=args.normalization, qk_l2_norm=args.qk_l2_norm, vp_stage=vp_stage
        )
    if use_te:
        return get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=args.qk_layernorm,
            multi_latent_attention=args.multi_latent_attention,
            qk_l2_norm=args.qk_l2_norm,
        )
    return get_gpt_layer_local_spec(
        qk_layernorm=args.qk_layernorm,
        multi_latent_attention=args.multi_latent_attention,
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
    )
