"""Compares rotary frequencies with those of `transformers`, bit for bit."""

import dataclasses
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pentatron.nn.rope import RotaryEmbedding, build_rope
from pentatron.settings.model import TransformerConfig

LENGTH = "rope_scaling_original_max_position_embeddings"
# Names of parameters in `transformers`, and our settings.
NAMES = {
    "factor": "rope_scaling_factor",
    "original_max_position_embeddings": LENGTH,
    "low_freq_factor": "rope_scaling_low_freq_factor",
    "high_freq_factor": "rope_scaling_high_freq_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attention_factor",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
    "truncate": "yarn_truncate",
}
LLAMA31 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
QWEN25 = {"factor": 4.0, "original_max_position_embeddings": 32768}

# Kind, width of a head, base, rotated share of a head, parameters
CASES: list[tuple[str, int, float, float, dict[str, Any]]] = [
    ("linear", 128, 1e4, 1.0, {"factor": 2.5}),
    ("linear", 80, 1e4, 0.25, {"factor": 4.0}),
    ("llama3", 128, 5e5, 1.0, LLAMA31),
    ("llama3", 64, 5e5, 1.0, {**LLAMA31, "factor": 32.0}),
    ("llama3", 96, 1e4, 0.5, {**LLAMA31, "low_freq_factor": 2.0, "original_max_position_embeddings": 512}),
    ("yarn", 128, 1e6, 1.0, QWEN25),
    ("yarn", 64, 1e4, 1.0, {**QWEN25, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7}),
    ("yarn", 64, 15e4, 1.0, {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}),
    ("yarn", 64, 1e4, 0.5, {**QWEN25, "beta_fast": 20.0, "beta_slow": 3.0, "attention_factor": 1.25}),
    # All channel pairs are slow, or all are fast: the range between them is clamped.
    ("yarn", 16, 1e4, 1.0, {"factor": 2.0, "original_max_position_embeddings": 8, "beta_slow": 0.5}),
    ("yarn", 8, 20.0, 1.0, {"factor": 2.0, "original_max_position_embeddings": 10**6}),
]


def built(width: int, base: float, percent: float, **more: Any) -> RotaryEmbedding:
    config = TransformerConfig(
        kv_channels=width,
        position_embedding_type="rope",
        rotary_base=base,
        rotary_percent=percent,
        **more,
    )
    rope = build_rope(config)
    assert (
        rope is not None and build_rope(dataclasses.replace(config, position_embedding_type="none")) is None
    )
    return rope


@pytest.mark.parametrize(("kind", "width", "base", "percent", "parameters"), CASES)
def test_frequencies_are_those_of_transformers(
    kind: str, width: int, base: float, percent: float, parameters: dict[str, Any]
) -> None:
    theirs = LlamaConfig(
        head_dim=width,
        max_position_embeddings=10**7,
        rope_parameters={
            "rope_type": kind, "rope_theta": base, "partial_rotary_factor": percent, **parameters,
        },
    )  # fmt: skip
    expected, factor = ROPE_INIT_FUNCTIONS[kind](theirs)
    rope = built(width, base, percent, rope_scaling_type=kind, **{NAMES[k]: v for k, v in parameters.items()})
    assert torch.equal(rope.inverse_frequencies, expected) and rope.attention_factor == factor
    # The scaling does something: frequencies without it differ.
    assert not torch.equal(built(width, base, percent).inverse_frequencies, expected)
    cos, sin = rope(torch.tensor([[0, 70_000]]))
    angles = 70_000 * expected
    assert torch.equal(cos[0, 0, 1], angles.cos() * factor) and torch.equal(
        sin[0, 0, 1], angles.sin() * factor
    )


def test_unscaled_frequencies_are_those_of_transformers() -> None:
    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=128, rope_parameters={"rope_theta": 5e5}))
    assert torch.equal(built(128, 5e5, 1.0).inverse_frequencies, theirs.inv_freq)
