"""Declares the settings of the architecture, experts (MoE) and kernels. Names are Megatron's."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack

from pentatron.settings import needs
from pentatron.settings.declaration import (
    BELOW_ONE,
    FRACTION,
    FREE,
    NON_NEGATIVE,
    ONE_OR_MORE,
    ORDER,
    POSITIVE,
    Limit,
    Need,
    SettingOptions,
    setting,
)
from pentatron.settings.layer_patterns import layer_pattern


def moe_setting(default: Any, help: str, *conditions: Limit | Need, **options: Unpack[SettingOptions]) -> Any:
    """Declares a setting that has no effect without experts."""
    return setting(default, help, needs.EXPERTS, *conditions, **options)


# Settings that weights do not depend on, so that they may differ in a loaded model.
training_setting = partial(setting, in_weights=False)
moe_training_setting = partial(moe_setting, in_weights=False)


@dataclass(frozen=True)
class TransformerConfig:
    """Model architecture"""

    num_layers: int = setting(4, "number of transformer layers", POSITIVE)
    hidden_size: int = setting(256, "width of the hidden states", POSITIVE)
    ffn_hidden_size: int = setting(None, "width of the MLP (4 × hidden; with SwiGLU 8/3 × hidden)", POSITIVE)
    num_attention_heads: int = setting(None, "number of attention heads (from the hidden size)", POSITIVE)
    kv_channels: int = setting(
        None, "width of one head (hidden / heads); heads × width may differ from hidden", POSITIVE
    )
    group_query_attention: bool = setting(False, "share each key/value head among several query heads (GQA)")
    num_query_groups: int = setting(None, "number of key/value heads with --group-query-attention", POSITIVE)
    seq_length: int = training_setting(256, "tokens per sample", POSITIVE, ORDER, also="--max_seq_len")
    max_position_embeddings: int = setting(None, "maximum sequence length (seq-length)", POSITIVE)
    vocab_size: int = setting(None, "vocabulary size (that of the tokenizer)", POSITIVE)
    make_vocab_size_divisible_by: int = training_setting(
        128, "pad the vocabulary to a multiple of N × tensor-parallel size", POSITIVE, needs.PADDING_NOT_GIVEN
    )
    padded_vocab_size: int = training_setting(None, "rows of the padded embedding (derived)", POSITIVE, FREE)

    normalization: str = setting("LayerNorm", "normalization layer", choices=("LayerNorm", "RMSNorm"))
    layernorm_epsilon: float = setting(1e-5, "epsilon of the norms", POSITIVE, also="--norm-epsilon")
    qk_layernorm: bool = setting(False, "normalize queries and keys (Qwen3)")
    qk_l2_norm: bool = setting(False, "L2-normalize queries and keys", not_yet="L2 norms of queries and keys")
    gated_linear_unit: bool = setting(False, "SwiGLU: gated SiLU MLP", also="--swiglu")
    add_bias_linear: bool = setting(
        True, "bias in linear layers", sets={"--disable-bias-linear": False, "--disable_bias_linear": False}
    )
    add_qkv_bias: bool = setting(False, "QKV projection bias (Qwen2.5)", needs.sole_bias("add_qkv_bias"))
    add_proj_bias: bool = setting(False, "attention output projection bias", needs.sole_bias("add_proj_bias"))
    add_mlp_bias: bool = setting(False, "MLP biases", needs.sole_bias("add_mlp_bias"))
    position_embedding_type: str = setting(
        "learned_absolute",
        "position embedding (yarn: rope with --rope-scaling-type yarn)",
        choices=("learned_absolute", "rope", "yarn", "none"),
        sets={"--use-rotary-position-embeddings": "rope"},
    )
    rotary_base: float = setting(10000.0, "base of the rotary frequencies", POSITIVE, needs.ROPE)
    rotary_percent: float = setting(1.0, "fraction of the head that is rotated", FRACTION, needs.ROPE)
    rotary_interleaved: bool = setting(False, "rotate adjacent channel pairs instead of halves", needs.ROPE)
    rope_scaling_type: str | None = setting(
        None,
        "method that scales rotary frequencies for sequences longer than in pretraining (none)",
        needs.ROPE,
        choices=("linear", "llama3", "yarn"),
        sets={"--use-rope-scaling": "llama3"},
    )
    rope_scaling_factor: float = setting(
        None,
        "RoPE scaling factor: new sequence length / sequence length of pretraining (llama3: 8)",
        ONE_OR_MORE,
        needs.ROPE_SCALING,
        also="--yarn-rotary-scaling-factor",
    )
    rope_scaling_original_max_position_embeddings: int = setting(
        None,
        "maximum sequence length of pretraining (llama3: 8192)",
        POSITIVE,
        needs.ORIGINAL_LENGTH,
        also="--yarn-original-max-position-embeddings",
    )
    rope_scaling_low_freq_factor: float = setting(
        1.0,
        "llama3: scale wavelengths that fit fewer than X times into the sequence length of pretraining",
        POSITIVE,
        needs.LLAMA3_SCALING,
    )
    rope_scaling_high_freq_factor: float = setting(
        4.0,
        "llama3: do not scale wavelengths that fit more than X times into the sequence length of pretraining",
        POSITIVE,
        needs.LLAMA3_SCALING,
    )
    rotary_seq_len_interpolation_factor: float | None = setting(
        None, "alias of --rope-scaling-type linear with this --rope-scaling-factor", ONE_OR_MORE, needs.ROPE
    )
    yarn_beta_fast: float = setting(
        32.0,
        "yarn: do not scale channel pairs with more than X rotations in the sequence length of pretraining",
        POSITIVE,
        needs.YARN,
    )
    yarn_beta_slow: float = setting(
        1.0,
        "yarn: scale channel pairs with fewer than X rotations in the sequence length of pretraining",
        POSITIVE,
        needs.YARN,
    )
    yarn_attention_factor: float | None = setting(
        None, "yarn: factor of rotated queries and keys (0.1·ln(factor) + 1)", POSITIVE, needs.YARN
    )
    yarn_mscale: float | None = setting(
        None,
        "yarn: mscale of the attention factor (0.1·mscale·ln(factor)+1) / (0.1·mscale_all_dim·ln(factor)+1)",
        NON_NEGATIVE,
        needs.YARN,
        needs.NO_FACTOR,
        needs.MSCALES,
    )
    yarn_mscale_all_dim: float | None = setting(
        None,
        "yarn: mscale_all_dim of the formula of --yarn-mscale",
        NON_NEGATIVE,
        needs.YARN,
        needs.NO_FACTOR,
        needs.MSCALES,
    )
    yarn_truncate: bool = setting(
        True,
        "yarn: round the range of partly scaled channel pairs to integers, outwards",
        needs.YARN,
        also="--yarn-correction-range-round-to-int",
    )
    window_size: tuple[int, ...] = setting(
        (),
        "sliding window LEFT,0: a token attends to itself and the LEFT tokens before it (LEFT -1 or not given: all tokens before it)",
        Limit(lambda left: left >= -1, "-1 or more"),
        needs.a_shorter_window,
    )
    window_attn_skip_freq: str | None = setting(
        None,
        "layers without sliding window: every N-th layer, or a list such as [1,1,0] with 1 for a window",
        needs.WINDOW,
    )
    untie_embeddings_and_output_weights: bool = setting(False, "separate embedding and output layer weights")
    hidden_dropout: float = training_setting(0.0, "dropout on the hidden states", BELOW_ONE)
    attention_dropout: float = training_setting(0.0, "dropout on attention weights", BELOW_ONE)
    init_method_std: float = training_setting(0.02, "standard deviation of the initial weights", NON_NEGATIVE)
    multi_latent_attention: bool = setting(False, "multi-latent attention", not_yet="multi-latent attention")
    spec: tuple[str, ...] = setting(
        (), "custom layers: MODULE FUNCTION, which returns the spec of one layer or of all", names_code=True
    )


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts"""

    num_experts: int | None = setting(None, "number of experts", POSITIVE)
    moe_layer_freq: str = moe_setting(
        "1", "layers with experts: every N-th layer, or a list such as [0]*1+[1]*26 with 1 for experts"
    )
    moe_ffn_hidden_size: int = moe_setting(None, "inner width of one expert (ffn-hidden-size)", POSITIVE)
    moe_router_topk: int = moe_setting(2, "experts per token", POSITIVE)
    moe_router_score_function: str = moe_setting(
        "softmax", "function from router logits to scores", choices=("softmax", "sigmoid")
    )
    moe_router_pre_softmax: bool = moe_setting(
        False, "softmax over all experts before the top-k, not over the selected ones", needs.SOFTMAX_SCORES
    )
    moe_router_topk_scaling_factor: float | None = moe_setting(
        None, "factor for the routing weights of the selected experts", POSITIVE
    )
    moe_router_num_groups: int | None = moe_setting(None, "expert groups for group-limited routing", POSITIVE)
    moe_router_group_topk: int = moe_setting(None, "number of expert groups that a token uses", POSITIVE)
    moe_router_dtype: str | None = moe_training_setting(
        None, "dtype of the router logits (dtype of the model)", choices=("fp32", "fp64")
    )
    moe_router_load_balancing_type: tuple[str, ...] = moe_training_setting(
        ("aux_loss",),
        "load-balancing losses of the experts, one or several",
        needs.BALANCING_WEIGHT,
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
    )
    moe_aux_loss_coeff: tuple[float, ...] = moe_training_setting(
        (0.0,), "weights of the load-balancing losses: one for all or one each", NON_NEGATIVE, needs.BALANCING
    )
    moe_z_loss_coeff: float | None = moe_training_setting(
        None, "weight of the router z-loss, which penalizes large logits", NON_NEGATIVE
    )
    moe_router_enable_expert_bias: bool = moe_setting(
        False, "balance experts without a loss, by a selection bias that is updated after every step"
    )
    moe_router_bias_update_rate: float = moe_training_setting(
        1e-3, "change of the expert selection bias per step", NON_NEGATIVE, needs.EXPERT_BIAS
    )
    moe_token_dispatcher_type: str = moe_training_setting(
        "alltoall", "how tokens are dispatched to experts", choices=("alltoall", "allgather")
    )
    moe_grouped_gemm: bool | None = training_setting(
        None,
        "run the experts of a rank as one grouped matmul (if its kernel exists: bf16 on a GPU)",
        sets={"--moe-grouped-gemm": True, "--no-moe-grouped-gemm": False},
    )
    moe_use_legacy_grouped_gemm: bool = moe_training_setting(
        False,
        "accepted for Megatron scripts: an older grouped matmul",
        notice="there is only one grouped matmul, so this has no effect",
    )
    moe_expert_capacity_factor: float | None = moe_training_setting(
        None, "drop the tokens of an expert above this multiple of the mean load (none are dropped)", POSITIVE
    )
    moe_token_drop_policy: str = moe_training_setting(
        "probs",
        "tokens to drop: those with the smallest routing weights (probs) or the last ones (position)",
        choices=("probs", "position"),
    )
    moe_shared_expert_intermediate_size: int | None = moe_setting(
        None, "inner width of a shared expert, which every token uses (no shared expert)", POSITIVE
    )
    moe_shared_expert_gate: bool = moe_setting(False, "scale the shared expert by a sigmoid gate (Qwen2-MoE)")
    moe_per_layer_logging: bool = moe_training_setting(
        False, "write the load of every layer's experts to metrics.jsonl"
    )

    @property
    def experts(self) -> int:
        """Number of experts; 0 for a dense model."""
        return self.num_experts or 0

    @property
    def shared_width(self) -> int:
        """Inner width of the shared expert; 0 if there is none."""
        return self.moe_shared_expert_intermediate_size or 0


