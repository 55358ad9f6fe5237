"""Every preset resolves, and has as many parameters as the model it is named after."""

from typing import Any

import pytest

from pentatron.settings.derive import derive
from pentatron.settings.presets import presets
from pentatron.settings.settings import ProcessFacts, Settings
from tests.settings.builders import draft, problems, resolved, values

# Billions of parameters, with as many digits as are published; "total/active" for mixtures of experts.
PUBLISHED = {
    "qwen2.5-0.5b": "0.494",
    "qwen2.5-1.5b": "1.544",
    "qwen2.5-3b": "3.086",
    "qwen2.5-7b": "7.616",
    "qwen2.5-math-7b": "7.616",
    "r1-distill-qwen-7b": "7.616",
    "qwen2.5-14b": "14.77",
    "qwen2.5-32b": "32.76",
    "qwen2.5-72b": "72.71",
    "qwen3-0.6b": "0.596",
    "qwen3-1.7b": "1.721",
    "qwen3-4b": "4.022",
    "qwen3-8b": "8.191",
    "qwen3-14b": "14.77",
    "qwen3-32b": "32.76",
    "llama3.2-1b": "1.236",
    "llama3.2-3b": "3.213",
    "llama3-8b": "8.030",
    "llama3-70b": "70.6",
    "llama3.1-8b": "8.030",
    "llama3.1-70b": "70.6",
    "llama3.1-405b": "405.9",
    "llama2-7b": "6.738",
    "llama2-13b": "13.016",
    "llama2-70b": "68.977",
    "mistral-7b-v0.1": "7.242",
    "mistral-7b-v0.3": "7.248",
    "yi-6b": "6.061",
    "yi-34b": "34.389",
    "gpt2": "0.124",
    "gpt2-medium": "0.355",
    "gpt2-large": "0.774",
    "gpt2-xl": "1.558",
    "gpt3-345m": "0.064",
    "gpt3-175b": "174.6",
    "mixtral-8x7b": "46.7/12.9",
    "mixtral-8x22b": "141/39",
    "qwen1.5-moe-a2.7b": "14.32/2.69",
    "qwen2-57b-a14b": "57.4/14.2",
    "qwen3-30b-a3b": "30.5/3.35",
    "qwen3-235b-a22b": "235.1/22.2",
}

LEAST = "--mock-data --train-iters 10"


def completed(name: str) -> Settings:
    """Returns the settings of a preset with all derived values."""
    found = draft(f"--preset {name} {LEAST}")
    found.facts = ProcessFacts(1)
    derive(found)
    assert found.problems == []
    return found


def parameters(v: Settings, experts_counted: int) -> int:
    """Counts the weights and biases of a decoder, with `experts_counted` experts in a layer."""
    hidden, bias = v.hidden_size, v.add_bias_linear
    attended = v.num_attention_heads * v.kv_channels
    qkv = attended + 2 * v.num_query_groups * v.kv_channels
    norm = hidden * (2 if v.normalization == "LayerNorm" else 1)
    attention = hidden * qkv + attended * hidden + 2 * norm
    attention += (qkv if bias or v.add_qkv_bias else 0) + (hidden if bias or v.add_proj_bias else 0)
    attention += 2 * v.kv_channels if v.qk_layernorm else 0
    matrices = 3 if v.gated_linear_unit else 2
    if v.num_experts:
        mlp = experts_counted * matrices * hidden * v.moe_ffn_hidden_size + hidden * v.num_experts
        mlp += matrices * hidden * (v.moe_shared_expert_intermediate_size or 0)
        mlp += hidden if v.moe_shared_expert_gate else 0
    else:
        width = v.ffn_hidden_size
        mlp = matrices * hidden * width
        mlp += (matrices - 1) * width + hidden if bias or v.add_mlp_bias else 0
    rows = v.padded_vocab_size * (2 if v.untie_embeddings_and_output_weights else 1)
    learned = v.position_embedding_type == "learned_absolute"
    rows += v.max_position_embeddings if learned else 0
    return int(v.num_layers * (attention + mlp) + norm + rows * hidden)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters(name: str) -> None:
    found = completed(name)
    counted = (found.num_experts or 0, found.moe_router_topk)
    for published, experts in zip(PUBLISHED[name].split("/"), counted):
        digits = len(published.partition(".")[2])
        assert f"{parameters(found, experts) / 1e9:.{digits}f}" == published


def test_every_preset_but_the_demo_is_published() -> None:
    assert set(presets()) == {"demo", *PUBLISHED}


@pytest.mark.parametrize("name", presets())
def test_preset_resolves(name: str) -> None:
    least = "" if name == "demo" else LEAST
    assert problems(f"--preset {name}", ProcessFacts(2, 2), least=least) == []


def test_families() -> None:
    qwen25, qwen3, llama = (
        resolved(f"--preset {n}", least=LEAST).settings for n in ("qwen2.5-7b", "qwen3-8b", "llama3-8b")
    )
    for found in (qwen25, qwen3, llama):
        assert found.normalization == "RMSNorm" and found.gated_linear_unit
        assert found.position_embedding_type == "rope" and not found.add_bias_linear
        assert found.num_query_groups < found.num_attention_heads
        assert (found.hidden_dropout, found.attention_dropout) == (0.0, 0.0)
    assert [f.add_qkv_bias for f in (qwen25, qwen3, llama)] == [True, False, False]
    assert [f.qk_layernorm for f in (qwen25, qwen3, llama)] == [False, True, False]
    assert [f.rotary_base for f in (qwen25, qwen3, llama)] == [1e6, 1e6, 5e5]
    assert [f.layernorm_epsilon for f in (qwen25, qwen3, llama)] == [1e-6, 1e-6, 1e-5]
    assert qwen25.padded_vocab_size == 152064


def test_llamas_after_the_third_are_stretched_for_long_sequences() -> None:
    def scaling(name: str) -> tuple[Any, ...]:
        found = values(f"--preset {name}", least=LEAST)
        names = "rope_scaling_type rope_scaling_factor rope_scaling_original_max_position_embeddings max_position_embeddings"
        return tuple(found[name] for name in names.split())

    assert scaling("llama3-8b") == (None, None, None, 8192)
    assert {scaling(f"llama3.1-{n}b") for n in (8, 70, 405)} == {("llama3", 8.0, 8192, 131072)}
    assert {scaling(f"llama3.2-{n}b") for n in (1, 3)} == {("llama3", 32.0, 8192, 131072)}


def test_gpt3_has_padding_for_eight_tensor_ranks() -> None:
    found = draft(f"--preset gpt3-175b {LEAST} --tp_size 8")
    found.facts = ProcessFacts(8, 8)
    derive(found)
    assert found.padded_vocab_size == 51200
    assert found.ffn_hidden_size == 49152


def test_a_preset_is_a_copy() -> None:
    presets()["demo"]["lr"] = 77
    assert presets()["demo"]["lr"] != 77
