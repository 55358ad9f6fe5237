"""Tests presets: `transformers` builds a model with as many parameters from their config.json."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pentatron.hf.model_config import config_from_settings, settings_from_config
from pentatron.settings.presets import presets
from pentatron.settings.run_config import RunConfig
from tests.settings.test_presets import PUBLISHED, completed, parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_counts_the_same(name: str) -> None:
    """Counts with two layers; the number of layers is tested with the published parameter counts."""
    found = completed(name)
    # A list of layers with experts would have to be cut too; no preset has one.
    found = found.changed(num_layers=2, padded_vocab_size=found.vocab_size)
    config = RunConfig.of(found)
    written = config_from_settings(config.model, config.moe)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**written))
    assert sum(p.numel() for p in theirs.parameters()) == parameters(found, found.num_experts or 0)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("gpt2", "gpt2"),
        ("llama2-7b", "llama"),
        ("mistral-7b-v0.1", "mistral"),
        ("mixtral-8x7b", "mixtral"),
        ("qwen1.5-moe-a2.7b", "qwen2_moe"),
    ],
)
def test_the_default_of_a_family_in_transformers(name: str, model_type: str) -> None:
    """Compares a preset with its family's defaults, apart from those inherited from another model."""
    read = settings_from_config(AutoConfig.for_model(model_type).to_dict())
    free = {
        "max_position_embeddings",
        "rotary_base",
        "layernorm_epsilon",
        "hidden_dropout",
        "attention_dropout",
    }
    for key, value in presets()[name].items():
        if key in read and key not in free and key != "moe_aux_loss_coeff":
            assert read[key] == value, key
