"""Presets: the demo, and the architectures of well-known models.

A preset maps settings to values. Files and flags override it.
"""

from typing import Any

_LLAMA_STYLE: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "group_query_attention": True,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
}

_GPT_STYLE: dict[str, Any] = {
    "normalization": "LayerNorm",
    "layernorm_epsilon": 1e-5,
    "position_embedding_type": "learned_absolute",
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}

_DENSE_COLUMNS = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels rotary_base "
    "max_position_embeddings vocab_size untie_embeddings_and_output_weights layernorm_epsilon"
).split()
_QWEN25 = {**_LLAMA_STYLE, "add_qkv_bias": True, "make_vocab_size_divisible_by": 1}
_QWEN3 = {**_LLAMA_STYLE, "qk_layernorm": True, "make_vocab_size_divisible_by": 1}
_LLAMA = {**_LLAMA_STYLE, "make_vocab_size_divisible_by": 1}
_MISTRAL_V01 = {**_LLAMA, "window_size": (4095, 0)}


def _llama31(factor: float) -> dict[str, Any]:
    """Returns the common settings of Llama 3.1 and later, which scale rotary frequencies by this factor."""
    scaling = {"rope_scaling_type": "llama3", "rope_scaling_factor": factor}
    return {**_LLAMA, **scaling, "rope_scaling_original_max_position_embeddings": 8192}


# Larger Qwen2.5 models: the base versions. Those of the instruct versions have an epsilon of 1e-6.
# fmt: off
_DENSE: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "qwen2.5-0.5b":    (_QWEN25, (24, 896, 4864, 14, 2, 64, 1e6, 32768, 151936, False, 1e-6)),
    "qwen2.5-1.5b":    (_QWEN25, (28, 1536, 8960, 12, 2, 128, 1e6, 131072, 151936, False, 1e-6)),
    "qwen2.5-3b":      (_QWEN25, (36, 2048, 11008, 16, 2, 128, 1e6, 32768, 151936, False, 1e-6)),
    "qwen2.5-7b":      (_QWEN25, (28, 3584, 18944, 28, 4, 128, 1e6, 32768, 152064, True, 1e-6)),
    "qwen2.5-math-7b": (_QWEN25, (28, 3584, 18944, 28, 4, 128, 1e4, 4096, 152064, True, 1e-6)),
    "r1-distill-qwen-7b": (_QWEN25, (28, 3584, 18944, 28, 4, 128, 1e4, 131072, 152064, True, 1e-6)),
    "qwen2.5-14b":     (_QWEN25, (48, 5120, 13824, 40, 8, 128, 1e6, 131072, 152064, True, 1e-5)),
    "qwen2.5-32b":     (_QWEN25, (64, 5120, 27648, 40, 8, 128, 1e6, 131072, 152064, True, 1e-5)),
    "qwen2.5-72b":     (_QWEN25, (80, 8192, 29568, 64, 8, 128, 1e6, 131072, 152064, True, 1e-5)),
    "qwen3-0.6b":      (_QWEN3, (28, 1024, 3072, 16, 8, 128, 1e6, 40960, 151936, False, 1e-6)),
    "qwen3-1.7b":      (_QWEN3, (28, 2048, 6144, 16, 8, 128, 1e6, 40960, 151936, False, 1e-6)),
    "qwen3-4b":        (_QWEN3, (36, 2560, 9728, 32, 8, 128, 1e6, 40960, 151936, False, 1e-6)),
    "qwen3-8b":        (_QWEN3, (36, 4096, 12288, 32, 8, 128, 1e6, 40960, 151936, True, 1e-6)),
    "qwen3-14b":       (_QWEN3, (40, 5120, 17408, 40, 8, 128, 1e6, 40960, 151936, True, 1e-6)),
    "qwen3-32b":       (_QWEN3, (64, 5120, 25600, 64, 8, 128, 1e6, 40960, 151936, True, 1e-6)),
    "llama2-7b":       (_LLAMA, (32, 4096, 11008, 32, 32, 128, 1e4, 4096, 32000, True, 1e-5)),
    "llama2-13b":      (_LLAMA, (40, 5120, 13824, 40, 40, 128, 1e4, 4096, 32000, True, 1e-5)),
    "llama2-70b":      (_LLAMA, (80, 8192, 28672, 64, 8, 128, 1e4, 4096, 32000, True, 1e-5)),
    "llama3-8b":       (_LLAMA, (32, 4096, 14336, 32, 8, 128, 5e5, 8192, 128256, True, 1e-5)),
    "llama3-70b":      (_LLAMA, (80, 8192, 28672, 64, 8, 128, 5e5, 8192, 128256, True, 1e-5)),
    "llama3.1-8b":     (_llama31(8.0), (32, 4096, 14336, 32, 8, 128, 5e5, 131072, 128256, True, 1e-5)),
    "llama3.1-70b":    (_llama31(8.0), (80, 8192, 28672, 64, 8, 128, 5e5, 131072, 128256, True, 1e-5)),
    "llama3.1-405b":   (_llama31(8.0), (126, 16384, 53248, 128, 8, 128, 5e5, 131072, 128256, True, 1e-5)),
    "llama3.2-1b":     (_llama31(32.0), (16, 2048, 8192, 32, 8, 64, 5e5, 131072, 128256, False, 1e-5)),
    "llama3.2-3b":     (_llama31(32.0), (28, 3072, 8192, 24, 8, 128, 5e5, 131072, 128256, False, 1e-5)),
    "mistral-7b-v0.1": (_MISTRAL_V01, (32, 4096, 14336, 32, 8, 128, 1e4, 32768, 32000, True, 1e-5)),
    "mistral-7b-v0.3": (_LLAMA, (32, 4096, 14336, 32, 8, 128, 1e6, 32768, 32768, True, 1e-5)),
    "yi-6b":           (_LLAMA, (32, 4096, 11008, 32, 4, 128, 5e6, 4096, 64000, True, 1e-5)),
    "yi-34b":          (_LLAMA, (60, 7168, 20480, 56, 8, 128, 5e6, 4096, 64000, True, 1e-5)),
}

