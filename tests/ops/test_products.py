"""Tests half-precision matmuls through fp32 and by oneDNN: equal up to the order of additions."""

import pytest
import torch

from pentatron.ops import linear as linear_module
from pentatron.ops.linear import Groups, linear


@pytest.fixture(params=[torch.bfloat16, torch.float16])
def half(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    monkeypatch.setattr(linear_module, "_HAS_BF16_INSTRUCTIONS", False)
    torch.manual_seed(1)
    return request.param  # type: ignore[no-any-return]


def made(half: torch.dtype) -> list[torch.Tensor]:
    """Returns a matmul with a bias, and its gradients."""
    x, weight, bias, gradient = (
        torch.randn(shape).to(half) for shape in ((2, 20, 48), (64, 48), (64,), (2, 20, 64))
    )
    parameter = torch.nn.Parameter(weight)
    x.requires_grad_()
    bias.requires_grad_()
    y = linear(x, parameter, bias, None)
    return [y.detach(), *torch.autograd.grad(y, (x, parameter, bias), gradient)]


def test_products_and_gradients_are_those_of_half_precision(
    half: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = made(half)
    torch.manual_seed(1)
    monkeypatch.setattr(linear_module, "_HAS_BF16_INSTRUCTIONS", True)
    for tensor, expected in zip(found, made(half), strict=True):
        assert tensor.dtype is half
        # Another order of additions rarely changes the rounding, and then only to a neighbouring number.
        assert (tensor == expected).float().mean() > 0.98
        torch.testing.assert_close(tensor.float(), expected.float(), rtol=0.01, atol=0.04)


def test_products_are_rounded_once(half: torch.dtype) -> None:
    left, right = torch.randn(32, 300).to(half), torch.randn(300, 40).to(half)
    exact = left.double() @ right.double()
    off = (linear_module.matmul(left, right).double() - exact).abs()
    assert bool((off <= exact.abs() * torch.finfo(half).eps / 2 + 1e-4).all())
    twice = left[:, :150] @ right[:150] + left[:, 150:] @ right[150:]
    assert not bool(((twice.double() - exact).abs() <= exact.abs() * torch.finfo(half).eps / 2 + 1e-4).all())


def test_groups_of_rows_are_multiplied_alike(half: torch.dtype) -> None:
    rows, matrices = torch.randn(40, 16).to(half), torch.randn(3, 16, 24).to(half)
    groups = Groups((17, 0, 23))
    expected = torch.cat((rows[:17].float() @ matrices[0].float(), rows[17:].float() @ matrices[2].float()))
    assert torch.equal(groups.matmul(rows, matrices), expected.to(half))


def test_only_large_half_precision_products_go_through_fp32(
    half: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    many, few = torch.randn(64, 8).to(half), torch.randn(3, 8).to(half)
    assert linear_module.through_fp32(many)
    assert not linear_module.through_fp32(few) and not linear_module.through_fp32(many.float())
    assert not linear_module.through_fp32(torch.empty(64, 8, dtype=half, device="meta"))
    monkeypatch.setattr(linear_module, "_HAS_BF16_INSTRUCTIONS", True)
    assert not linear_module.through_fp32(many)


@pytest.fixture
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the number of rows of each matmul that oneDNN computes."""
    real = linear_module._ONEDNN
    if real is None:
        pytest.skip("torch was built without oneDNN")
    seen: list[int] = []

    def counted(rows: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append(rows.shape[:-1].numel())
        return real(rows, *rest)

    monkeypatch.setattr(linear_module, "_ONEDNN", counted)
    monkeypatch.setattr(linear_module, "_UNCACHED_ELEMENTS", 1024)
    monkeypatch.setattr(linear_module, "_MKL_IGNORES_AVX512", False)
    return seen


@torch.no_grad()
@pytest.mark.parametrize("bias", [None, torch.linspace(-3, 3, 40)])
def test_few_rows_times_a_large_matrix(by_onednn: list[int], bias: torch.Tensor | None) -> None:
    torch.manual_seed(3)
    parameter = torch.nn.Parameter(torch.randn(40, 300))
    plain, turned = torch.randn(5, 3, 300), torch.randn(3, 5, 300).transpose(0, 1)
    for rows in (plain, turned, torch.randn(2, 1, 600)[..., :300], plain[:1, :1], plain[:0]):
        found = linear(rows, parameter, bias, None)
        exact = rows.double() @ parameter.double().t() + (0 if bias is None else bias.double())
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-4)
    assert by_onednn == [15, 15, 2, 1, 0]


def test_other_products_are_left_to_torch(by_onednn: list[int]) -> None:
    large, small = torch.nn.Parameter(torch.randn(40, 300)), torch.nn.Parameter(torch.randn(2, 300))
    rows = torch.randn(5, 300)
    gradients = torch.autograd.grad(linear(rows, large, None, None).sum(), large)
    assert gradients[0].shape == large.shape
    with torch.no_grad():
        assert torch.equal(linear(rows, small, None, None), rows @ small.t())
        many = torch.randn(64, 300)
        assert torch.equal(linear(many, large, None, None), torch.nn.functional.linear(many, large))
        linear(rows.bfloat16(), torch.nn.Parameter(large.bfloat16()), None, None)
        linear(rows.double(), torch.nn.Parameter(large.double()), None, None)
    assert by_onednn == []


def of_many_rows(bias: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Returns a matmul and its gradients."""
    torch.manual_seed(4)
    x = torch.randn(2, 40, 300, dtype=dtype, requires_grad=True)
    parameter = torch.nn.Parameter(torch.randn(40, 300, dtype=dtype))
    wanted = [x, parameter] if bias is None else [x, parameter, bias]
    y = linear(x, parameter, bias, None)
    return [y.detach(), *torch.autograd.grad(y, wanted, torch.randn_like(y))]


@pytest.mark.parametrize("biased", [False, True])
def test_many_rows_where_the_processor_is_neglected(
    biased: bool, by_onednn: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_module, "_MIN_ELEMENTS", 1024)
    bias = torch.linspace(-3, 3, 40).requires_grad_() if biased else None
    monkeypatch.setattr(linear_module, "_MKL_IGNORES_AVX512", False)
    expected = of_many_rows(bias)
    assert by_onednn == []
    monkeypatch.setattr(linear_module, "_MKL_IGNORES_AVX512", True)
    for found, of_torch in zip(of_many_rows(bias), expected, strict=True):
        torch.testing.assert_close(found, of_torch, rtol=1e-5, atol=1e-4)
    # oneDNN computes forward and the input gradient, but not the weight gradient.
    assert by_onednn == [80, 80]
    of_many_rows(None, torch.float64)
    linear(torch.randn(63, 300), torch.nn.Parameter(torch.randn(40, 300)), None, None)
    assert by_onednn == [80, 80], "other numbers, too few rows"
