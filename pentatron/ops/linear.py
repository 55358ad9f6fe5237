"""Products of matrices on processors, where torch's own way takes longer than it need.

In half precision, on processors that have no instructions for it, every number is turned into fp32 inside the product, again and again. Turning both
matrices into fp32 at once and rounding the result, once, computes the same (numbers are multiplied and added in fp32 either way, in another order) in less time.

In fp32, a few rows times a large matrix (a token of a text times a model's weights) is a matter of reading the matrix once. oneDNN's product
comes nearer to that than MKL's, which torch calls; it takes longer to begin, so that matrices have to be large. On AMD's processors MKL makes no
use of their wider instructions, and oneDNN is faster with many rows too; but not where rows are what is summed over.
"""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pentatron.settings.decisions import fit_grouped_matmul

_HALVES = (torch.bfloat16, torch.float16)
# With fewer rows than this, reading a matrix takes longer than multiplying with it.
_FEW_ROWS = 16


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def _has_instructions() -> bool:
    """Whether the processor multiplies bf16 itself. Others than x86, and torch where it does not say, are left to torch."""
    asked = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")]
    return not _is_x86() or any(ask is None or bool(ask()) for ask in asked)


def _reader_of_large_matrices() -> Callable[..., Tensor] | None:
    """oneDNN's product, where torch was built with it. Others than x86 do not have MKL."""
    if not _is_x86() or not torch.backends.mkldnn.is_available() or not torch.backends.mkl.is_available():
        return None
    found: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return found


def _is_neglected() -> bool:
    """Whether MKL leaves the processor's wider instructions alone."""
    try:
        described = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "AuthenticAMD" in described and torch.backends.cpu.get_cpu_capability() == "AVX512"


# Asked once: it is asked for every product.
_HAS_INSTRUCTIONS = _has_instructions()
_ONEDNN = _reader_of_large_matrices()
_IS_NEGLECTED = _is_neglected()
# Of a matrix: less than this stays in a processor's caches.
_LARGE = 2**21
# Rows, up to which a product waits for memory more than for arithmetic.
_MANY_ROWS = 64
# Of a matrix that many rows are multiplied with: less is over before it has begun.
_WORTH_IT = 2**17


def through_fp32(rows: Tensor) -> bool:
    """Whether products of these rows are quicker in fp32. A compiler would keep the copies for backward."""
    return (
        not _HAS_INSTRUCTIONS
        and not torch.compiler.is_compiling()
        and rows.dtype in _HALVES
        and rows.device.type == "cpu"
        and rows.numel() >= _FEW_ROWS * rows.shape[-1]
    )


def has_own_way(rows: Tensor, matrix: Tensor) -> bool:
    """Whether products of these are to be made here, and so their gradients: torch would make them otherwise."""
    return through_fp32(rows) or _by_onednn(rows, matrix)


def _by_onednn(rows: Tensor, matrix: Tensor) -> bool:
    """Of many rows."""
    return (
        _IS_NEGLECTED
        and _ONEDNN is not None
        and matrix.numel() >= _WORTH_IT
        and rows.numel() >= _MANY_ROWS * rows.shape[-1]
        and rows.dtype is torch.float32
        and matrix.dtype is torch.float32
        and rows.device.type == "cpu"
        and not torch.compiler.is_compiling()
    )


