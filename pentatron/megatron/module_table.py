"""The tables of Megatron-LM's modules: where their names are imported from.

`import pentatron.megatron.core.transformer.mlp` finds a module made from the row "core.transformer.mlp".
To add a name, write it behind the module that defines it, as in an import statement. Every package needs a
row before those of its modules, even without names.
"""

_OF_THE_RUN = "get_args, get_one_logger, get_tensorboard_writer, get_timers, get_tokenizer, get_wandb_writer"
_NO_WRAPPER = "setup_model_and_optimizer() returns models whose gradients the loop and train_step() reduce themselves; leave it out"

# For each module: the modules of Pentatron its names come from, and "name, name as other" from each, or "*"
# for all public names that it defines.
MODULES: dict[str, dict[str, str]] = {
    "core": {"megatron.core": "parallel_state as mpu, parallel_state"},
    "core.parallel_state": {"megatron.parallel_state": "*"},
    "core.enums": {"megatron.utils": "ModelType"},
    "core.model_parallel_config": {"megatron.config": "ModelParallelConfig"},
    "core.utils": {"megatron.utils": "divide, get_model_config, unwrap_model"},
    "core.models": {},
    "core.models.common": {},
    "core.models.common.embeddings": {"nn.rope": "RotaryEmbedding"},
    "core.models.common.embeddings.language_model_embedding": {
        "models.causal_lm": "Embedding as LanguageModelEmbedding"
    },
    "core.models.common.embeddings.rotary_pos_embedding": {"nn.rope": "RotaryEmbedding"},
    "core.models.gpt": {"megatron.gpt_model": "GPTModel"},
    "core.models.gpt.gpt_model": {"megatron.gpt_model": "GPTModel"},
    "core.models.gpt.gpt_layer_specs": {
        "megatron.gpt_model": "get_gpt_decoder_block_spec",
        "models.layer_specs": "get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec",
    },
    "core.transformer": {
        "nn.spec": "ModuleSpec",
        "megatron.config": "TransformerConfig",
        "megatron.gpt_model": "build_module",
    },
    "core.transformer.attention": {"nn.attention": "SelfAttention", "nn.spec": "SelfAttentionSubmodules"},
    "core.transformer.dot_product_attention": {"nn.attention": "DotProductAttention"},
    "core.transformer.enums": {"nn.spec": "AttnMaskType"},
    "core.transformer.identity_op": {"nn.spec": "IdentityOp"},
    "core.transformer.mlp": {"nn.mlp": "MLP", "nn.spec": "MLPSubmodules"},
    "core.transformer.moe": {},
    "core.transformer.moe.moe_layer": {"nn.moe": "MoE as MoELayer"},
    "core.transformer.spec_utils": {
        "nn.spec": "ModuleSpec, import_named",
        "megatron.gpt_model": "build_module",
    },
    "core.transformer.transformer_block": {"nn.spec": "TransformerBlockSubmodules"},
    "core.transformer.transformer_config": {"megatron.config": "TransformerConfig, core_of"},
    "core.transformer.transformer_layer": {
        "nn.transformer_layer": "TransformerLayer",
        "nn.spec": "TransformerLayerSubmodules",
    },
    "core.tensor_parallel": {
        "megatron.tensor_parallel": "ColumnParallelLinear, broadcast_data, vocab_parallel_cross_entropy",
        "nn.linear": "RowParallelLinear, VocabParallelEmbedding",
    },
    "core.tensor_parallel.cross_entropy": {"megatron.tensor_parallel": "vocab_parallel_cross_entropy"},
    "core.tensor_parallel.data": {"megatron.tensor_parallel": "broadcast_data"},
    "core.tensor_parallel.layers": {
        "megatron.tensor_parallel": "ColumnParallelLinear",
        "nn.linear": "RowParallelLinear, VocabParallelEmbedding",
    },
    # The training loop runs the schedules (`pentatron.layout.schedules`) itself.
    "core.pipeline_parallel": {},
    # The training loop reduces the gradients (`pentatron.parallel.reduction`) itself.
    "core.distributed": {},
    "core.datasets": {},
    "core.datasets.blended_megatron_dataset_builder": {"megatron.datasets": "BlendedMegatronDatasetBuilder"},
    "core.datasets.gpt_dataset": {
        "data.gpt_dataset": "GPTDataset",
        "megatron.datasets": "GPTDatasetConfig, MockGPTDataset",
    },
    "core.datasets.utils": {"megatron.datasets": "get_blend_from_list"},
    "training": {
        "megatron.state": _OF_THE_RUN,
        "megatron.initialize": "initialize_megatron",
        "megatron.utils": "is_last_rank, print_rank_0, print_rank_last",
        "megatron.pretrain": "pretrain",
    },
    "training.arguments": {
        "megatron.datasets": "core_gpt_dataset_config_from_args",
        "megatron.config": "core_transformer_config_from_args",
    },
    "training.async_utils": {"megatron.pretrain": "maybe_finalize_async_save"},
    "training.checkpointing": {
        "megatron.pretrain": "BasicLocalCheckpointManager, maybe_finalize_async_save, save_checkpoint"
    },
    # NVIDIA's packages for fault tolerance (here) and for one_logger are not used.
    "training.ft_integration": {"megatron.utils": "StateMachineActions, get_rank_monitor_client"},
    "training.global_vars": {"megatron.state": _OF_THE_RUN},
    "training.initialize": {
        "megatron.initialize": "initialize_megatron",
        "megatron.utils": "set_jit_fusion_options",
    },
    "training.one_logger_utils": {
        "megatron.utils": "finish, get_timestamp_in_ms, on_pretrain_start, track_config_flags"
    },
    "training.training": {
        "megatron.utils": "append_to_progress_log, print_datetime",
        "megatron.pretrain": "*",
    },
    "training.utils": {
        "megatron.utils": (
            "append_to_progress_log, average_losses_across_data_parallel_group, "
            "get_batch_on_this_cp_rank, get_batch_on_this_tp_rank, get_ltor_masks_and_position_ids, "
            "is_last_rank, print_datetime, print_rank_0, print_rank_last, unwrap_model"
        )
    },
    "training.yaml_arguments": {"megatron.config": "core_transformer_config_from_yaml"},
    # Megatron's older models, which it deprecates.
    "legacy": {},
}

# Names that raise an ImportError with this sentence.
UNAVAILABLE: dict[str, dict[str, str]] = {
    "core.pipeline_parallel": {
        "get_forward_backward_func": "schedules are run by train_step() and train() of megatron.training.training; call one of them"
    },
    "core.distributed": dict.fromkeys(
        ("DistributedDataParallel", "DistributedDataParallelConfig", "finalize_model_grads"), _NO_WRAPPER
    ),
}
