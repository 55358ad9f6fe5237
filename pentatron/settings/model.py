"""The architecture: what the model is, whatever it runs on. Field names are Megatron's."""

from dataclasses import dataclass

from pentatron.settings.declaration import (
    ABOVE_ZERO,
    BELOW_ONE,
    FREE,
    ONE_OR_MORE,
    ORDER,
    SHARE,
    TOKENS_OR_ALL,
    ZERO_OR_MORE,
    setting,
)
from pentatron.settings.layers import layer_pattern
from pentatron.settings.needs import (
    BALANCING,
    BALANCING_WEIGHT,
    EXPERT_BIAS,
    EXPERTS,
    LLAMA3_SCALING,
    MLP_BIAS_ALONE,
    MSCALES,
    ORIGINAL_LENGTH,
    PADDING_NOT_GIVEN,
    PROJECTION_BIAS_ALONE,
    QKV_BIAS_ALONE,
    ROPE,
    ROPE_SCALING,
    SOFTMAX_SCORES,
    WINDOW,
    YARN,
    a_shorter_window,
)


@dataclass(frozen=True)
class TransformerConfig:
    """Model architecture"""

    num_layers: int = setting(4, "transformer layers", limit=ABOVE_ZERO)
    hidden_size: int = setting(256, "width of the residual stream", limit=ABOVE_ZERO)
    ffn_hidden_size: int = setting(
        None, "width inside the MLP (4 × hidden; with SwiGLU 8/3 × hidden)", limit=ABOVE_ZERO
    )
    num_attention_heads: int = setting(
        None, "attention heads (derived from the hidden size if not given)", limit=ABOVE_ZERO
    )
    kv_channels: int = setting(
        None, "width of one head (hidden / heads); heads × width may differ from hidden", limit=ABOVE_ZERO
    )
    group_query_attention: bool = setting(False, "share keys and values between groups of heads")
    num_query_groups: int = setting(None, "key/value heads with --group-query-attention", limit=ABOVE_ZERO)
    seq_length: int = setting(
        256, "tokens in one sample", also="--max_seq_len", limit=ABOVE_ZERO, resume=ORDER, in_weights=False
    )
    max_position_embeddings: int = setting(
        None, "longest sequence the model is made for (seq-length)", limit=ABOVE_ZERO
    )
    vocab_size: int = setting(None, "vocabulary size (from the tokenizer if not given)", limit=ABOVE_ZERO)
    make_vocab_size_divisible_by: int = setting(
        128,
        "pad the vocabulary to a multiple of this × tensor parallel size",
        limit=ABOVE_ZERO,
        needs=PADDING_NOT_GIVEN,
        in_weights=False,
    )
    padded_vocab_size: int = setting(
        None,
        "rows of the embedding, padding included (derived)",
        limit=ABOVE_ZERO,
        resume=FREE,
        in_weights=False,
    )

    normalization: str = setting("LayerNorm", "kind of norm", choices=("LayerNorm", "RMSNorm"))
    layernorm_epsilon: float = setting(1e-5, "epsilon of the norms", also="--norm-epsilon", limit=ABOVE_ZERO)
    qk_layernorm: bool = setting(False, "norm on queries and keys (Qwen3)")
    qk_l2_norm: bool = setting(
        False, "L2 norm on queries and keys", not_yet="the L2 norm of queries and keys"
    )
    gated_linear_unit: bool = setting(False, "gated SiLU MLP", also="--swiglu")
    add_bias_linear: bool = setting(
        True,
        "bias in the linear layers",
        sets={"--disable-bias-linear": False, "--disable_bias_linear": False},
    )
    add_qkv_bias: bool = setting(False, "bias in the QKV projection (Qwen2.5)", needs=QKV_BIAS_ALONE)
    add_proj_bias: bool = setting(
        False, "bias in the output projection of attention", needs=PROJECTION_BIAS_ALONE
    )
    add_mlp_bias: bool = setting(False, "biases in the MLP", needs=MLP_BIAS_ALONE)
    position_embedding_type: str = setting(
        "learned_absolute",
        "how positions are encoded (yarn: rope with --rope-scaling-type yarn)",
        choices=("learned_absolute", "rope", "yarn", "none"),
        sets={"--use-rotary-position-embeddings": "rope"},
    )
    rotary_base: float = setting(10000.0, "base of the rotary frequencies", limit=ABOVE_ZERO, needs=ROPE)
    rotary_percent: float = setting(1.0, "share of a head that is rotated", limit=SHARE, needs=ROPE)
    rotary_interleaved: bool = setting(False, "rotate neighbouring pairs instead of halves", needs=ROPE)
    rope_scaling_type: str | None = setting(
        None,
        "how rotary frequencies are stretched for sequences longer than those first trained on (not at all)",
        choices=("linear", "llama3", "yarn"),
        sets={"--use-rope-scaling": "llama3"},
        needs=ROPE,
    )
    rope_scaling_factor: float = setting(
        None,
        "how many times longer (llama3: 8)",
        also="--yarn-rotary-scaling-factor",
        limit=ONE_OR_MORE,
        needs=ROPE_SCALING,
    )
    rope_scaling_original_max_position_embeddings: int = setting(
        None,
        "longest sequence first trained on (llama3: 8192)",
        also="--yarn-original-max-position-embeddings",
        limit=ABOVE_ZERO,
        needs=ORIGINAL_LENGTH,
    )
    rope_scaling_low_freq_factor: float = setting(
        1.0,
        "llama3: waves that fit less often than this into that length are stretched",
        limit=ABOVE_ZERO,
        needs=LLAMA3_SCALING,
    )
    rope_scaling_high_freq_factor: float = setting(
        4.0, "llama3: waves that fit more often than this are kept", limit=ABOVE_ZERO, needs=LLAMA3_SCALING
    )
    rotary_seq_len_interpolation_factor: float | None = setting(
        None,
        "Megatron's words for --rope-scaling-type linear with this --rope-scaling-factor",
        limit=ONE_OR_MORE,
        needs=ROPE,
    )
    yarn_beta_fast: float = setting(
        32.0, "yarn: pairs of channels that turn more often than this are kept", limit=ABOVE_ZERO, needs=YARN
    )
    yarn_beta_slow: float = setting(
        1.0, "yarn: pairs that turn less often than this are stretched", limit=ABOVE_ZERO, needs=YARN
    )
    yarn_attention_factor: float | None = setting(
        None, "yarn: multiplies rotated queries and keys (0.1 ln(factor) + 1)", limit=ABOVE_ZERO, needs=YARN
    )
    yarn_mscale: float | None = setting(
        None,
        "yarn: with the next, another such factor: (0.1 × this × ln(factor) + 1) / (the same of the next)",
        limit=ZERO_OR_MORE,
        needs=MSCALES,
    )
    yarn_mscale_all_dim: float | None = setting(
        None, "yarn: what --yarn-mscale is divided by", limit=ZERO_OR_MORE, needs=MSCALES
    )
    yarn_truncate: bool = setting(
        True,
        "yarn: round the range of pairs between kept and stretched outwards",
        also="--yarn-correction-range-round-to-int",
        needs=YARN,
    )
    window_size: tuple[int, ...] = setting(
        (),
        "LEFT,0: a token sees itself and LEFT tokens before it (all of them; LEFT -1: all as well)",
        limit=TOKENS_OR_ALL,
        needs=a_shorter_window,
    )
    window_attn_skip_freq: str | None = setting(
        None,
        "which layers see everything all the same: every N-th, or a list such as [1,1,0] with 1 for a window",
        needs=WINDOW,
    )
    untie_embeddings_and_output_weights: bool = setting(False, "give the output layer a matrix of its own")
    hidden_dropout: float = setting(0.0, "dropout on the residual stream", limit=BELOW_ONE, in_weights=False)
    attention_dropout: float = setting(0.0, "dropout on attention weights", limit=BELOW_ONE, in_weights=False)
    init_method_std: float = setting(
        0.02, "standard deviation of the initial weights", limit=ZERO_OR_MORE, in_weights=False
    )
    multi_latent_attention: bool = setting(False, "multi-latent attention", not_yet="multi-latent attention")
    spec: tuple[str, ...] = setting(
        (),
        "layers of your own: MODULE FUNCTION, where the function gives the spec of a layer or of all layers",
        names_code=True,
    )


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts"""

    num_experts: int | None = setting(None, "number of experts", limit=ABOVE_ZERO)
    moe_layer_freq: str = setting(
        "1",
        "which layers have experts: every N-th, or a list such as [0]*1+[1]*26 with 1 for experts",
        needs=EXPERTS,
    )
    moe_ffn_hidden_size: int = setting(
        None, "width inside one expert (ffn-hidden-size)", limit=ABOVE_ZERO, needs=EXPERTS
    )
    moe_router_topk: int = setting(2, "experts per token", limit=ABOVE_ZERO, needs=EXPERTS)
    moe_router_score_function: str = setting(
        "softmax", "what makes scores of the router's logits", choices=("softmax", "sigmoid"), needs=EXPERTS
    )
    moe_router_pre_softmax: bool = setting(
        False, "softmax over all experts before the top-k, not over the chosen ones", needs=SOFTMAX_SCORES
    )
    moe_router_topk_scaling_factor: float | None = setting(
        None, "multiplies the weights of the experts", limit=ABOVE_ZERO, needs=EXPERTS
    )
    moe_router_num_groups: int | None = setting(
        None, "groups of experts, of which a token uses some", limit=ABOVE_ZERO, needs=EXPERTS
    )
    moe_router_group_topk: int = setting(
        None, "groups of experts a token uses", limit=ABOVE_ZERO, needs=EXPERTS
    )
    moe_router_dtype: str | None = setting(
        None,
        "precision of the router's logits (that of the model)",
        choices=("fp32", "fp64"),
        needs=EXPERTS,
        in_weights=False,
    )
    moe_router_load_balancing_type: tuple[str, ...] = setting(
        ("aux_loss",),
        "how experts are kept equally busy, one or several",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
        needs=BALANCING_WEIGHT,
        in_weights=False,
    )
    moe_aux_loss_coeff: tuple[float, ...] = setting(
        (0.0,),
        "weight of the balancing loss, or of each",
        limit=ZERO_OR_MORE,
        needs=BALANCING,
        in_weights=False,
    )
    moe_z_loss_coeff: float | None = setting(
        None,
        "weight of the loss that keeps the router's logits small",
        limit=ZERO_OR_MORE,
        needs=EXPERTS,
        in_weights=False,
    )
    moe_router_enable_expert_bias: bool = setting(
        False, "balance without a loss: a bias that only chooses, moved after every step", needs=EXPERTS
    )
    moe_router_bias_update_rate: float = setting(
        1e-3, "how far that bias moves in a step", limit=ZERO_OR_MORE, needs=EXPERT_BIAS, in_weights=False
    )
    moe_token_dispatcher_type: str = setting(
        "alltoall",
        "how tokens travel to experts",
        choices=("alltoall", "allgather"),
        needs=EXPERTS,
        in_weights=False,
    )
    moe_grouped_gemm: bool | None = setting(
        None,
        "run the experts of a rank as one grouped matmul (where its kernel is: bf16 on a GPU)",
        sets={"--moe-grouped-gemm": True, "--no-moe-grouped-gemm": False},
        in_weights=False,
    )
    moe_use_legacy_grouped_gemm: bool = setting(
        False,
        "an older grouped matmul",
        notice="there is one grouped matmul here, so this changes nothing",
        needs=EXPERTS,
        in_weights=False,
    )
    moe_expert_capacity_factor: float | None = setting(
        None,
        "drop what is above this multiple of an expert's equal share (nothing is dropped)",
        limit=ABOVE_ZERO,
        needs=EXPERTS,
        in_weights=False,
    )
    moe_token_drop_policy: str = setting(
        "probs",
        "what is dropped: the smallest weights, or the last tokens",
        choices=("probs", "position"),
        needs=EXPERTS,
        in_weights=False,
    )
    moe_shared_expert_intermediate_size: int | None = setting(
        None, "width of the shared expert, which every token uses", limit=ABOVE_ZERO, needs=EXPERTS
    )
    moe_shared_expert_gate: bool = setting(False, "gate of the shared expert (Qwen2-MoE)", needs=EXPERTS)
    moe_per_layer_logging: bool = setting(
        False, "write the load of every layer's experts to metrics.jsonl", needs=EXPERTS, in_weights=False
    )

    @property
    def experts(self) -> int:
        """Experts of a layer that has them; 0 if all layers are dense."""
        return self.num_experts or 0

    @property
    def shared_width(self) -> int:
        """Inner width of the shared expert; 0 without one."""
        return self.moe_shared_expert_intermediate_size or 0


NO_EXPERTS = MoEConfig()


@dataclass(frozen=True)
class KernelConfig:
    """Kernels"""

    transformer_impl: str = setting(
        "local",
        "implementation of the layers",
        choices=("local", "transformer_engine"),
        notice="there is one implementation here, in PyTorch, so this changes nothing",
    )
    use_mcore_models: bool = setting(
        False, "Megatron's newer models", notice="there is one family of models here, so this changes nothing"
    )
    attention_backend: str = setting(
        "auto",
        "attention kernel",
        choices=("auto", "flash", "cudnn", "efficient", "math", "fused", "unfused", "local"),
    )
    compile: str = setting(
        "auto", "compile every layer: on a GPU (auto), always, never", choices=("auto", "on", "off")
    )
    compile_layers_together: int = setting(
        1,
        "layers that are compiled as one: more take longer to compile, and less of the host's time in every step, for which small models wait",
        limit=ABOVE_ZERO,
    )
    cuda_graphs: str = setting(
        "auto",
        "forward and backward of a micro-batch recorded once and replayed: where launching takes longer than computing (auto), always, never",
        choices=("auto", "on", "off", "local", "transformer_engine", "none"),
        also="--cuda-graph-impl",
        sets={"--enable-cuda-graph": "on", "--external-cuda-graph": "on"},
    )
    cuda_graph_scope: tuple[str, ...] = setting(
        (),
        "which parts of a model are recorded",
        notice="what --cuda-graphs records is always forward and backward of a whole micro-batch",
    )
    cuda_graph_warmup_steps: int = setting(
        3,
        "steps before anything is recorded",
        notice="--cuda-graphs records what has run once, so from the second step on",
        limit=ZERO_OR_MORE,
    )
    attention_softmax_in_fp32: bool = setting(
        False,
        "softmax of attention in fp32",
        notice="the attention kernels here always take the softmax in fp32",
    )
    rope_fusion: bool = setting(
        True, "fused rotary kernel", notice="there is no separate fused rotary kernel here"
    )
    masked_softmax_fusion: bool = setting(
        True, "fused masked softmax", notice="attention here never builds a masked softmax of its own"
    )
    bias_swiglu_fusion: bool = setting(
        True,
        "on a GPU one kernel for backward of the gate of an MLP; without fp8 it makes what lies between the matrices again, so none is kept",
    )
    fused_cross_entropy: str = setting(
        "auto",
        "losses without logits in fp32; their gradient is written over them (auto: on a GPU)",
        choices=("auto", "on", "off"),
        sets={"--cross-entropy-loss-fusion": "on", "--no-cross-entropy-loss-fusion": "off"},
    )
    cross_entropy_fusion_impl: str = setting(
        "auto",
        "how: torch's own operations, or one Triton kernel (auto: the kernel on a GPU that has Triton)",
        choices=("auto", "native", "te"),
    )
    cross_entropy_chunk: int = setting(
        32768,
        "tokens whose logits a fused loss has at a time; further ones are computed again in backward",
        limit=ABOVE_ZERO,
    )


# Which layers have experts, as `--moe-layer-freq` says it: every N-th, or a list written with + and *.


def moe_layers(frequency: str, num_layers: int) -> tuple[bool, ...]:
    """For every layer, whether it has experts. Raises ValueError with a sentence for what cannot be read."""
    found = layer_pattern("--moe-layer-freq", frequency, num_layers, "[0]*1+[1]*26")
    if found == 0:
        raise ValueError("--moe-layer-freq 0 gives no layer experts; use 1 or more")
    if isinstance(found, int):
        return tuple(number % found == 0 for number in range(num_layers))
    if not any(found):
        raise ValueError(
            f"--moe-layer-freq {frequency} gives no layer experts; write a 1 for each that has them"
        )
    return tuple(bool(entry) for entry in found)


def inner_widths(model: "TransformerConfig", moe: "MoEConfig", sparse_layers: int) -> int:
    """Of the feed-forward parts of all layers together, as one token sees them: of experts, those it is sent to."""
    dense = model.num_layers * model.ffn_hidden_size
    if moe.num_experts is None:
        return int(dense)
    sparse = moe.moe_router_topk * moe.moe_ffn_hidden_size
    sparse += moe.moe_shared_expert_intermediate_size or 0
    return int(dense + sparse_layers * (sparse - model.ffn_hidden_size))