def without_gradient(rows: Tensor, matrix_OI: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x Wᵀ + b`, with which there is no backward if gradients are off."""
    if (
        _ONEDNN is None
        or torch.is_grad_enabled()
        or matrix_OI.numel() < _LARGE
        or rows.numel() >= _MANY_ROWS * rows.shape[-1]
        or rows.dtype is not torch.float32
        or matrix_OI.dtype is not torch.float32
        or rows.device.type != "cpu"
        or torch.compiler.is_compiling()
    ):
        return F.linear(rows, matrix_OI, bias)
    return _ONEDNN(rows, matrix_OI, bias, "none", [], "")


def rows_times(rows: Tensor, matrix_OI: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x Wᵀ + b`."""
    if _by_onednn(rows, matrix_OI):
        assert _ONEDNN is not None
        return _ONEDNN(rows, matrix_OI, bias, "none", [], "")
    if not through_fp32(rows):
        return F.linear(rows, matrix_OI, bias)
    exact_bias = None if bias is None else bias.float()
    return F.linear(rows.float(), matrix_OI.float(), exact_bias).to(rows.dtype)


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`."""
    if right.dim() == 2 and _by_onednn(left, right):
        assert _ONEDNN is not None
        return _ONEDNN(left, right.t(), None, "none", [], "")
    return (left.float() @ right.float()).to(left.dtype) if through_fp32(left) else left @ right


def outer_products(left_NO: Tensor, right_NI: Tensor) -> Tensor:
    """The sum of the outer products of their rows: [O, I]."""
    if not through_fp32(left_NO):
        return left_NO.t() @ right_NI
    return (left_NO.float().t() @ right_NI.float()).to(left_NO.dtype)


# Products of consecutive groups of rows with a matrix for each group.


class GroupedRows(Protocol):
    """Rows that are sorted into groups, some of which may have none."""

    def times(self, rows_NI: Tensor, matrices_GIO: Tensor) -> Tensor:
        """Row by row the product with the matrix of its group: [N, O]."""
        ...

    def outer(self, left_NO: Tensor, right_NI: Tensor) -> Tensor:
        """For each group the sum of the outer products of its rows: [G, O, I]."""
        ...


@dataclass(frozen=True)
class GroupsOnDevice:
    """Where each group ends is known to the device alone (int32), and every product is one kernel there; the last group
    has all rows that are left."""

    ends: Tensor

    def times(self, rows_NI: Tensor, matrices_GIO: Tensor) -> Tensor:
        return F.grouped_mm(rows_NI, matrices_GIO, offs=self.ends)

    def outer(self, left_NO: Tensor, right_NI: Tensor) -> Tensor:
        return F.grouped_mm(left_NO.t(), right_NI, offs=self.ends)


@dataclass(frozen=True)
class Groups:
    """How many rows each group has. `together`: one kernel for all, where the device has it; it reads there where groups
    end, so `on_device`, the same numbers in its memory, spares it a copy."""

    counts: tuple[int, ...]
    together: bool = False
    on_device: Tensor | None = field(default=None, compare=False)

    def times(self, rows_NI: Tensor, matrices_GIO: Tensor) -> Tensor:
        if self._in_one_kernel(rows_NI, matrices_GIO.shape[2]):
            return self._there(rows_NI.device).times(rows_NI, matrices_GIO)
        made = rows_NI.new_empty(len(rows_NI), matrices_GIO.shape[2])
        for rows, matrix, place in zip(self._split(rows_NI), matrices_GIO, self._split(made)):
            if through_fp32(rows):
                place.copy_(rows.float() @ matrix.float())
            else:
                torch.mm(rows, matrix, out=place)
        return made

    def outer(self, left_NO: Tensor, right_NI: Tensor) -> Tensor:
        if self._in_one_kernel(left_NO, right_NI.shape[1]):
            return self._there(left_NO.device).outer(left_NO, right_NI)
        made = left_NO.new_empty(len(self.counts), left_NO.shape[1], right_NI.shape[1])
        for left, right, place in zip(self._split(left_NO), self._split(right_NI), made):
            if through_fp32(left):
                place.copy_(left.float().t() @ right.float())
            else:
                torch.mm(left.t(), right, out=place)
        return made

    def _in_one_kernel(self, rows: Tensor, other_width: int) -> bool:
        return self.together and one_kernel_can(rows, rows.shape[1], other_width)

    def _there(self, device: torch.device) -> GroupsOnDevice:
        if self.on_device is not None:
            return GroupsOnDevice(self.on_device.cumsum(0, dtype=torch.int32))
        return GroupsOnDevice(torch.tensor(list(accumulate(self.counts)), dtype=torch.int32, device=device))

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(list(self.counts))


def one_kernel_can(rows: Tensor, *widths: int) -> bool:
    """The kernel is for bf16 on a GPU, and rows begin at multiples of 16 bytes in all that it reads or writes."""
    return rows.is_cuda and rows.dtype == torch.bfloat16 and fit_grouped_matmul(*widths)


# Weight gradients that are computed later than the rest of a backward.
#
# While the input half of a backward runs, a linear layer hands over what its weight gradient is made of (its
# input and the gradient of its output) instead of computing it; the weight half computes the product and
# gives it to the parameter the way autograd would, hooks included. Gradients of biases, norms and tables are
# cheap and come with the input half.


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
