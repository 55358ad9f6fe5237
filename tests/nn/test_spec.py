"""Tests module specs: the modules they build, and the errors of wrong specs."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from pentatron.errors import UserError
from pentatron.nn.attention import DotProductAttention, SelfAttention
from pentatron.nn.linear import ColumnParallelLinear, RowParallelLinear
from pentatron.nn.norm import RMSNorm
from pentatron.nn.spec import (
    AttnMaskType,
    IdentityOp,
    MLPSubmodules,
    ModuleSpec,
    SelfAttentionSubmodules,
    build_module,
    document_kwargs,
)
from pentatron.settings.model import TransformerConfig


class Part(nn.Module):
    def __init__(self, width: int, scale: float = 1.0, submodules: MLPSubmodules | None = None) -> None:
        super().__init__()
        self.given = (width, scale, submodules)


def test_parameters_are_merged_and_slots_handed_on() -> None:
    slots = MLPSubmodules(linear_fc1=IdentityOp, linear_fc2=IdentityOp)
    spec = ModuleSpec(Part, params={"scale": 2.0}, submodules=slots)
    assert build_module(spec, 3).given == (3, 2.0, slots)
    assert build_module(spec, width=3, scale=1.5).given == (3, 2.0, slots), "what the spec says counts more"
    assert build_module(Part, 4).given == (4, 1.0, None)
    assert spec.params == {"scale": 2.0}


def test_functions_are_handed_back() -> None:
    def add(x: int, y: int = 1) -> int:
        return x + y

    assert build_module(add, config=None) is add
    assert build_module(ModuleSpec(add, params={"y": 5}), config=None)(2) == 7


def test_a_class_may_be_named_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(build_module(("pentatron.nn.spec", "IdentityOp"), 1, anything=2), IdentityOp)
    (tmp_path / "a_module_in_the_folder.py").write_text("class Thing:\n    pass\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert type(build_module(("a_module_in_the_folder", "Thing"))).__name__ == "Thing"
    assert sys.path == before
    # A folder that is in sys.path already keeps its place.
    monkeypatch.setattr(sys, "path", [str(tmp_path), *before])
    build_module(("a_module_in_the_folder", "Thing"))
    assert sys.path == [str(tmp_path), *before]


@pytest.mark.parametrize(
    ("slot", "said"),
    [
        (
            ("no.such.module", "Thing"),
            r"ModuleSpec\(no.such.module.Thing\): module no.such.module cannot be imp",
        ),
        (("pentatron.nn.spec", "Thing"), r"ModuleSpec\(pentatron.nn.spec.Thing\): .* has no Thing"),
        (("pentatron.nn.spec",), r"ModuleSpec\(pentatron.nn.spec\): an import path has two strings"),
        (ModuleSpec(Part, params={"wide": 1}), r"ModuleSpec\(Part\): Part cannot be built from .*'wide'"),
        (
            ModuleSpec(Part, params={"width": 1}),
            r"ModuleSpec\(Part\): Part cannot be built from .*multiple values",
        ),
        (IdentityOp(), r"a slot must be a class, a function or a ModuleSpec, not IdentityOp"),
    ],
)
def test_a_wrong_spec_gets_a_sentence(slot: object, said: str) -> None:
    with pytest.raises(UserError, match=said):
        build_module(slot, 3)  # type: ignore[arg-type]


def test_a_mistake_inside_a_constructor_keeps_its_traceback() -> None:
    class Broken(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            len(width)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        build_module(Broken, 3)


def test_attention_of_a_table() -> None:
    """Builds attention from the guide's spec and a configuration written by hand."""
    spec = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm,
            k_layernorm=IdentityOp,
        ),
    )
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2)
    attention = build_module(spec, config=config, layer_number=1)
    names = {name for name, _ in attention.named_parameters()}
    biases = {"linear_qkv.bias", "linear_proj.bias"}
    assert names == biases | {"linear_qkv.weight", "q_norm.weight", "linear_proj.weight"}
    nn.init.normal_(attention.linear_qkv.weight)
    for parameter in (*attention.parameters(),)[1:]:
        nn.init.ones_(parameter)
    x = torch.randn(2, 5, 32)
    later = x.clone()
    later[:, 3:] += 1
    made, other = attention(x, None, None), attention(later, None, None)
    assert torch.equal(made[:, :3], other[:, :3]) and not torch.allclose(made[:, 3:], other[:, 3:])


class Ignorant(DotProductAttention):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(q, k, v)


def test_attention_that_does_not_know_documents_is_refused_where_there_are_any() -> None:
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2)
    attention = SelfAttention(config)
    attention.core_attention.__class__ = Ignorant
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        attention(x, None, None)
        with pytest.raises(
            UserError, match=r"--reset-attention-mask would be lost in Ignorant: .* documents=None"
        ):
            attention(x, None, None, ((0, 2), (0,)))
    assert document_kwargs(IdentityOp(), ((0,),)) == {"documents": ((0,),)}, "nothing to lose"


def test_other_masks_are_refused() -> None:
    with pytest.raises(UserError, match=r"attention is causal; AttnMaskType\.padding is not available"):
        DotProductAttention(TransformerConfig(), attn_mask_type=AttnMaskType.padding)


def test_slots_have_names_and_no_others() -> None:
    with pytest.raises(TypeError, match="linear_fc3"):
        MLPSubmodules(linear_fc1=IdentityOp, linear_fc3=IdentityOp)  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModuleSpec(Part).params = {}  # type: ignore[misc]