_GPT: dict[str, dict[str, Any]] = {
    "gpt2":        {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "max_position_embeddings": 1024},
    "gpt2-medium": {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "max_position_embeddings": 1024},
    "gpt2-large":  {"num_layers": 36, "hidden_size": 1280, "num_attention_heads": 20, "max_position_embeddings": 1024},
    "gpt2-xl":     {"num_layers": 48, "hidden_size": 1600, "num_attention_heads": 25, "max_position_embeddings": 1024},
    "gpt3-345m":   {"num_layers": 12, "hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 1024},
    "gpt3-175b":   {"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96, "max_position_embeddings": 2048,
                    "init_method_std": 0.006},
}

_MOE_COLUMNS = (*_DENSE_COLUMNS, "num_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_aux_loss_coeff")
_QWEN3_MOE = {**_QWEN3, "moe_router_dtype": "fp32"}
_QWEN2_MOE = {**_QWEN25, "moe_router_pre_softmax": True, "moe_shared_expert_gate": True}
_SHARED_5632 = {**_QWEN2_MOE, "moe_shared_expert_intermediate_size": 5632}
_SHARED_20480 = {**_QWEN2_MOE, "moe_shared_expert_intermediate_size": 20480}
_MOE: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "mixtral-8x7b":    (_LLAMA, (32, 4096, 14336, 32, 8, 128, 1e6, 32768, 32000, True, 1e-5, 8, 2, 14336, (1e-2,))),
    "mixtral-8x22b":   (_LLAMA, (56, 6144, 16384, 48, 8, 128, 1e6, 65536, 32000, True, 1e-5, 8, 2, 16384, (1e-3,))),
    "qwen1.5-moe-a2.7b": (_SHARED_5632, (24, 2048, 5632, 16, 16, 128, 1e6, 8192, 151936, True, 1e-6, 60, 4, 1408, (1e-3,))),
    "qwen2-57b-a14b":  (_SHARED_20480, (28, 3584, 18944, 28, 4, 128, 1e6, 131072, 151936, True, 1e-6, 64, 8, 2560, (1e-3,))),
    "qwen3-30b-a3b":   (_QWEN3_MOE, (48, 2048, 6144, 32, 4, 128, 1e6, 40960, 151936, True, 1e-6, 128, 8, 768, (1e-3,))),
    "qwen3-235b-a22b": (_QWEN3_MOE, (94, 4096, 12288, 64, 4, 128, 1e6, 40960, 151936, True, 1e-6, 128, 8, 1536, (1e-3,))),
}

# Trains in a few minutes on two CPU cores, and generates text that looks like Python.
_DEMO: dict[str, Any] = {
    **_LLAMA_STYLE,
    "corpus": "python", "split": "95,5,0", "run_dir": "runs/demo", "sample_prompt": "def ",
    "vocab_size": 1024, "num_layers": 4, "hidden_size": 192, "num_attention_heads": 6, "num_query_groups": 2,
    "seq_length": 128, "micro_batch_size": 4, "global_batch_size": 16, "train_iters": 400,
    "nproc_per_node": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2,
    "lr": 3e-3, "min_lr": 3e-4, "lr_warmup_iters": 20, "weight_decay": 0.1, "adam_beta2": 0.95,
    "eval_interval": 100, "eval_iters": 8, "save_interval": 100, "log_interval": 10,
}
# fmt: on


def presets() -> dict[str, dict[str, Any]]:
    """Returns all presets by name."""
    found = {"demo": dict(_DEMO)}
    for name, shape in _GPT.items():
        found[name] = {**_GPT_STYLE, "vocab_size": 50257, **shape}
    for name, (family, row) in _DENSE.items():
        found[name] = {**family, **dict(zip(_DENSE_COLUMNS, row, strict=True))}
    for name, (family, row) in _MOE.items():
        found[name] = {**family, **dict(zip(_MOE_COLUMNS, row, strict=True)), "moe_grouped_gemm": True}
    return found
