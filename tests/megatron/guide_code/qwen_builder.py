# The builder of guide 001, section 5.2: what a user has beside the script.
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.training.arguments import core_transformer_config_from_args


def qwen_builder(args, pre_process, post_process, vp_stage=None, config=None, pg_collection=None):
    if config is None:
        config = core_transformer_config_from_args(args)

    assert config.normalization == "RMSNorm", "Qwen requires RMSNorm"
    assert config.gated_linear_unit, "Qwen requires SwiGLU"

    use_te = args.transformer_impl == "transformer_engine"

    if use_te:
        transformer_layer_spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=args.num_experts,
            moe_grouped_gemm=args.moe_grouped_gemm,
            qk_layernorm=args.qk_layernorm,
            moe_use_legacy_grouped_gemm=args.moe_use_legacy_grouped_gemm,
        )
    else:
        transformer_layer_spec = get_gpt_layer_local_spec(
            num_experts=args.num_experts,
            qk_layernorm=args.qk_layernorm,
            normalization=args.normalization,
        )

    model = GPTModel(
        config=config,
        transformer_layer_spec=transformer_layer_spec,
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

    return model
