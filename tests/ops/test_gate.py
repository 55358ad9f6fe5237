import pytest
import torch
from torch.nn import functional as F

from pentatron.ops.activation import gate_backward


def test_the_gradient_of_a_gate_and_its_largest_element() -> None:
    torch.manual_seed(5)
    inner, gradient = torch.randn(6, 48, requires_grad=True), torch.randn(6, 24)
    gate, up = inner.chunk(2, dim=-1)
    (F.silu(gate) * up).backward(gradient)
    made, largest = gate_backward(gradient, inner.detach())
    torch.testing.assert_close(made, inner.grad)
    assert largest.shape == (6,) and torch.equal(largest, made.abs().amax(-1))


def test_the_kernel_does_the_same() -> None:
    triton = pytest.importorskip("triton")
    if not torch.cuda.is_available() and not triton.knobs.runtime.interpret:
        pytest.skip("needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1)")
    from pentatron.ops.triton_activation import gate_backward as by_triton

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(5)
    for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        inner, gradient = torch.randn(6, 2 * 1100, dtype=dtype), torch.randn(6, 1100, dtype=dtype)
        inner[2, 1099] = inner[2, 2199] = 100.0
        expected, _ = gate_backward(gradient, inner)
        made, largest = by_triton(gradient.to(device), inner.to(device))
        torch.testing.assert_close(made.cpu(), expected, rtol=near, atol=near)
        assert torch.equal(largest, made.abs().amax(-1).float()), "of what is written, to the bit"
        assert int(largest.argmax()) == 2, "the last columns count too"
        gradient[4, 7] = float("nan")
        found = by_triton(gradient.to(device), inner.to(device))[1].isnan()
        assert found.tolist() == [False, False, False, False, True, False]
