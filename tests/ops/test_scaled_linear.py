"""Compares fp8 linear layers with matmuls of rounded values in fp32, and with exact results."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pentatron.ops.fp8_linear as module
from pentatron.ops.fp8 import E4M3, Fp8Matrix
from pentatron.ops.fp8 import quantize as plainly_scaled
from pentatron.ops.fp8_linear import FORMATS, fp8_linear, fp8_supports
from pentatron.ops.linear import DeferredGradients

FOLLOWS = torch.linspace(-1, 1, 48)
BY_ROWS = replace(FORMATS["hybrid"], by_rows=True)


def layer(dtype: torch.dtype = torch.float32) -> tuple[Tensor, nn.Parameter, nn.Parameter]:
    torch.manual_seed(3)
    x = torch.randn(2, 16, 64).to(dtype).requires_grad_()
    return x, nn.Parameter((0.1 * torch.randn(48, 64)).to(dtype)), nn.Parameter(torch.randn(48).to(dtype))


def results(format: str, dtype: torch.dtype = torch.float32, by_rows: bool = False) -> list[Tensor]:
    """Returns the output and the gradients of input, weight and bias."""
    x, weight, bias = layer(dtype)
    y = fp8_linear(x, weight, bias, replace(FORMATS[format], by_rows=by_rows))
    (y * FOLLOWS.to(dtype)).sum().backward()
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    return [y.detach(), x.grad, weight.grad, bias.grad]


def as_rounded(values: Tensor, dtype: torch.dtype, dim: int | None = None) -> Tensor:
    """Rounds to fp8 and scales back, with the formula of the scale written independently.

    `dim` is the summed dimension, if each index of the others has its own scale.
    """
    wide = values.abs().double()
    largest = wide.amax() if dim is None else wide.amax(dim, keepdim=True)
    exponent = torch.floor(torch.log2(torch.finfo(dtype).max / largest)).float()
    return (values.float() * 2.0**exponent).to(dtype).float() / 2.0**exponent


def reference(format: str, by_rows: bool) -> list[Tensor]:
    x, weight, bias = (t.detach() for t in layer())
    gradient, kind = FOLLOWS.expand(2, 16, 48), FORMATS[format].gradients

    def made(values: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
        return as_rounded(values.flatten(0, -2), dtype, dim if by_rows else None)

    return [
        F.linear(made(x, E4M3, 1), made(weight, E4M3, 1), bias).view(2, 16, 48),
        (made(gradient, kind, 1) @ made(weight, E4M3, 0)).view(2, 16, 64),
        made(gradient, kind, 0).t() @ made(x, E4M3, 0),
        gradient.sum((0, 1)),
    ]


def exact() -> list[Tensor]:
    x, weight, bias = layer()
    y = F.linear(x, weight, bias)
    (y * FOLLOWS).sum().backward()
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    return [y.detach(), x.grad, weight.grad, bias.grad]


def apart(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [float((f.float() - e).norm() / e.norm()) for f, e in zip(found, expected, strict=True)]


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_products_of_rounded_values(format: str, by_rows: bool) -> None:
    assert max(apart(results(format, by_rows=by_rows), reference(format, by_rows))) < 1e-6


def test_row_scales_confine_an_outlier() -> None:
    """Scales by row keep the outputs of other tokens precise if one token is 1e5 times as large."""

    def lost(by_rows: bool) -> float:
        x, weight, _ = layer()
        with torch.no_grad():
            x[0, 0] *= 1e5
            found = fp8_linear(x, weight, None, replace(FORMATS["e4m3"], by_rows=by_rows))
            true = F.linear(x, weight)
        return apart([found[1]], [true[1]])[0]

    assert lost(by_rows=True) < 0.04 and lost(by_rows=False) > 0.2


@pytest.mark.parametrize("format", FORMATS)
def test_a_column_of_outliers_costs_a_gradient_less_by_row(format: str) -> None:
    """Scales by row keep the weight gradients of other channels if one input channel is far larger.

    Trained models have such channels.
    """

    def lost(by_rows: bool) -> float:
        x, weight, _ = layer()
        with torch.no_grad():
            x[..., 0] *= 1e5
        fp8_linear(x, weight, None, replace(FORMATS[format], by_rows=by_rows)).mul(FOLLOWS).sum().backward()
        true = FOLLOWS[:, None] * x.detach().flatten(0, 1).sum(0)
        assert weight.grad is not None
        return apart([weight.grad[:, 1:]], [true[:, 1:]])[0]

    assert 4 * lost(by_rows=True) < lost(by_rows=False)


@pytest.mark.parametrize("format", FORMATS)
def test_error_is_that_of_fp8_rounding(format: str) -> None:
    found = apart(results(format, torch.bfloat16), exact())
    assert 0.005 < found[0] < 0.04
    assert all(0.01 < f < 0.08 for f in found[1:3]), found
    assert found[3] < 0.005, "the bias has no part in it"


def test_gradients_have_a_digit_less_in_hybrid() -> None:
    e4m3, hybrid = apart(results("e4m3"), exact()), apart(results("hybrid"), exact())
    assert e4m3[0] == hybrid[0] and 1.2 * e4m3[1] < hybrid[1]


def test_a_wrong_scale_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(matrix: Tensor, dtype: torch.dtype, **wanted: bool) -> Fp8Matrix:
        made = plainly_scaled(matrix, dtype, **wanted)
        return replace(made, unscale=made.unscale * 2, columns_unscale=made.columns_unscale * 2)

    monkeypatch.setattr(module, "quantize", wrong)
    assert min(apart(results("hybrid"), exact())[:3]) > 0.4


def test_the_input_is_kept_in_a_byte_an_element() -> None:
    x, weight, bias = layer(torch.bfloat16)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        fp8_linear(x, weight, bias, FORMATS["hybrid"])
    beside = sum(t.nbytes for t in kept if t.data_ptr() != weight.data_ptr())
    assert x.numel() <= beside < x.numel() + 100


def test_the_same_bits_where_gradients_of_weights_come_later_and_layers_run_again() -> None:
    expected = results("hybrid")
    x, weight, bias = layer()
    deferred = DeferredGradients()
    made = checkpoint(
        lambda x: fp8_linear(x, weight, bias, FORMATS["hybrid"], deferred), x, use_reentrant=False
    )
    with deferred.collect((0, 0)):
        (made * FOLLOWS).sum().backward()
    assert weight.grad is None and x.grad is not None and torch.equal(x.grad, expected[1])
    assert deferred.elements == x.numel() + made.numel()
    del made
    deferred.compute((0, 0))
    assert weight.grad is not None and torch.equal(weight.grad, expected[2])
    x, weight, bias = layer()
    (fp8_linear(x, weight, bias, FORMATS["hybrid"], deferred) * FOLLOWS).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, expected[2]), (
        "a backward that is not cut in two"
    )


def test_nan_and_inf_reach_the_output() -> None:
    x, weight, _ = layer()
    with torch.no_grad():
        x[1, 3, 5] = float("nan")
        assert torch.isnan(fp8_linear(x, weight, None, FORMATS["e4m3"])[1, 3]).all()
        x[1, 3, 5] = float("inf")
        assert not torch.isfinite(fp8_linear(x, weight, None, FORMATS["e4m3"])[1, 3]).any()


def test_evaluation_computes_the_same() -> None:
    expected = results("hybrid")[0]
    x, weight, bias = layer()
    with torch.no_grad():
        assert torch.equal(fp8_linear(x, weight, bias, FORMATS["hybrid"]), expected)


def test_tokens_that_do_not_fit() -> None:
    assert fp8_supports(torch.empty(2, 8, 3)) and not fp8_supports(torch.empty(1, 1, 3))


@pytest.mark.parametrize("by_rows", [False, True])
def test_a_compiler_sees_one_graph(by_rows: bool) -> None:
    expected = results("hybrid", by_rows=by_rows)
    x, weight, bias = layer()
    fp8 = replace(FORMATS["hybrid"], by_rows=by_rows)
    compiled = torch.compile(lambda x: fp8_linear(x, weight, bias, fp8), backend="aot_eager", fullgraph=True)
    y = compiled(x)
    (y * FOLLOWS).sum().backward()
    assert torch.equal(y, expected[0]) and x.grad is not None and torch.equal(x.grad, expected[1])
    assert weight.grad is not None and torch.equal(weight.grad, expected[2])


Gate = Callable[[Tensor, nn.Parameter, nn.Parameter], Tensor]


def gate_beside(x: Tensor, weight: nn.Parameter, bias: nn.Parameter) -> Tensor:
    gate, up = fp8_linear(x, weight, bias, FORMATS["hybrid"]).chunk(2, dim=-1)
    return F.silu(gate) * up


def gate_beside_by_rows(x: Tensor, weight: nn.Parameter, bias: nn.Parameter) -> Tensor:
    gate, up = fp8_linear(x, weight, bias, BY_ROWS).chunk(2, dim=-1)
    return F.silu(gate) * up


def gate_within(x: Tensor, weight: nn.Parameter, bias: nn.Parameter) -> Tensor:
    return fp8_linear(x, weight, bias, FORMATS["hybrid"], gates=True)


def gate_within_by_rows(x: Tensor, weight: nn.Parameter, bias: nn.Parameter) -> Tensor:
    return fp8_linear(x, weight, bias, BY_ROWS, gates=True)


def through_a_gate(gate: Gate, dtype: torch.dtype) -> list[Tensor]:
    x, weight, bias = layer(dtype)
    y = gate(x, weight, bias)
    (y * FOLLOWS[:24].to(dtype)).sum().backward()
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    return [y.detach(), x.grad, weight.grad, bias.grad]


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-3), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(
    ("within", "beside"), [(gate_within, gate_beside), (gate_within_by_rows, gate_beside_by_rows)]
)
def test_a_gate_within_the_function_is_the_gate_behind_it(
    within: Gate, beside: Gate, dtype: torch.dtype, near: float
) -> None:
    """A fused gate differs only in few elements, which round to a neighbouring fp8 number."""
    expected, found = through_a_gate(beside, dtype), through_a_gate(within, dtype)
    assert torch.equal(found[0], expected[0])
    assert max(apart(found, [e.float() for e in expected])) < near
    with torch.no_grad():
        assert torch.equal(within(*layer(dtype)), expected[0])


@pytest.mark.parametrize("within", [gate_within, gate_within_by_rows])
def test_a_gate_is_in_the_same_graph(within: Gate) -> None:
    expected = through_a_gate(within, torch.float32)
    found = through_a_gate(torch.compile(within, backend="aot_eager", fullgraph=True), torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_weight_before_a_gate_may_come_later() -> None:
    expected = through_a_gate(gate_within, torch.float32)
    deferred = DeferredGradients()
    x, weight, bias = layer()
    with deferred.collect((0, 0)):
        (fp8_linear(x, weight, bias, FORMATS["hybrid"], deferred, gates=True) * FOLLOWS[:24]).sum().backward()
    assert weight.grad is None and bias.grad is not None and torch.equal(bias.grad, expected[3])
    deferred.compute((0, 0))
    assert weight.grad is not None and torch.equal(weight.grad, expected[2])
