"""The tables of Megatron-LM's modules: docstrings, and where their names are imported from.

`import pentatron.megatron.core.transformer.mlp` makes a module from the rows "core.transformer.mlp". To add a
name, write it behind the module that defines it, as in an import statement. Every package needs a docstring,
even without names.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Module:
    """One module of Megatron-LM.

    `imports` maps a module of Pentatron to the names taken from it. `unavailable` maps names to the sentence
    of the ImportError they raise.
    """

    doc: str
    imports: Mapping[str, str]
    unavailable: Mapping[str, str]


_OF_THE_RUN = "get_args, get_one_logger, get_tensorboard_writer, get_timers, get_tokenizer, get_wandb_writer"
_NO_WRAPPER = "setup_model_and_optimizer() returns models whose gradients the loop and train_step() reduce themselves; leave it out"

_DOCS = {
    "core": "Megatron-core's names.",
    "core.parallel_state": "Ranks, sizes and process groups of the parallel axes.",
    "core.enums": "Model types.",
    "core.model_parallel_config": "The configuration of the layout.",
    "core.utils": "Utilities for models.",
    "core.models": "Models.",
    "core.models.common": "Parts that models share.",
    "core.models.common.embeddings": "Embeddings.",
    "core.models.common.embeddings.language_model_embedding": "Word embedding and learned position embedding.",
    "core.models.common.embeddings.rotary_pos_embedding": "Rotary position embedding.",
    "core.models.gpt": "GPT models.",
    "core.models.gpt.gpt_model": "The GPT model.",
    "core.models.gpt.gpt_layer_specs": "Layer specs of GPT models.",
    "core.transformer": "Configuration and parts of transformer layers.",
    "core.transformer.attention": "Self-attention.",
    "core.transformer.dot_product_attention": "Dot-product attention.",
    "core.transformer.enums": "Attention mask types.",
    "core.transformer.identity_op": "The identity, for empty slots of a spec.",
    "core.transformer.mlp": "The MLP.",
    "core.transformer.moe": "Mixture of experts.",
    "core.transformer.moe.moe_layer": "The mixture-of-experts layer.",
    "core.transformer.spec_utils": "Module specs, and the function that builds modules from them.",
    "core.transformer.transformer_block": "The layers of a model.",
    "core.transformer.transformer_config": "The configuration of a model.",
    "core.transformer.transformer_layer": "The transformer layer.",
    "core.tensor_parallel": "Layers and functions for tensor parallelism.",
    "core.tensor_parallel.cross_entropy": "Cross entropy over a vocabulary split across tensor ranks.",
    "core.tensor_parallel.data": "Batches for tensor ranks.",
    "core.tensor_parallel.layers": "Linear layers and embeddings split across tensor ranks.",
    "core.pipeline_parallel": "Pipeline schedules (`pentatron.layout.schedules`), which the training loop runs itself.",
    "core.distributed": "Gradient reduction (`pentatron.parallel.reduction`), which the training loop does itself.",
    "core.datasets": "Datasets.",
    "core.datasets.blended_megatron_dataset_builder": "The builder of the train, validation and test datasets.",
    "core.datasets.gpt_dataset": "Datasets for next-token prediction, and their configuration.",
    "core.datasets.utils": "Parsing of data paths.",
    "training": "Megatron's training loop: its names over Pentatron's session, loop and checkpoints.",
    "training.arguments": "Configurations of models and datasets from the arguments.",
    "training.async_utils": "Asynchronous checkpoint saves.",
    "training.checkpointing": "Checkpoints.",
    "training.ft_integration": "NVIDIA's fault-tolerance package, which is not used.",
    "training.global_vars": "Arguments, timers and tokenizer of the run.",
    "training.initialize": "Initialisation of a run whose steps the program calls itself.",
    "training.one_logger_utils": "Hooks of NVIDIA's one_logger, which do nothing.",
    "training.training": "`pretrain()`, and its steps one by one.",
    "training.utils": "Printing, batches and masks.",
    "training.yaml_arguments": "Configurations from `--yaml-cfg`.",
    "legacy": "Megatron's older models, which it deprecates; empty here. See megatron.core.",
}

# For each module with names: the modules of Pentatron they come from, and "name, name as other" from each, or
# "*" for all public names that it defines.
_IMPORTS: dict[str, dict[str, str]] = {
    "core": {"megatron.core": "parallel_state as mpu, parallel_state"},
    "core.parallel_state": {"megatron.parallel_state": "*"},
    "core.enums": {"megatron.utils": "ModelType"},
    "core.model_parallel_config": {"megatron.config": "ModelParallelConfig"},
    "core.utils": {"megatron.utils": "divide, get_model_config, unwrap_model"},
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
        "megatron.pretrain": (
            "build_train_valid_test_data_iterators, evaluate_and_print_results, "
            "preprocess_common_state_dict, pretrain, setup_model_and_optimizer, train, train_step"
        ),
    },
    "training.utils": {
        "megatron.utils": (
            "append_to_progress_log, average_losses_across_data_parallel_group, "
            "get_batch_on_this_cp_rank, get_batch_on_this_tp_rank, get_ltor_masks_and_position_ids, "
            "is_last_rank, print_datetime, print_rank_0, print_rank_last, unwrap_model"
        )
    },
    "training.yaml_arguments": {"megatron.config": "core_transformer_config_from_yaml"},
}

# Names that raise an ImportError with this sentence.
_UNAVAILABLE: dict[str, dict[str, str]] = {
    "core.pipeline_parallel": {
        "get_forward_backward_func": "schedules are run by train_step() and train() of megatron.training.training; call one of them"
    },
    "core.distributed": dict.fromkeys(
        ("DistributedDataParallel", "DistributedDataParallelConfig", "finalize_model_grads"), _NO_WRAPPER
    ),
}

MODULES = {
    f"megatron.{name}": Module(doc, _IMPORTS.get(name, {}), _UNAVAILABLE.get(name, {}))
    for name, doc in _DOCS.items()
}
