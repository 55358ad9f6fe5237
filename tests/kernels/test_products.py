"""Products in half precision through fp32: the same but for the order of additions."""

import pytest
import torch

from pentatron.kernels import products
from pentatron.parallel.deferral import linear
from pentatron.parallel.grouped import Groups


@pytest.fixture(params=[torch.bfloat16, torch.float16])
def half(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    monkeypatch.setattr(products, "_HAS_INSTRUCTIONS", False)
    torch.manual_seed(1)
    return request.param  # type: ignore[no-any-return]


def made(half: torch.dtype) -> list[torch.Tensor]:
    """A product with a bias and its gradients."""
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
    monkeypatch.setattr(products, "_HAS_INSTRUCTIONS", True)
    for tensor, expected in zip(found, made(half), strict=True):
        assert tensor.dtype is half
        # Additions in another order may round to the neighbour, not further, and rarely do.
        assert (tensor == expected).float().mean() > 0.98
        torch.testing.assert_close(tensor.float(), expected.float(), rtol=0.01, atol=0.04)


def test_products_are_rounded_once(half: torch.dtype) -> None:
    left, right = torch.randn(32, 300).to(half), torch.randn(300, 40).to(half)
    exact = left.double() @ right.double()
    off = (products.product(left, right).double() - exact).abs()
    assert bool((off <= exact.abs() * torch.finfo(half).eps / 2 + 1e-4).all())
    twice = left[:, :150] @ right[:150] + left[:, 150:] @ right[150:]
    assert not bool(((twice.double() - exact).abs() <= exact.abs() * torch.finfo(half).eps / 2 + 1e-4).all())


def test_groups_of_rows_are_multiplied_alike(half: torch.dtype) -> None:
    rows, matrices = torch.randn(40, 16).to(half), torch.randn(3, 16, 24).to(half)
    groups = Groups((17, 0, 23))
    expected = torch.cat((rows[:17].float() @ matrices[0].float(), rows[17:].float() @ matrices[2].float()))
    assert torch.equal(groups.times(rows, matrices), expected.to(half))


def test_what_is_quick_is_left_to_torch(half: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    many, few = torch.randn(64, 8).to(half), torch.randn(3, 8).to(half)
    assert products.through_fp32(many)
    assert not products.through_fp32(few) and not products.through_fp32(many.float())
    assert not products.through_fp32(torch.empty(64, 8, dtype=half, device="meta"))
    monkeypatch.setattr(products, "_HAS_INSTRUCTIONS", True)
    assert not products.through_fp32(many)
