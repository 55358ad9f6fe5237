"""Tests reading and writing config.json: equal settings in both directions, every key handled."""

import dataclasses
import json
from typing import Any

import pytest
from transformers import AutoConfig

from pentatron.errors import UserError
from pentatron.hf.families import FAMILIES
from pentatron.hf.model_config import config_from_settings, settings_from_config
from pentatron.settings.model import NO_EXPERTS, TransformerConfig
from tests.hf.support import LLAMA, configs
from tests.hf.test_oracle import CASES, LLAMA3


def default(model_type: str, **more: Any) -> dict[str, Any]:
    """Returns the config.json that save_pretrained writes."""
    found: dict[str, Any] = json.loads(AutoConfig.for_model(model_type, **more).to_json_string())
    return found


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_those_of_transformers_and_the_way_back_is_the_same(model_type: str) -> None:
    written = default(model_type)
    settings = settings_from_config(written)
    assert settings_from_config({"model_type": model_type}) == settings
    again = config_from_settings(*configs(settings), original=written)
    assert settings_from_config(again) == settings
    assert config_from_settings(*configs(settings_from_config(again)), original=again) == again
    theirs = AutoConfig.for_model(**again).to_dict()
    # null means hidden / heads, which is a number in the settings.
    assert {key: theirs[key] for key in written if written[key] is not None} == {
        key: value for key, value in written.items() if value is not None
    }


@pytest.mark.parametrize("case", CASES)
def test_without_the_original_the_family_is_found(case: str) -> None:
    """The first equivalent family is written, which may differ from the original one."""
    model_type, config = CASES[case]
    sizes = {} if model_type == "gpt2" else LLAMA
    settings = settings_from_config(default(model_type, **{**sizes, **config}))
    written = config_from_settings(*configs(settings))
    assert written["model_type"] == {"mistral-head-dim": "llama"}.get(case, model_type)
    assert settings_from_config(written) == settings_from_config(json.loads(json.dumps(written))) == settings


# As transformers 4 wrote them; the numbers are small.
OLDER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama 3.1": (
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "bos_token_id": 1,
            "eos_token_id": [1, 2, 3],
            "hidden_act": "silu",
            **LLAMA,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
            "torch_dtype": "bfloat16",
            "transformers_version": "4.43.0",
        },
        {
            "rotary_base": 500000.0,
            "rope_scaling_type": "llama3",
            "rope_scaling_original_max_position_embeddings": 32,
            "kv_channels": 8,
            "layernorm_epsilon": 1e-5,
            "untie_embeddings_and_output_weights": True,
        },
    ),
    "qwen2.5 with yarn": (
        {
            "model_type": "qwen2",
            **LLAMA,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "max_window_layers": 28,
            "use_mrope": False,
            "tie_word_embeddings": True,
            "rope_theta": 1000000,
            "rope_scaling": {"type": "yarn", "factor": 4.0},
        },
        {
            "rotary_base": 1e6,
            "rope_scaling_type": "yarn",
            "rope_scaling_original_max_position_embeddings": 64,
            "untie_embeddings_and_output_weights": False,
            "add_qkv_bias": True,
        },
    ),
    "gpt2": (
        {
            "model_type": "gpt2",
            "n_ctx": 1024,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 50257,
        },
        {"num_layers": 12, "hidden_size": 768, "ffn_hidden_size": 3072, "hidden_dropout": 0.1},
    ),
}


@pytest.mark.parametrize("name", OLDER)
def test_files_of_transformers_4(name: str) -> None:
    config, expected = OLDER[name]
    settings = settings_from_config(config)
    assert {key: settings[key] for key in expected} == expected
    assert settings_from_config(config_from_settings(*configs(settings), original=config)) == settings


