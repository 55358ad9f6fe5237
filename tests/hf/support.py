"""Small `transformers` models with random weights, saved and opened, and our models filled from them."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from pentatron.hf.folder import HuggingFaceFolder, open_folder
from pentatron.hf.model_config import settings_from_config
from pentatron.hf.tensor_names import load_weights
from pentatron.models.causal_lm import CausalLM, build_model
from pentatron.parallel.sharding import Fragment, fragments_of, sharded_parameters
from pentatron.settings.model import MoEConfig, TransformerConfig

CPU = torch.device("cpu")
WORDS, LENGTH = 61, 16
LLAMA = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": WORDS, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def theirs(model_type: str, **config: Any) -> nn.Module:
    """Returns a model with unusual weights: norms of one and biases of zero would hide mistakes."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    sizes = GPT2 if model_type == "gpt2" else LLAMA
    described = AutoConfig.for_model(model_type, **{**sizes, **config})
    model: nn.Module = AutoModelForCausalLM.from_config(described, attn_implementation="eager")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.2 * torch.randn(p.shape, generator=generator) + (p.dim() == 1))
    return model.float().eval()


def save(model: nn.Module, path: Path, **how: Any) -> Path:
    model.save_pretrained(path, **how)
    return path


def configs(settings: dict[str, Any]) -> tuple[TransformerConfig, MoEConfig]:
    """Returns our configuration of the model in a folder."""

    def pick(kind: type) -> dict[str, Any]:
        names = {field.name for field in dataclasses.fields(kind)}
        return {name: value for name, value in settings.items() if name in names}

    model, moe = pick(TransformerConfig), pick(MoEConfig)
    assert len(model) + len(moe) == len(settings), set(settings) - set(model) - set(moe)
    return TransformerConfig(**model, padded_vocab_size=settings["vocab_size"] + 3), MoEConfig(**moe)


def targets_of(model: nn.Module) -> list[Fragment]:
    return [
        fragment
        for param in sharded_parameters(model)
        for _, fragment in fragments_of(param, param.parameter.detach().view(-1))
    ]


def ours(folder: HuggingFaceFolder) -> tuple[CausalLM, TransformerConfig, MoEConfig]:
    model, moe = configs(settings_from_config(folder.config))
    built = build_model(model, 1, CPU, moe=moe)
    load_weights(folder, model, moe, targets_of(built))
    return built.eval(), model, moe


def ours_from(path: Path) -> tuple[CausalLM, TransformerConfig, MoEConfig]:
    with open_folder(path) as folder:
        return ours(folder)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(0, WORDS, (2, 2, LENGTH), generator=generator)
    return tokens, torch.arange(LENGTH).expand(2, LENGTH), labels


def gap(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()
