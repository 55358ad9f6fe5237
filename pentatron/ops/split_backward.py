"""Weight gradients that are computed later than the rest of a backward.

While the input half of a backward runs, a linear layer hands over what its weight gradient is made of (its input and
the gradient of its output) instead of computing it; the weight half computes the product and gives it to the parameter
the way autograd would, hooks included. Gradients of biases, norms and tables are cheap and come with the input half.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pentatron.ops.matmul import (
    GroupedRows,
    has_own_way,
    outer_products,
    product,
    rows_times,
    without_gradient,
)

# A stage and a micro-batch.
Cell = tuple[int, int]


class Product(Protocol):
    """The gradient of a weight, not yet computed."""

    weight: nn.Parameter
    inputs: Tensor
    gradient: Tensor

    def compute(self) -> Tensor: ...


@dataclass
class DenseProduct:
    """That of `y = x Wᵀ`."""

    weight: nn.Parameter
    inputs: Tensor
    gradient: Tensor

    def compute(self) -> Tensor:
        return outer_products(self.gradient.flatten(0, -2), self.inputs.flatten(0, -2))


@dataclass
class GroupedProduct:
    """That of `grouped_linear`."""

    weight: nn.Parameter
    inputs: Tensor
    gradient: Tensor
    groups: GroupedRows

    def compute(self) -> Tensor:
        return self.groups.outer(self.gradient, self.inputs)


class DeferredGradients:
    """The products that wait on one rank, by stage and micro-batch. Its layers and its executor share one of these."""

    def __init__(self) -> None:
        self._open: list[Product] | None = None
        self._waiting: dict[Cell, list[Product]] = {}

    @contextmanager
    def collecting(self, cell: Cell) -> Iterator[None]:
        """Around the input half of a backward."""
        assert self._open is None and cell not in self._waiting, f"{cell} is cut in two twice"
        self._open = self._waiting[cell] = []
        try:
            yield
        finally:
            self._open = None

    def take(self, product: Product) -> bool:
        """Keeps a product for later; False if the backward that runs is a whole one."""
        if self._open is None:
            return False
        self._open.append(product)
        return True

    def compute(self, cell: Cell) -> None:
        """The weight half: everything that waits for this cell, in the order of the backward."""
        products = self._waiting.pop(cell)
        products.reverse()
        while products:
            product = products.pop()
            with torch.no_grad():
                gradient = product.compute()
            torch.autograd.backward(product.weight, gradient)

    @property
    def cells(self) -> list[Cell]:
        """Whose weight gradients wait."""
        return list(self._waiting)

    @property
    def elements(self) -> int:
        """Numbers kept for them."""
        return sum(p.inputs.numel() + p.gradient.numel() for found in self._waiting.values() for p in found)


def linear(
    x: Tensor, weight: nn.Parameter, bias: Tensor | None, deferred: DeferredGradients | None
) -> Tensor:
    """`x Wᵀ + b`; with `deferred`, the gradient of the weight may come later than the others."""
    if deferred is None and not has_own_way(x, weight):
        return without_gradient(x, weight, bias)
    result = _Linear.apply(x, weight, bias, deferred)
    assert isinstance(result, Tensor)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, deferred: DeferredGradients | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Where a layer is recomputed, the saved weight comes back as another tensor, whose gradient nobody reads.
        ctx.parameter, ctx.deferred = weight, deferred
        return rows_times(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        of_input = product(gradient, weight) if ctx.needs_input_grad[0] else None
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = now_or_later(DenseProduct(ctx.parameter, x, gradient), ctx.deferred)
        return of_input, of_weight, of_bias, None


def grouped_linear(
    rows: Tensor, weight: nn.Parameter, groups: GroupedRows, deferred: DeferredGradients | None
) -> Tensor:
    """`x Wᵀ` with a matrix for each group of rows; `weight` is [groups, outputs, inputs]."""
    result = _GroupedLinear.apply(rows, weight, groups, deferred)
    assert isinstance(result, Tensor)
    return result


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: nn.Parameter, groups: GroupedRows, deferred: DeferredGradients | None
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.parameter, ctx.groups, ctx.deferred = weight, groups, deferred
        return groups.times(rows, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_input = ctx.groups.times(gradient, weight) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = now_or_later(GroupedProduct(ctx.parameter, rows, gradient, ctx.groups), ctx.deferred)
        return of_input, of_weight, None, None


def now_or_later(product: Product, deferred: DeferredGradients | None) -> Tensor | None:
    """The gradient of a weight, unless it is left for later."""
    return None if deferred is not None and deferred.take(product) else product.compute()
