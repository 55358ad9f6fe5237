"""Compares a gate that is fused with the second matmul of an MLP with autograd through both."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pentatron.ops.activation import gated_linear, mlp_activation, swiglu, swiglu_backward


def _made(dtype: torch.dtype) -> tuple[Tensor, nn.Parameter, Tensor]:
    torch.manual_seed(3)
    inner = torch.randn(2, 5, 48, dtype=dtype, requires_grad=True)
    return inner, nn.Parameter(torch.randn(7, 24, dtype=dtype)), torch.randn(2, 5, 7, dtype=dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_values_and_gradients(dtype: torch.dtype, tolerance: float) -> None:
    inner, weight, gradient = _made(dtype)
    gated_linear(inner, weight).backward(gradient)
    exact, matrix = inner.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    F.linear(mlp_activation(exact, has_gate=True), matrix).backward(gradient.double())
    for found, true in ((inner.grad, exact.grad), (weight.grad, matrix.grad)):
        assert found is not None and true is not None
        assert (found.double() - true).abs().max() < tolerance * true.abs().max()


def test_nothing_between_the_matrices_is_kept() -> None:
    inner, weight, _ = _made(torch.float32)
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        gated_linear(inner, weight)
        assert set(kept) == {inner.data_ptr(), weight.data_ptr()}
        kept.clear()
        F.linear(mlp_activation(inner, has_gate=True), weight)
        assert set(kept) > {inner.data_ptr(), weight.data_ptr()}


def test_the_kernel_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
        pytest.skip("needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1)")
    from pentatron.ops import triton_activation

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(5)
    inner, gradient = torch.randn(3, 2, 2 * 1100), torch.randn(3, 2, 1100)
    expected = swiglu_backward(gradient, inner)
    for most in (triton_activation._MOST_ROWS, 4):
        monkeypatch.setattr(triton_activation, "_MOST_ROWS", most)
        found = triton_activation.swiglu_backward(gradient.to(device), inner.to(device))
        for made, true in zip(found, expected):
            torch.testing.assert_close(made.cpu(), true, rtol=1e-5, atol=1e-5)
        forward = triton_activation.swiglu(inner.to(device))
        torch.testing.assert_close(forward.cpu(), swiglu(inner), rtol=1e-5, atol=1e-5)
        assert torch.equal(forward, found[1]), "what backward makes again is what forward made"
