"""Compares every family with `transformers`: logits, loss and the gradient of every weight."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

from pentatron.hf.tensor_names import tensor_links
from pentatron.models.causal_lm import build_model
from pentatron.parallel.sharding import region
from tests.hf.support import CPU, EXPERTS, WORDS, batch, gap, ours_from, save, theirs

# Lengths and bases are so small that 16 positions contain frequencies of each kind: kept, stretched and
# between.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-inner": (
        "gpt2",
        {"n_inner": 40, "activation_function": "gelu_pytorch_tanh", "tie_word_embeddings": False},
    ),
    "llama": ("llama", {}),
    "llama-tied-one-kv": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "qwen3-bias": ("qwen3", {"attention_bias": True}),
    "mistral-window": ("mistral", {"sliding_window": 5}),
    "qwen2-window-above": ("qwen2", {**WINDOW, "max_window_layers": 1}),
    "qwen3-window-below": ("qwen3", {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3-yarn": (
        "qwen3",
        {
            "head_dim": 16,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False},
        },
    ),
    "mistral-head-dim": ("mistral", {"sliding_window": None, "head_dim": 12}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
    "qwen2_moe-normed": (
        "qwen2_moe",
        {**EXPERTS, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0], "norm_topk_prob": True},
    ),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, **WINDOW, "norm_topk_prob": True, "head_dim": 12}),
    "qwen3_moe-tied": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": False, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_every_gradient(case: str, tmp_path: Path) -> None:
    model_type, config = CASES[case]
    their = theirs(model_type, **config)
    model, architecture, moe = ours_from(save(their, tmp_path, max_shard_size="10KB"))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tokens, positions, labels = batch()
    logits = their(tokens).logits
    assert gap(model(tokens, positions)[..., :WORDS], logits) < 1e-5
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected.backward()
    loss = model(tokens, positions, labels).mean()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)

    gradients = {name: p.grad for name, p in their.named_parameters()}
    mine = {name: p.grad for name, p in model.named_parameters()}
    assert not {name for name, p in their.named_parameters() if p.grad is None}
    # `transformers` names gradients as its parameters in memory, where all experts are one tensor.
    compared: dict[str, int] = {}
    for link in tensor_links(model_type, architecture, moe, gradients):
        found = link.to_theirs(region(mine[link.ours], link.at, link.size))
        wanted = region(gradients[link.theirs], link.start, link.their_size)
        assert (found - wanted).norm() <= 1e-5 * gradients[link.theirs].norm(), (link, gap(found, wanted))
        compared[link.theirs] = compared.get(link.theirs, 0) + wanted.numel()
    assert compared == {name: gradient.numel() for name, gradient in gradients.items()}


@pytest.mark.parametrize(
    "case, change",
    [
        ("llama-llama3", {"rope_scaling_type": None}),
        ("qwen2-yarn", {"yarn_beta_slow": 1.0}),
        ("mistral-window", {"window_size": (5, 0)}),
        ("qwen2-window-above", {"window_attn_skip_freq": None}),
        ("llama", {"layernorm_epsilon": 1e-2}),
        ("qwen2", {"rotary_base": 1e4}),
    ],
)
def test_a_setting_that_is_only_a_number_is_seen(case: str, change: dict[str, Any], tmp_path: Path) -> None:
    """A wrong number in the settings changes the logits although all tensors match."""
    model_type, config = CASES[case]
    their = theirs(model_type, **config)
    right, architecture, moe = ours_from(save(their, tmp_path))
    wrong = build_model(replace(architecture, **change), 1, CPU, moe=moe)
    wrong.load_state_dict(right.state_dict())
    tokens, positions, _ = batch()
    assert gap(wrong(tokens, positions)[..., :WORDS], their(tokens).logits) > 1e-3