NO_EXPERTS = MoEConfig()


@dataclass(frozen=True)
class KernelConfig:
    """Kernels"""

    transformer_impl: str = setting(
        "local",
        "implementation of the layers",
        choices=("local", "transformer_engine"),
        notice="there is only one implementation, in PyTorch, so this has no effect",
    )
    use_mcore_models: bool = setting(
        False,
        "accepted for Megatron scripts: the models of Megatron Core",
        notice="there is only one implementation of models, so this has no effect",
    )
    attention_backend: str = setting(
        "auto",
        "attention kernel",
        choices=("auto", "flash", "cudnn", "efficient", "math", "fused", "unfused", "local"),
    )
    compile: str = setting(
        "auto",
        "compile every layer with torch.compile: on a GPU (auto), always (on) or never (off)",
        choices=("auto", "on", "off"),
    )
    compile_layers_together: int = setting(
        1,
        "layers per compiled function: more layers take longer to compile, but reduce the host time of a step, which limits small models",
        POSITIVE,
    )
    cuda_graphs: str = setting(
        "auto",
        "capture forward and backward of a micro-batch as CUDA graphs: if launching kernels takes longer than computing (auto), always (on) or never (off)",
        choices=("auto", "on", "off", "local", "transformer_engine", "none"),
        also="--cuda-graph-impl",
        sets={"--enable-cuda-graph": "on", "--external-cuda-graph": "on"},
    )
    cuda_graph_scope: tuple[str, ...] = setting(
        (),
        "accepted for Megatron scripts: parts of the model to capture as CUDA graphs",
        notice="--cuda-graphs always captures forward and backward of a whole micro-batch",
    )
    cuda_graph_warmup_steps: int = setting(
        3,
        "accepted for Megatron scripts: steps before CUDA graphs are captured",
        NON_NEGATIVE,
        notice="--cuda-graphs captures after one run of the same shape, so in the second step",
    )
    attention_softmax_in_fp32: bool = setting(
        False, "take the softmax of attention in fp32", notice="attention always takes the softmax in fp32"
    )
    rope_fusion: bool = setting(
        True, "fused rotary kernel", notice="there is no separate rotary kernel, so this has no effect"
    )
    masked_softmax_fusion: bool = setting(
        True, "fused masked softmax", notice="attention has no separate masked softmax, so this has no effect"
    )
    bias_swiglu_fusion: bool = setting(
        True,
        "on a GPU, fuse the gate of an MLP in backward; without fp8, the activations between its matmuls are recomputed instead of stored",
    )
    fused_cross_entropy: str = setting(
        "auto",
        "compute the cross entropy without an fp32 copy of the logits, which their gradient overwrites (auto: on a GPU)",
        choices=("auto", "on", "off"),
        sets={"--cross-entropy-loss-fusion": "on", "--no-cross-entropy-loss-fusion": "off"},
    )
    cross_entropy_fusion_impl: str = setting(
        "auto",
        "implementation of the fused cross entropy: torch operators (native) or one Triton kernel (te) (auto: the kernel on a GPU with Triton)",
        choices=("auto", "native", "te"),
    )
    cross_entropy_chunk: int = setting(
        32768,
        "tokens per chunk of the fused cross entropy; with several chunks, logits are recomputed in backward",
        POSITIVE,
    )


def moe_layers(written: str, num_layers: int) -> tuple[bool, ...]:
    """Returns whether each layer has experts. Raises `ValueError` with a message for an invalid pattern."""
    pattern = layer_pattern("--moe-layer-freq", written, num_layers, "[0]*1+[1]*26")
    none = "leaves no layer with experts"
    if pattern == 0:
        raise ValueError(f"--moe-layer-freq 0 {none}; use 1 or more")
    if isinstance(pattern, int):
        return tuple(number % pattern == 0 for number in range(num_layers))
    if not any(pattern):
        raise ValueError(f"--moe-layer-freq {written} {none}; use 1 for layers with experts")
    return tuple(bool(entry) for entry in pattern)


def inner_widths(model: TransformerConfig, moe: MoEConfig, sparse_layers: int) -> int:
    """Returns the sum of the inner widths of all layers. Of experts, only the selected ones count."""
    dense = model.num_layers * model.ffn_hidden_size
    if moe.num_experts is None:
        return int(dense)
    sparse = moe.moe_router_topk * moe.moe_ffn_hidden_size + moe.shared_width
    return int(dense + sparse_layers * (sparse - model.ffn_hidden_size))
