"""Compares Triton's dispatch and combination of rows, and its activation, with plain torch."""

import os

import pytest
import torch
from torch import Tensor

from pentatron.ops import activation
from pentatron.ops.dispatch import has_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(
    not has_triton() or (DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"),
    reason="needs Triton and a GPU, or its interpreter",
)
DTYPES = [torch.float32, torch.bfloat16]


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 40, 5000])
def test_rows_are_dealt_and_summed(dtype: torch.dtype, width: int) -> None:
    from pentatron.ops import triton_activation

    pairs = torch.randperm(21, generator=torch.Generator().manual_seed(1))
    places = pairs.argsort().view(7, 3)
    x, made = draw(2, 7, width).to(dtype), draw(3, 21, width).to(dtype)
    dealt = triton_activation.dispatch_rows(x.to(DEVICE), places.to(DEVICE))
    assert torch.equal(dealt.cpu(), x[pairs // 3]) and torch.equal(
        activation.dispatch_rows(x, places), x[pairs // 3]
    )
    summed = triton_activation.combine_rows(made.to(DEVICE), places.to(DEVICE))
    assert torch.allclose(
        summed.cpu(), activation.combine_rows(made, places), rtol=1e-2 if dtype != torch.float32 else 1e-6
    )


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 24, 2050])
def test_the_activation_and_its_gradients(dtype: torch.dtype, width: int, gated: bool) -> None:
    from pentatron.ops import triton_activation

    inner, weights, gradient = (
        draw(seed, *shape).to(dtype)
        for seed, shape in enumerate(((5, width * (2 if gated else 1)), (5,), (5, width)))
    )
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    there = [t.to(DEVICE) for t in (inner, weights, gradient)]
    made = triton_activation.weighted_activation(*there[:2], gated)
    assert torch.allclose(made.cpu(), activation.weighted_activation(inner, weights, gated), **near)
    found = triton_activation.weighted_activation_backward(there[2], *there[:2], gated)
    expected = activation.weighted_activation_backward(gradient, inner, weights, gated)
    for ours, theirs in zip(found, expected, strict=True):
        scale = theirs.abs().max().clamp(min=1)
        assert torch.allclose((ours.cpu() / scale).float(), (theirs / scale).float(), **near)
