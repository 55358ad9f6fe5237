"""Compares planned activations of a compiled layer with what torch's partitioner saves for backward."""

import itertools

import pytest
import torch
from torch import Tensor

from pentatron.models.causal_lm import build_model
from pentatron.nn.compiled import CompileOptions
from pentatron.nn.options import ModelOptions
from pentatron.nn.recompute import recompute_of
from pentatron.plan.activations import layer_activations
from pentatron.plan.sizes import PlanSizes
from tests.support import LLAMA, resolved

LENGTH, WIDTH = 128, 256
# All widths differ, so that no two saved tensors can be confused.
SIZES = (
    f"--num-layers 2 --hidden-size {WIDTH} --num-attention-heads 8 --kv-channels 40 --ffn-hidden-size 640 --seq-length {LENGTH} "
    f"--vocab-size 1024 --micro-batch-size 1 --global-batch-size 1 --bf16 --compile on"
)
GROUPED = f"{LLAMA} --group-query-attention --num-query-groups 2"
QWEN3 = f"{GROUPED} --qk-layernorm"


def kept_by_a_layer(words: str) -> int:
    """Returns the bytes that the second of two layers saves; the first also saves its inputs."""
    config = resolved(words).config
    options = ModelOptions(
        recompute=recompute_of(config.memory), compile=CompileOptions("aot_eager_decomp_partition")
    )
    model = build_model(config.model, 1, torch.device("cpu"), config.moe, options).to(torch.bfloat16)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    angles = None if model.rope is None else model.rope(torch.arange(LENGTH)[None])
    totals = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for each in model.layers.values():
            x = model._run_layers(x, [each], angles, None, None)
            totals.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
    return [after - before for before, after in itertools.pairwise(totals)][-1]


@pytest.mark.parametrize(
    "words",
    [
        QWEN3,
        pytest.param("", marks=pytest.mark.sweep, id="gpt"),
        pytest.param(f"{GROUPED} --add-qkv-bias", marks=pytest.mark.sweep, id="qwen2"),
        pytest.param(f"{QWEN3} --recompute-granularity selective", marks=pytest.mark.sweep, id="core_attn"),
    ],
)
def test_compiled_layer_keeps_the_planned_bytes(words: str) -> None:
    command = f"{SIZES} {words}"
    planned = PlanSizes(resolved(command).config)
    assert planned.decisions.compilation.on
    plain = layer_activations(PlanSizes(resolved(f"{command} --compile off").config), sparse=False)
    saves = LLAMA in words
    assert layer_activations(planned, sparse=False) == pytest.approx(kept_by_a_layer(command), rel=0.01)
    assert plain > 1.02 * layer_activations(planned, sparse=False) or not saves
