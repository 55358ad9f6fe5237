"""Tests torch.compile around a model, and a user's attention kernel in a slot."""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_builders import gpt_builder
from model_provider import model_provider
from pentatron.megatron.gpt_model import GPTModel
from pentatron.models.layer_specs import get_gpt_layer_local_spec
from pentatron.settings.core_config import core_transformer_config_from_args
from tests.support import LLAMA, resolved

TOKENS = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(3))
POSITIONS = torch.arange(16).expand(2, 16)


def gradients(model: Any, parameters: nn.Module) -> tuple[Tensor, list[Tensor]]:
    parameters.zero_grad()
    losses = model(TOKENS, POSITIONS, None, labels=TOKENS.roll(-1, 1))
    losses.sum().backward()
    return losses.detach(), [p.grad for p in parameters.parameters() if p.grad is not None]


def test_a_model_may_be_compiled() -> None:
    model = model_provider(gpt_builder, config=resolved(f"{LLAMA} --num-layers 1").config)
    expected = gradients(model, model)
    # aot_eager traces forward and backward but needs no C++ compiler.
    found = gradients(torch.compile(model, backend="aot_eager"), model)
    torch.testing.assert_close(found, expected)


class FlashAttention(nn.Module):
    """The attention of docs/how-it-works/specs.md for the slot `core_attention`."""

    def __init__(self, **given: Any) -> None:
        super().__init__()

    def forward(self, q_BNSH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> Tensor:
        from flash_attn import flash_attn_func

        q, k, v = (x.transpose(1, 2) for x in (q_BNSH, k_BKSH, v_BKSH))
        made: Tensor = flash_attn_func(q, k, v, causal=True).transpose(1, 2)
        return made


def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Replaces the package's function; [batch, tokens, heads, width], fewer key heads than query heads."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


def test_flash_attn_can_stand_in_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    package = ModuleType("flash_attn")
    package.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    config = core_transformer_config_from_args(
        resolved(f"{LLAMA} --group-query-attention --num-query-groups 2").config
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    attention = spec.submodules.self_attention
    slots = replace(attention.submodules, core_attention=FlashAttention)
    other = replace(
        spec, submodules=replace(spec.submodules, self_attention=replace(attention, submodules=slots))
    )
    models = [GPTModel(config, chosen, vocab_size=128, max_sequence_length=16) for chosen in (spec, other)]
    torch.testing.assert_close(*(gradients(model, model) for model in models))
