"""Small `transformers` models of every family, with shapes that have caused bugs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

VOCABULARY = 61

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}

# Heads for two tensor ranks and layers for two stages; the vocabulary size is prime.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": _ROPE,
    "tie_word_embeddings": False,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 60,
    "eos_token_id": 60,
}


@dataclass(frozen=True)
class Case:
    name: str
    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def has_experts(self) -> bool:
        return "num_experts_per_tok" in self.settings


def _case(name: str, model_type: str, **changes: Any) -> Case:
    return Case(name, model_type, {**(_GPT2 if model_type == "gpt2" else _SIZES), **changes})


CASES = [
    _case("gpt2", "gpt2"),
    _case("gpt2 wide untied", "gpt2", n_inner=40, tie_word_embeddings=False),
    _case("llama2", "llama", num_key_value_heads=4),
    _case("llama3 scaled tied", "llama", rope_parameters=_LLAMA3, tie_word_embeddings=True),
    _case("llama biases, one kv head", "llama", attention_bias=True, mlp_bias=True, num_key_value_heads=1),
    _case("llama narrow heads", "llama", head_dim=12),
    _case("yi", "llama", rope_parameters={"rope_type": "default", "rope_theta": 5e6}, rms_norm_eps=1e-5),
    _case("mistral window", "mistral", sliding_window=5, head_dim=16),
    _case("qwen2 tied", "qwen2", tie_word_embeddings=True),
    _case(
        "qwen2 yarn, window above",
        "qwen2",
        rope_parameters=_YARN,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
    ),
    _case("qwen3", "qwen3", head_dim=12),
    _case("qwen3 biases tied", "qwen3", head_dim=8, attention_bias=True, tie_word_embeddings=True),
    _case("mixtral", "mixtral", num_local_experts=4, num_experts_per_tok=2),
    _case(
        "qwen2-moe",
        "qwen2_moe",
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=40,
        decoder_sparse_step=2,
    ),
    _case(
        "qwen3-moe",
        "qwen3_moe",
        head_dim=12,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
    ),
    _case(
        "qwen3-moe not normed",
        "qwen3_moe",
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=False,
    ),
]


def their_model(case: Case) -> nn.Module:
    """Returns a model with unusual weights: norms of one and biases of zero would hide mistakes."""
    # Imported here, because ranks import this module without needing transformers.
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(case.model_type, **case.settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            norm = p.dim() == 1 and name.endswith("weight")
            p.copy_(0.1 * torch.randn(p.shape, generator=generator) + norm)
    return model.float().eval()
