"""The architecture: what the model is, whatever it runs on. Field names are Megatron's."""

from dataclasses import dataclass

from pentatron.config.setting import setting


@dataclass(frozen=True)
class TransformerConfig:
    """Model architecture"""

    num_layers: int = setting(4, "transformer layers")
    hidden_size: int = setting(256, "width of the residual stream")
    ffn_hidden_size: int | None = setting(None, "width inside the MLP (4 × hidden; with SwiGLU 8/3 × hidden)")
    num_attention_heads: int | None = setting(
        None, "attention heads (derived from the hidden size if not given)"
    )
    kv_channels: int | None = setting(
        None, "width of one head (hidden / heads); heads × width may differ from hidden"
    )
    group_query_attention: bool = setting(False, "share keys and values between groups of heads")
    num_query_groups: int | None = setting(None, "key/value heads with --group-query-attention")
    seq_length: int = setting(256, "tokens in one sample", also="--max_seq_len")
    max_position_embeddings: int | None = setting(None, "longest sequence the model is made for (seq-length)")
    vocab_size: int | None = setting(None, "vocabulary size (from the tokenizer if not given)")
    make_vocab_size_divisible_by: int = setting(
        128, "pad the vocabulary to a multiple of this × tensor parallel size"
    )
    padded_vocab_size: int | None = setting(None, "rows of the embedding, padding included (derived)")

    normalization: str = setting("LayerNorm", "kind of norm", choices=("LayerNorm", "RMSNorm"))
    layernorm_epsilon: float = setting(1e-5, "epsilon of the norms", also="--norm-epsilon")
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
    add_qkv_bias: bool = setting(False, "bias in the QKV projection (Qwen2.5)")
    add_proj_bias: bool = setting(False, "bias in the output projection of attention")
    add_mlp_bias: bool = setting(False, "biases in the MLP")
    position_embedding_type: str = setting(
        "learned_absolute",
        "how positions are encoded (yarn: rope with --rope-scaling-type yarn)",
        choices=("learned_absolute", "rope", "yarn", "none"),
        sets={"--use-rotary-position-embeddings": "rope"},
    )
    rotary_base: float = setting(10000.0, "base of the rotary frequencies")
    rotary_percent: float = setting(1.0, "share of a head that is rotated")
    rotary_interleaved: bool = setting(False, "rotate neighbouring pairs instead of halves")
    rope_scaling_type: str | None = setting(
        None,
        "how rotary frequencies are stretched for sequences longer than those first trained on (not at all)",
        choices=("linear", "llama3", "yarn"),
        sets={"--use-rope-scaling": "llama3"},
    )
    rope_scaling_factor: float | None = setting(
        None,
        "how many times longer (llama3: 8)",
        also="--yarn-rotary-scaling-factor",
    )
    rope_scaling_original_max_position_embeddings: int | None = setting(
        None,
        "longest sequence first trained on (llama3: 8192)",
        also="--yarn-original-max-position-embeddings",
    )
    rope_scaling_low_freq_factor: float = setting(
        1.0, "llama3: waves that fit less often than this into that length are stretched"
    )
    rope_scaling_high_freq_factor: float = setting(
        4.0, "llama3: waves that fit more often than this are kept"
    )
    rotary_seq_len_interpolation_factor: float | None = setting(
        None, "Megatron's words for --rope-scaling-type linear with this --rope-scaling-factor"
    )
    yarn_beta_fast: float = setting(32.0, "yarn: pairs of channels that turn more often than this are kept")
    yarn_beta_slow: float = setting(1.0, "yarn: pairs that turn less often than this are stretched")
    yarn_attention_factor: float | None = setting(
        None, "yarn: multiplies rotated queries and keys (0.1 ln(factor) + 1)"
    )
    yarn_mscale: float | None = setting(
        None,
        "yarn: with the next, another such factor: (0.1 × this × ln(factor) + 1) / (the same of the next)",
    )
    yarn_mscale_all_dim: float | None = setting(None, "yarn: what --yarn-mscale is divided by")
    yarn_truncate: bool = setting(
        True,
        "yarn: round the range of pairs between kept and stretched outwards",
        also="--yarn-correction-range-round-to-int",
    )
    window_size: tuple[int, ...] = setting(
        (), "LEFT,0: a token sees itself and LEFT tokens before it (all of them; LEFT -1: all as well)"
    )
    window_attn_skip_freq: str | None = setting(
        None,
        "which layers see everything all the same: every N-th, or a list such as [1,1,0] with 1 for a window",
    )
    untie_embeddings_and_output_weights: bool = setting(False, "give the output layer a matrix of its own")
    hidden_dropout: float = setting(0.0, "dropout on the residual stream")
    attention_dropout: float = setting(0.0, "dropout on attention weights")
    init_method_std: float = setting(0.02, "standard deviation of the initial weights")
    multi_latent_attention: bool = setting(False, "multi-latent attention", not_yet="multi-latent attention")
    spec: tuple[str, ...] = setting(
        (),
        "layers of your own: MODULE FUNCTION, where the function gives the spec of a layer or of all layers",
        names_code=True,
    )


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts"""

    num_experts: int | None = setting(None, "number of experts")
    moe_layer_freq: str = setting(
        "1", "which layers have experts: every N-th, or a list such as [0]*1+[1]*26 with 1 for experts"
    )
    moe_ffn_hidden_size: int | None = setting(None, "width inside one expert (ffn-hidden-size)")
    moe_router_topk: int = setting(2, "experts per token")
    moe_router_score_function: str = setting(
        "softmax", "what makes scores of the router's logits", choices=("softmax", "sigmoid")
    )
    moe_router_pre_softmax: bool = setting(
        False, "softmax over all experts before the top-k, not over the chosen ones"
    )
    moe_router_topk_scaling_factor: float | None = setting(None, "multiplies the weights of the experts")
    moe_router_num_groups: int | None = setting(None, "groups of experts, of which a token uses some")
    moe_router_group_topk: int | None = setting(None, "groups of experts a token uses")
    moe_router_dtype: str | None = setting(
        None, "precision of the router's logits (that of the model)", choices=("fp32", "fp64")
    )
    moe_router_load_balancing_type: tuple[str, ...] = setting(
        ("aux_loss",),
        "how experts are kept equally busy, one or several",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
    )
    moe_aux_loss_coeff: tuple[float, ...] = setting((0.0,), "weight of the balancing loss, or of each")
    moe_z_loss_coeff: float | None = setting(None, "weight of the loss that keeps the router's logits small")
    moe_router_enable_expert_bias: bool = setting(
        False, "balance without a loss: a bias that only chooses, moved after every step"
    )
    moe_router_bias_update_rate: float = setting(1e-3, "how far that bias moves in a step")
    moe_token_dispatcher_type: str = setting(
        "alltoall", "how tokens travel to experts", choices=("alltoall", "allgather")
    )
    moe_grouped_gemm: bool | None = setting(
        None,
        "run the experts of a rank as one grouped matmul (where its kernel is: bf16 on a GPU)",
        sets={"--moe-grouped-gemm": True, "--no-moe-grouped-gemm": False},
    )
    moe_use_legacy_grouped_gemm: bool = setting(
        False, "an older grouped matmul", notice="there is one grouped matmul here, so this changes nothing"
    )
    moe_expert_capacity_factor: float | None = setting(
        None, "drop what is above this multiple of an expert's equal share (nothing is dropped)"
    )
    moe_token_drop_policy: str = setting(
        "probs",
        "what is dropped: the smallest weights, or the last tokens",
        choices=("probs", "position"),
    )
    moe_shared_expert_intermediate_size: int | None = setting(
        None, "width of the shared expert, which every token uses"
    )
    moe_shared_expert_gate: bool = setting(False, "gate of the shared expert (Qwen2-MoE)")
    moe_per_layer_logging: bool = setting(False, "write the load of every layer's experts to metrics.jsonl")


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
        32768, "tokens whose logits a fused loss has at a time; further ones are computed again in backward"
    )
