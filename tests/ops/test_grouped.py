"""Compares a grouped matmul in one kernel with one matmul after the other."""

import pytest
import torch
from torch import Tensor

from pentatron.ops.linear import Groups, grouped_linear

COUNTS = [(3, 0, 5, 8), (0, 0, 0, 0), (16, 0, 0, 0), (0, 0, 0, 16), (4,)]
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel needs a GPU")


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_each_row_meets_the_matrix_of_its_group(counts: tuple[int, ...], together: bool) -> None:
    groups = Groups(counts, together)
    rows, matrices = draw(1, sum(counts), 6), draw(2, len(counts), 6, 10)
    owners = [number for number, count in enumerate(counts) for _ in range(count)]
    made = groups.matmul(rows, matrices)
    assert made.shape == (sum(counts), 10)
    for row, owner in enumerate(owners):
        assert torch.allclose(made[row], rows[row] @ matrices[owner], atol=1e-5)
    left = draw(3, sum(counts), 10)
    outer = groups.weight_gradient(left, rows)
    expected = torch.zeros(len(counts), 10, 6)
    for row, owner in enumerate(owners):
        expected[owner] += torch.outer(left[row], rows[row])
    assert torch.allclose(outer, expected, atol=1e-5)
    for number, count in enumerate(counts):
        assert count or outer[number].eq(0).all(), "nothing left over from elsewhere in memory"


@GPU
@pytest.mark.parametrize("counts", [(3, 0, 5, 8), (0, 0, 0, 0), (160, 0, 0, 0), (0, 17, 0, 300)], ids=str)
@pytest.mark.parametrize(("inner", "outer"), [(32, 48), (32, 20), (20, 32), (12, 20)])
def test_the_kernel_agrees_with_the_loop(counts: tuple[int, ...], inner: int, outer: int) -> None:
    """Widths that are no multiples of 8 do not suit the kernel, but still give the right result."""
    found = []
    for together in (False, True):
        rows = draw(1, sum(counts), inner).to("cuda", torch.bfloat16).requires_grad_()
        weight = torch.nn.Parameter(draw(2, len(counts), outer, inner).to("cuda", torch.bfloat16))
        made = grouped_linear(rows, weight, Groups(counts, together), None)
        made.backward(draw(3, sum(counts), outer).to("cuda", torch.bfloat16))
        found.append((made, rows.grad, weight.grad))
    for one, all_at_once in zip(*found, strict=True):
        assert one is not None and all_at_once is not None
        assert torch.allclose(one.float(), all_at_once.float(), rtol=2e-2, atol=1e-1)
    for number, count in enumerate(counts):
        assert count or found[1][2][number].eq(0).all()


@pytest.mark.parametrize(("widths", "fits"), [((32, 48), True), ((32, 20), False), ((20, 32), False)])
def test_the_kernel_is_asked_only_for_widths_it_can_take(widths: tuple[int, int], fits: bool) -> None:
    """Input and output widths must both suit the kernel, because backward swaps them."""

    class OnGPU:
        is_cuda, dtype, shape = True, torch.bfloat16, (7, widths[0])

    assert Groups((7,), use_grouped_mm=True)._in_one_kernel(OnGPU(), widths[1]) == fits  # type: ignore[arg-type]
    assert not Groups((7,), use_grouped_mm=False)._in_one_kernel(OnGPU(), widths[1])  # type: ignore[arg-type]
