"""The table of Megatron-LM's modules: module path, docstring, and where its names are imported from.

`import pentatron.megatron.core.transformer.mlp` makes a module from the row "megatron.core.transformer.mlp".
To add a name, write it behind the module that defines it, as in an import statement. Every package needs a
row, even without names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Module:
    """One module of Megatron-LM.

    `imports` maps a module to the names taken from it: "name, name as other", or "*" for all public names it
    defines. `unavailable` maps names to the sentence of the ImportError they raise.
    """

    doc: str
    imports: Mapping[str, str] = field(default_factory=dict)
    unavailable: Mapping[str, str] = field(default_factory=dict)


_NO_WRAPPER = "setup_model_and_optimizer() returns models whose gradients the loop and train_step() reduce themselves; leave it out"

MODULES: dict[str, Module] = {
    # --- megatron.core ---
    "megatron.core": Module(
        "Megatron-core's names.", {"pentatron.megatron.core": "parallel_state as mpu, parallel_state"}
    ),
    "megatron.core.parallel_state": Module(
        "Ranks, sizes and process groups of the parallel axes.", {"pentatron.megatron.parallel_state": "*"}
    ),
    "megatron.core.enums": Module("Model types.", {"pentatron.megatron.utils": "ModelType"}),
    "megatron.core.model_parallel_config": Module(
        "The configuration of the layout.", {"pentatron.megatron.config": "ModelParallelConfig"}
    ),
    "megatron.core.utils": Module(
        "Utilities for models.", {"pentatron.megatron.utils": "divide, get_model_config, unwrap_model"}
    ),
    # --- megatron.core.models ---
    "megatron.core.models": Module("Models."),
    "megatron.core.models.common": Module("Parts that models share."),
    "megatron.core.models.common.embeddings": Module("Embeddings.", {"pentatron.nn.rope": "RotaryEmbedding"}),
    "megatron.core.models.common.embeddings.language_model_embedding": Module(
        "Word embedding and learned position embedding.",
        {"pentatron.models.causal_lm": "Embedding as LanguageModelEmbedding"},
    ),
    "megatron.core.models.common.embeddings.rotary_pos_embedding": Module(
        "Rotary position embedding.", {"pentatron.nn.rope": "RotaryEmbedding"}
    ),
    "megatron.core.models.gpt": Module("GPT models.", {"pentatron.megatron.gpt_model": "GPTModel"}),
    "megatron.core.models.gpt.gpt_model": Module(
        "The GPT model.", {"pentatron.megatron.gpt_model": "GPTModel"}
    ),
    "megatron.core.models.gpt.gpt_layer_specs": Module(
        "Layer specs of GPT models.",
        {
            "pentatron.megatron.gpt_model": "get_gpt_decoder_block_spec",
            "pentatron.models.layer_specs": (
                "get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec"
            ),
        },
    ),
    # --- megatron.core.transformer ---
    "megatron.core.transformer": Module(
        "Configuration and parts of transformer layers.",
        {
            "pentatron.nn.spec": "ModuleSpec",
            "pentatron.megatron.config": "TransformerConfig",
            "pentatron.megatron.gpt_model": "build_module",
        },
    ),
    "megatron.core.transformer.attention": Module(
        "Self-attention.",
        {"pentatron.nn.attention": "SelfAttention", "pentatron.nn.spec": "SelfAttentionSubmodules"},
    ),
    "megatron.core.transformer.dot_product_attention": Module(
        "Dot-product attention.", {"pentatron.nn.attention": "DotProductAttention"}
    ),
    "megatron.core.transformer.enums": Module("Attention mask types.", {"pentatron.nn.spec": "AttnMaskType"}),
    "megatron.core.transformer.identity_op": Module(
        "The identity, for empty slots of a spec.", {"pentatron.nn.spec": "IdentityOp"}
    ),
    "megatron.core.transformer.mlp": Module(
        "The MLP.", {"pentatron.nn.mlp": "MLP", "pentatron.nn.spec": "MLPSubmodules"}
    ),
    "megatron.core.transformer.moe": Module("Mixture of experts."),
    "megatron.core.transformer.moe.moe_layer": Module(
        "The mixture-of-experts layer.", {"pentatron.nn.moe": "MoE as MoELayer"}
    ),
    "megatron.core.transformer.spec_utils": Module(
        "Module specs, and the function that builds modules from them.",
        {"pentatron.nn.spec": "ModuleSpec, import_named", "pentatron.megatron.gpt_model": "build_module"},
    ),
    "megatron.core.transformer.transformer_block": Module(
        "The layers of a model.", {"pentatron.nn.spec": "TransformerBlockSubmodules"}
    ),
    "megatron.core.transformer.transformer_config": Module(
        "The configuration of a model.", {"pentatron.megatron.config": "TransformerConfig, core_of"}
    ),
    "megatron.core.transformer.transformer_layer": Module(
        "The transformer layer.",
        {
            "pentatron.nn.transformer_layer": "TransformerLayer",
            "pentatron.nn.spec": "TransformerLayerSubmodules",
        },
    ),
    # --- megatron.core: parallelism ---
    "megatron.core.tensor_parallel": Module(
        "Layers and functions for tensor parallelism.",
        {
            "pentatron.megatron.tensor_parallel": (
                "ColumnParallelLinear, broadcast_data, vocab_parallel_cross_entropy"
            ),
            "pentatron.nn.linear": "RowParallelLinear, VocabParallelEmbedding",
        },
    ),
    "megatron.core.tensor_parallel.cross_entropy": Module(
        "Cross entropy over a vocabulary split across tensor ranks.",
        {"pentatron.megatron.tensor_parallel": "vocab_parallel_cross_entropy"},
    ),
    "megatron.core.tensor_parallel.data": Module(
        "Batches for tensor ranks.", {"pentatron.megatron.tensor_parallel": "broadcast_data"}
    ),
    "megatron.core.tensor_parallel.layers": Module(
        "Linear layers and embeddings split across tensor ranks.",
        {
            "pentatron.megatron.tensor_parallel": "ColumnParallelLinear",
            "pentatron.nn.linear": "RowParallelLinear, VocabParallelEmbedding",
        },
    ),
    "megatron.core.pipeline_parallel": Module(
        "Pipeline schedules (`pentatron.layout.schedules`), which the training loop runs itself.",
        unavailable={
            "get_forward_backward_func": (
                "schedules are run by train_step() and train() of megatron.training.training; call one of them"
            )
        },
    ),
    "megatron.core.distributed": Module(
        "Gradient reduction (`pentatron.parallel.reduction`), which the training loop does itself.",
        unavailable={
            "DistributedDataParallel": _NO_WRAPPER,
            "DistributedDataParallelConfig": _NO_WRAPPER,
            "finalize_model_grads": _NO_WRAPPER,
        },
    ),
    # --- megatron.core.datasets ---
    "megatron.core.datasets": Module("Datasets."),
    "megatron.core.datasets.blended_megatron_dataset_builder": Module(
        "The builder of the train, validation and test datasets.",
        {"pentatron.megatron.datasets": "BlendedMegatronDatasetBuilder"},
    ),
    "megatron.core.datasets.gpt_dataset": Module(
        "Datasets for next-token prediction, and their configuration.",
        {
            "pentatron.data.gpt_dataset": "GPTDataset",
            "pentatron.megatron.datasets": "GPTDatasetConfig, MockGPTDataset",
        },
    ),
    "megatron.core.datasets.utils": Module(
        "Parsing of data paths.", {"pentatron.megatron.datasets": "get_blend_from_list"}
    ),
    # --- megatron.training ---
    "megatron.training": Module(
        "Megatron's training loop: its names over Pentatron's session, loop and checkpoints.",
        {
            "pentatron.megatron.state": (
                "get_args, get_one_logger, get_tensorboard_writer, get_timers, get_tokenizer, "
                "get_wandb_writer"
            ),
            "pentatron.megatron.initialize": "initialize_megatron",
            "pentatron.megatron.utils": "is_last_rank, print_rank_0, print_rank_last",
            "pentatron.megatron.pretrain": "pretrain",
        },
    ),
    "megatron.training.arguments": Module(
        "Configurations of models and datasets from the arguments.",
        {
            "pentatron.megatron.datasets": "core_gpt_dataset_config_from_args",
            "pentatron.megatron.config": "core_transformer_config_from_args",
        },
    ),
    "megatron.training.async_utils": Module(
        "Asynchronous checkpoint saves.", {"pentatron.megatron.pretrain": "maybe_finalize_async_save"}
    ),
    "megatron.training.checkpointing": Module(
        "Checkpoints.",
        {
            "pentatron.megatron.pretrain": (
                "BasicLocalCheckpointManager, maybe_finalize_async_save, save_checkpoint"
            )
        },
    ),
    "megatron.training.ft_integration": Module(
        "NVIDIA's fault-tolerance package, which is not used.",
        {"pentatron.megatron.utils": "StateMachineActions, get_rank_monitor_client"},
    ),
    "megatron.training.global_vars": Module(
        "Arguments, timers and tokenizer of the run.",
        {
            "pentatron.megatron.state": (
                "get_args, get_one_logger, get_tensorboard_writer, get_timers, get_tokenizer, "
                "get_wandb_writer"
            )
        },
    ),
    "megatron.training.initialize": Module(
        "Initialisation of a run whose steps the program calls itself.",
        {
            "pentatron.megatron.initialize": "initialize_megatron",
            "pentatron.megatron.utils": "set_jit_fusion_options",
        },
    ),
    "megatron.training.one_logger_utils": Module(
        "Hooks of NVIDIA's one_logger, which do nothing.",
        {"pentatron.megatron.utils": "finish, get_timestamp_in_ms, on_pretrain_start, track_config_flags"},
    ),
    "megatron.training.training": Module(
        "`pretrain()`, and its steps one by one.",
        {
            "pentatron.megatron.utils": "append_to_progress_log, print_datetime",
            "pentatron.megatron.pretrain": (
                "build_train_valid_test_data_iterators, evaluate_and_print_results, "
                "preprocess_common_state_dict, pretrain, setup_model_and_optimizer, train, train_step"
            ),
        },
    ),
    "megatron.training.utils": Module(
        "Printing, batches and masks.",
        {
            "pentatron.megatron.utils": (
                "append_to_progress_log, average_losses_across_data_parallel_group, "
                "get_batch_on_this_cp_rank, get_batch_on_this_tp_rank, get_ltor_masks_and_position_ids, "
                "is_last_rank, print_datetime, print_rank_0, print_rank_last, unwrap_model"
            )
        },
    ),
    "megatron.training.yaml_arguments": Module(
        "Configurations from `--yaml-cfg`.",
        {"pentatron.megatron.config": "core_transformer_config_from_yaml"},
    ),
    # --- megatron.legacy ---
    "megatron.legacy": Module("Megatron's older models, which it deprecates; empty here. See megatron.core."),
}
