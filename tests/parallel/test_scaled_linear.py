"""Linear layers in fp8 against products of rounded values in fp32, and against what is exact."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pentatron.parallel.scaled_linear as module
from pentatron.kernels.fp8 import E4M3, Scaled
from pentatron.kernels.fp8 import scaled as plainly_scaled
from pentatron.parallel.deferral import DeferredGradients
from pentatron.parallel.scaled_linear import FORMATS, can_be_scaled, scaled_gated_linear, scaled_linear

FOLLOWS = torch.linspace(-1, 1, 48)


def layer(dtype: torch.dtype = torch.float32) -> tuple[Tensor, nn.Parameter, nn.Parameter]:
    torch.manual_seed(3)
    x = torch.randn(2, 16, 64).to(dtype).requires_grad_()
    return x, nn.Parameter((0.1 * torch.randn(48, 64)).to(dtype)), nn.Parameter(torch.randn(48).to(dtype))


def results(format: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The output, and the gradients of input, weight and bias."""
    x, weight, bias = layer(dtype)
    y = scaled_linear(x, weight, bias, FORMATS[format])
    (y * FOLLOWS.to(dtype)).sum().backward()
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    return [y.detach(), x.grad, weight.grad, bias.grad]


def as_rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded with the scale written down anew, and scaled back."""
    exponent = torch.floor(torch.log2(torch.finfo(dtype).max / values.abs().max().double())).float()
    return (values.float() * 2.0**exponent).to(dtype).float() / 2.0**exponent


def reference(format: str) -> list[Tensor]:
    x, weight, bias = (t.detach() for t in layer())
    gradient = FOLLOWS.expand(2, 16, 48)
    x8, w8, g8 = (
        as_rounded(x, E4M3),
        as_rounded(weight, E4M3),
        as_rounded(gradient, FORMATS[format].gradients),
    )
    return [F.linear(x8, w8, bias), g8 @ w8, g8.flatten(0, 1).t() @ x8.flatten(0, 1), gradient.sum((0, 1))]


def exact() -> list[Tensor]:
    x, weight, bias = layer()
    y = F.linear(x, weight, bias)
    (y * FOLLOWS).sum().backward()
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    return [y.detach(), x.grad, weight.grad, bias.grad]


def apart(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [float((f.float() - e).norm() / e.norm()) for f, e in zip(found, expected, strict=True)]


@pytest.mark.parametrize("format", FORMATS)
def test_products_of_rounded_values(format: str) -> None:
    assert max(apart(results(format), reference(format))) < 1e-6


@pytest.mark.parametrize("format", FORMATS)
def test_as_near_to_what_is_exact_as_fp8_can_be(format: str) -> None:
    found = apart(results(format, torch.bfloat16), exact())
    assert 0.005 < found[0] < 0.04
    assert all(0.01 < f < 0.08 for f in found[1:3]), found
    assert found[3] < 0.005, "the bias has no part in it"


def test_gradients_have_a_digit_less_in_hybrid() -> None:
    e4m3, hybrid = apart(results("e4m3"), exact()), apart(results("hybrid"), exact())
    assert e4m3[0] == hybrid[0] and 1.2 * e4m3[1] < hybrid[1]


def test_a_wrong_scale_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(matrix: Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = True) -> Scaled:
        made = plainly_scaled(matrix, dtype, rows, columns)
        return Scaled(made.rows, made.columns, made.unscale * 2, made.scale)

    monkeypatch.setattr(module, "scaled", wrong)
    assert min(apart(results("hybrid"), exact())[:3]) > 0.4


def test_the_input_is_kept_in_a_byte_an_element() -> None:
    x, weight, bias = layer(torch.bfloat16)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scaled_linear(x, weight, bias, FORMATS["hybrid"])
    beside = sum(t.nbytes for t in kept if t.data_ptr() != weight.data_ptr())
    assert x.numel() <= beside < x.numel() + 100


def test_the_same_bits_where_gradients_of_weights_come_later_and_layers_run_again() -> None:
    expected = results("hybrid")
    x, weight, bias = layer()
    deferred = DeferredGradients()
    made = checkpoint(
        lambda x: scaled_linear(x, weight, bias, FORMATS["hybrid"], deferred), x, use_reentrant=False
    )
    with deferred.collecting((0, 0)):
        (made * FOLLOWS).sum().backward()
    assert weight.grad is None and x.grad is not None and torch.equal(x.grad, expected[1])
    assert deferred.elements == x.numel() + made.numel()
    del made
    deferred.compute((0, 0))
    assert weight.grad is not None and torch.equal(weight.grad, expected[2])
    x, weight, bias = layer()
    (scaled_linear(x, weight, bias, FORMATS["hybrid"], deferred) * FOLLOWS).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, expected[2]), (
        "a backward that is not cut in two"
    )


def test_what_is_no_number_comes_through() -> None:
    x, weight, _ = layer()
    with torch.no_grad():
        x[1, 3, 5] = float("nan")
        assert torch.isnan(scaled_linear(x, weight, None, FORMATS["e4m3"])[1, 3]).all()
        x[1, 3, 5] = float("inf")
        assert not torch.isfinite(scaled_linear(x, weight, None, FORMATS["e4m3"])[1, 3]).any()


def test_evaluation_computes_the_same() -> None:
    expected = results("hybrid")[0]
    x, weight, bias = layer()
    with torch.no_grad():
        assert torch.equal(scaled_linear(x, weight, bias, FORMATS["hybrid"]), expected)


def test_tokens_that_do_not_fit() -> None:
    assert can_be_scaled(torch.empty(2, 8, 3)) and not can_be_scaled(torch.empty(1, 1, 3))


def test_a_compiler_sees_one_graph() -> None:
    expected = results("hybrid")
    x, weight, bias = layer()
    compiled = torch.compile(
        lambda x: scaled_linear(x, weight, bias, FORMATS["hybrid"]), backend="aot_eager", fullgraph=True
    )
    y = compiled(x)
    (y * FOLLOWS).sum().backward()
    assert torch.equal(y, expected[0]) and x.grad is not None and torch.equal(x.grad, expected[1])
    assert weight.grad is not None and torch.equal(weight.grad, expected[2])


Gate = Callable[[Tensor, nn.Parameter, nn.Parameter], Tensor]


def gate_beside(x: Tensor, weight: nn.Parameter, bias: nn.Parameter) -> Tensor:
    gate, up = scaled_linear(x, weight, bias, FORMATS["hybrid"]).chunk(2, dim=-1)
    return F.silu(gate) * up


def gate_within(x: Tensor, weight: nn.Parameter, bias: nn.Parameter) -> Tensor:
    return scaled_gated_linear(x, weight, bias, FORMATS["hybrid"])


def through_a_gate(gate: Gate, dtype: torch.dtype) -> list[Tensor]:
    x, weight, bias = layer(dtype)
    y = gate(x, weight, bias)
    (y * FOLLOWS[:24].to(dtype)).sum().backward()
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    return [y.detach(), x.grad, weight.grad, bias.grad]


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-3), (torch.bfloat16, 1e-2)])
def test_a_gate_within_the_function_is_the_gate_behind_it(dtype: torch.dtype, near: float) -> None:
    """But for what rounds to another number of fp8, a digit away: few elements."""
    expected = through_a_gate(gate_beside, dtype)
    found = through_a_gate(gate_within, dtype)
    assert torch.equal(found[0], expected[0])
    assert max(apart(found, [e.float() for e in expected])) < near
    with torch.no_grad():
        assert torch.equal(gate_within(*layer(dtype)), expected[0])


def test_a_gate_is_in_the_same_graph_and_its_weight_may_come_later() -> None:
    expected = through_a_gate(gate_within, torch.float32)
    compiled = torch.compile(gate_within, backend="aot_eager", fullgraph=True)
    assert all(
        torch.equal(a, b) for a, b in zip(through_a_gate(compiled, torch.float32), expected, strict=True)
    )
    deferred = DeferredGradients()
    x, weight, bias = layer()
    with deferred.collecting((0, 0)):
        (scaled_gated_linear(x, weight, bias, FORMATS["hybrid"], deferred) * FOLLOWS[:24]).sum().backward()
    assert weight.grad is None and bias.grad is not None and torch.equal(bias.grad, expected[3])
    deferred.compute((0, 0))
    assert weight.grad is not None and torch.equal(weight.grad, expected[2])