def test_written_config_keeps_unrelated_keys_and_updates_the_rest() -> None:
    original = {**OLDER["llama 3.1"][0], "vocab_size": 7}
    model = dataclasses.replace(configs(settings_from_config(original))[0], vocab_size=61)
    written = config_from_settings(model, NO_EXPERTS, original)
    assert written["eos_token_id"] == [1, 2, 3] and written["vocab_size"] == 61
    # transformers 4 reads the older keys, 5 the newer one.
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 500000.0
    assert written["rope_scaling"] == written["rope_parameters"]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation": ("llama", {"hidden_act": "gelu"}, "has hidden_act 'gelu', but only 'silu', 'swish'"),
    "gpt2 activation": ("gpt2", {"activation_function": "gelu"}, "activation_function 'gelu'"),
    "scale by layer": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx True",
    ),
    "unscaled": ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights False"),
    "two dropouts": ("gpt2", {"embd_pdrop": 0.3}, "embd_pdrop 0.3 and resid_pdrop 0.1"),
    "unknown key": ("qwen3", {"attention_sink": 4}, "'attention_sink': 4, which is not known"),
    "quantized": (
        "llama",
        {"quantization_config": {"bits": 4}},
        "quantization_config {'bits': 4}, but no value",
    ),
    "code of its own": ("llama", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
    "nested": ("llama", {"text_config": {}}, "text_config"),
    "rope": (
        "llama",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_type 'dynamic', but only default, linear",
    ),
    "rope key": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0, "x": 1}},
        "x 1, which is not known",
    ),
    "rope without factor": ("llama", {"rope_scaling": {"type": "yarn"}}, "'yarn' without factor"),
    "two ropes": (
        "llama",
        {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2}},
        "must be equal",
    ),
    "two bases": (
        "llama",
        {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        "rope_theta 10000.0 and 500000.0 in rope_parameters",
    ),
    "two scalings": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"factor": 4.0}},
        "factor 2.0 in rope_scaling and 4.0 in rope_parameters",
    ),
    "two kinds of scaling": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        "rope_type 'linear' in rope_scaling and 'default' in rope_parameters",
    ),
    "a base beside another scaling": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5e5}},
        "rope_theta 10000.0 in rope_scaling and 500000.0 in rope_parameters",
    ),
    "no base": ("llama", {"rope_theta": 0}, "rope_theta 0, but it must be more than 0"),
    "partly rotated": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "not a number": ("llama", {"hidden_size": "4096"}, "hidden_size '4096', but it must be a whole number"),
    "true is no number": ("llama", {"hidden_size": True}, "hidden_size True, but it must be a whole number"),
    "negative": ("llama", {"rms_norm_eps": -1e-5}, "rms_norm_eps -1e-05, but it must be a number, 0 or more"),
    "zero": ("llama", {"num_hidden_layers": 0}, "num_hidden_layers 0"),
    "groups": ("llama", {"num_key_value_heads": 3}, "not a multiple of its num_key_value_heads 3"),
    "experts twice": (
        "qwen3_moe",
        {"num_experts": 4, "num_local_experts": 8},
        "num_experts 4, num_local_experts 8",
    ),
    "no experts left": ("qwen2_moe", {"decoder_sparse_step": 50}, "so no layer has experts"),
    "kind of layer": (
        "qwen2",
        {"layer_types": ["linear_attention"] * 32},
        "'linear_attention' in layer_types",
    ),
    "layers": ("qwen2", {"layer_types": ["full_attention"]}, "1 layer_types for 32 layers"),
    "windows off": ("qwen3", {"layer_types": ["sliding_attention"] * 32}, "but use_sliding_window False"),
    "which layers": ("qwen2_moe", {"use_sliding_window": True}, "without layer_types"),
    "no window": (
        "mistral",
        {"sliding_window": 0},
        "sliding_window 0, but it must be a whole number above 0",
    ),
    "llama has no windows": ("llama", {"sliding_window": 4096}, "sliding_window 4096, but no value"),
    "jitter": ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_config_key_is_refused(name: str) -> None:
    model_type, change, sentence = REFUSED[name]
    with pytest.raises(UserError) as error:
        settings_from_config({"model_type": model_type, **change})
    assert sentence in str(error.value)
    assert "problems" not in str(error.value), "nothing else is wrong"


def test_all_problems_come_at_once() -> None:
    with pytest.raises(UserError, match="3 problems"):
        settings_from_config({"model_type": "llama", "hidden_act": "relu", "sinks": 1, "vocab_size": -1})


@pytest.mark.parametrize(
    "config, sentence",
    [
        ({}, "no model_type"),
        ({"model_type": "qwen_2"}, "did you mean qwen2?"),
        ({"model_type": "bert"}, "known here are gpt2"),
        ({"model_type": "mamba"}, "qwen2_moe, qwen3_moe<end>"),
        ({"model_type": ["llama"]}, "known here are gpt2"),
    ],
)
def test_unknown_families_are_refused_with_those_that_are_known(
    config: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError) as error:
        settings_from_config(config)
    assert sentence in f"{error.value}<end>" and "qwen3_moe" in str(error.value)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"normalization": "LayerNorm"}, "normalization 'LayerNorm'"),
        ({"rotary_percent": 0.5}, "rotary_percent 0.5"),
        ({"rotary_interleaved": True}, "rotary_interleaved True"),
        ({"position_embedding_type": "none"}, "position_embedding_type 'none'"),
        ({"add_proj_bias": True}, "add_proj_bias True"),
        ({"spec": ("layers", "mine")}, "spec ('layers', 'mine')"),
    ],
)
def test_model_of_no_family_is_refused_with_the_difference(change: dict[str, Any], named: str) -> None:
    model = dataclasses.replace(configs(settings_from_config({"model_type": "llama"}))[0], **change)
    with pytest.raises(UserError) as error:
        config_from_settings(model, NO_EXPERTS)
    assert str(error.value).endswith(f"the closest is llama, except for {named}")


def test_windows_choose_the_family() -> None:
    """Windows everywhere select Mistral; in some layers, with QKV biases, Qwen2."""
    model = dataclasses.replace(
        configs(settings_from_config({"model_type": "llama"}))[0], num_layers=3, window_size=(6, 0)
    )
    written = config_from_settings(model, NO_EXPERTS)
    assert (written["model_type"], written["sliding_window"]) == ("mistral", 7)
    some = dataclasses.replace(model, add_qkv_bias=True, window_attn_skip_freq="2")
    assert config_from_settings(some, NO_EXPERTS)["layer_types"] == [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ]
    never = dataclasses.replace(model, window_attn_skip_freq="[0]*3")
    assert config_from_settings(never, NO_EXPERTS)["model_type"] == "llama"


def test_a_setting_without_effect_does_not_matter() -> None:
    model = configs(settings_from_config({"model_type": "gpt2"}))[0]
    assert isinstance(model, TransformerConfig)
    changed = dataclasses.replace(model, rotary_base=5.0, add_qkv_bias=True, seq_length=7)
    assert config_from_settings(changed, NO_EXPERTS) == config_from_settings(model, NO_EXPERTS)
