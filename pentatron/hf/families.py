"""Supported model families, and the mapping of their config.json keys to settings.

The default of a key is that of the configuration class in `transformers`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pentatron.hf import config_reader
from pentatron.hf.config_reader import Heads, LayersWithExperts, Rotary, WindowByLayer, WindowEverywhere


@dataclass(frozen=True)
class Key:
    """A config.json key and the settings with its value, or with the negated value if `inverted`."""

    theirs: str
    # Names separated by spaces.
    ours: str
    kind: type
    default: Any
    inverted: bool = False
    # Another name of the key.
    also: str = ""


@dataclass(frozen=True)
class Family:
    """A model family. `fixed` are settings of all its models.

    `required` are the supported values of keys, of which the first one is written."""

    architecture: str
    fixed: Mapping[str, Any]
    keys: tuple[Key, ...]
    parts: tuple[config_reader.KeyGroup, ...] = ()
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


_LLAMA_STYLE: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "hidden_dropout": 0.0,
}


def _llama_keys(
    vocabulary: int, hidden: int, inner: int, layers: int, positions: int, epsilon: float = 1e-6
) -> tuple[Key, ...]:
    return (
        Key("vocab_size", "vocab_size", int, vocabulary),
        Key("hidden_size", "hidden_size", int, hidden),
        Key("intermediate_size", "ffn_hidden_size", int, inner),
        Key("num_hidden_layers", "num_layers", int, layers),
        Key("max_position_embeddings", "max_position_embeddings", int, positions),
        Key("rms_norm_eps", "layernorm_epsilon", float, epsilon),
        Key("initializer_range", "init_method_std", float, 0.02),
        Key("attention_dropout", "attention_dropout", float, 0.0),
        Key("tie_word_embeddings", "untie_embeddings_and_output_weights", bool, False, inverted=True),
    )


_MLP_BIAS = Key("mlp_bias", "add_mlp_bias", bool, False)
_ATTENTION_BIAS = Key("attention_bias", "add_qkv_bias add_proj_bias", bool, False)


def _expert_keys(experts: str, also: str, count: int, topk: int) -> tuple[Key, ...]:
    number = Key(experts, "num_experts", int, count, also=also)
    return number, Key("num_experts_per_tok", "moe_router_topk", int, topk)


def _llama_family(
    architecture: str,
    keys: tuple[Key, ...],
    parts: tuple[config_reader.KeyGroup, ...],
    required: Mapping[str, tuple[Any, ...]] | None = None,
    **fixed: Any,
) -> Family:
    activations = {"hidden_act": ("silu", "swish")}
    return Family(architecture, {**_LLAMA_STYLE, **fixed}, keys, parts, {**activations, **(required or {})})


_PRE_SOFTMAX = Key("norm_topk_prob", "moe_router_pre_softmax", bool, False, inverted=True)

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {
            "normalization": "LayerNorm",
            "gated_linear_unit": False,
            "add_bias_linear": True,
            "position_embedding_type": "learned_absolute",
        },
        (
            Key("vocab_size", "vocab_size", int, 50257),
            Key("n_positions", "max_position_embeddings", int, 1024),
            Key("n_embd", "hidden_size", int, 768),
            Key("n_layer", "num_layers", int, 12),
            Key("n_head", "num_attention_heads num_query_groups", int, 12),
            Key("layer_norm_epsilon", "layernorm_epsilon", float, 1e-5),
            Key("initializer_range", "init_method_std", float, 0.02),
            Key("attn_pdrop", "attention_dropout", float, 0.1),
            Key("tie_word_embeddings", "untie_embeddings_and_output_weights", bool, True, inverted=True),
        ),
        (config_reader.Gpt2Widths(),),
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
    ),
    "llama": _llama_family(
        "LlamaForCausalLM",
        (*_llama_keys(32000, 4096, 11008, 32, 2048), _ATTENTION_BIAS, _MLP_BIAS),
        (Heads(32, None), Rotary()),
    ),
    "mistral": _llama_family(
        "MistralForCausalLM",
        _llama_keys(32000, 4096, 14336, 32, 131072),
        (Heads(32, 8), Rotary(), WindowEverywhere(4096)),
    ),
    "qwen2": _llama_family(
        "Qwen2ForCausalLM",
        _llama_keys(151936, 4096, 22016, 32, 32768),
        (Heads(32, 32), Rotary(), WindowByLayer()),
        add_qkv_bias=True,
    ),
    "qwen3": _llama_family(
        "Qwen3ForCausalLM",
        (*_llama_keys(151936, 4096, 22016, 32, 32768), _ATTENTION_BIAS),
        (Heads(32, 32, 128), Rotary(), WindowByLayer()),
        qk_layernorm=True,
    ),
    "mixtral": _llama_family(
        "MixtralForCausalLM",
        (
            *_llama_keys(32000, 4096, 14336, 32, 131072, 1e-5),
            Key("intermediate_size", "moe_ffn_hidden_size", int, 14336),
            *_expert_keys("num_local_experts", "num_experts", 8, 2),
        ),
        (Heads(32, 8), Rotary(1e6), WindowEverywhere(None)),
        {"router_jitter_noise": (0.0,)},
        moe_router_score_function="softmax",
        moe_router_pre_softmax=False,
        moe_layer_freq="1",
    ),
    "qwen2_moe": _llama_family(
        "Qwen2MoeForCausalLM",
        (
            *_llama_keys(151936, 2048, 5632, 24, 32768),
            *_expert_keys("num_experts", "num_local_experts", 60, 4),
            Key("moe_intermediate_size", "moe_ffn_hidden_size", int, 1408),
            Key("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", int, 5632),
            _PRE_SOFTMAX,
            Key("qkv_bias", "add_qkv_bias", bool, True),
        ),
        (Heads(16, 16), Rotary(), WindowByLayer(by_number=False), LayersWithExperts()),
        moe_router_score_function="softmax",
        moe_shared_expert_gate=True,
    ),
    "qwen3_moe": _llama_family(
        "Qwen3MoeForCausalLM",
        (
            *_llama_keys(151936, 2048, 6144, 24, 32768),
            *_expert_keys("num_experts", "num_local_experts", 128, 8),
            Key("moe_intermediate_size", "moe_ffn_hidden_size", int, 768),
            _PRE_SOFTMAX,
            _ATTENTION_BIAS,
        ),
        (Heads(32, 4), Rotary(), WindowEverywhere(4096, switched=True), LayersWithExperts()),
        moe_router_score_function="softmax",
        qk_layernorm=True,
    ),
}

# Keys of some families that are allowed in others only with the value that has no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "layer_types": (),
    "rope_scaling": (),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
    "quantization_config": (),
    "auto_map": (),
    "text_config": (),
    "mlp_only_layers": ([],),
}

# Keys without an effect on the model: names, tokens, text generation, execution, training losses.
INERT = frozenset(
    """
    model_type architectures transformers_version torch_dtype dtype _name_or_path name_or_path _commit_hash
    _attn_implementation _attn_implementation_autoset attn_implementation use_flash_attention_2 unsloth_version
    unsloth_fixed transformers.js_config is_llama_config max_sequence_length seq_length
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id mask_token_id decoder_start_token_id
    tokenizer_class prefix suffix model_max_length
    use_cache output_attentions output_hidden_states return_dict return_dict_in_generate output_scores torchscript
    chunk_size_feed_forward gradient_checkpointing low_cpu_mem_usage use_bfloat16 tf_legacy_loss tie_encoder_decoder
    is_decoder cross_attention_hidden_size pretraining_tp reorder_and_upcast_attn n_ctx
    id2label label2id num_labels problem_type finetuning_task task_specific_params
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    output_router_logits router_aux_loss_coef max_window_layers
    """.split()
)
