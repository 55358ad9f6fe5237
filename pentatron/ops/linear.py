"""Linear products: faster CPU paths, grouped products for experts, and weight gradients that can be deferred.

CPUs without bf16 or fp16 instructions convert every number to fp32 inside the product, again and again.
Converting whole matrices to fp32 first and rounding the result once computes the same, as products and sums
are in fp32 either way.

In fp32, a few rows times a large matrix (generating a token) is limited by reading the matrix once. oneDNN
comes closer to that than MKL, which torch calls, but has a higher start-up cost, so matrices have to be
large. On AMD processors MKL does not use AVX-512, so oneDNN is faster with many rows too, but not for
products that sum over rows.
"""

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pentatron.layout.actions import Cell
from pentatron.settings.decisions import fit_grouped_matmul

_HALF_DTYPES = (torch.bfloat16, torch.float16)
# With fewer rows than this, converting a matrix takes longer than multiplying with it.
_FEW_ROWS = 16


_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


def _has_bf16_instructions() -> bool:
    """Whether the CPU multiplies bf16 natively. Also True if unknown: torch's product is used then."""
    checks = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")]
    return not _IS_X86 or any(check is None or bool(check()) for check in checks)


def _onednn_linear() -> Callable[..., Tensor] | None:
    """Returns oneDNN's linear operator, or None if torch lacks it or does not use MKL (not x86)."""
    if not _IS_X86 or not torch.backends.mkldnn.is_available() or not torch.backends.mkl.is_available():
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def _mkl_ignores_avx512() -> bool:
    """Whether this is an AMD processor with AVX-512, which MKL does not use there."""
    try:
        cpu_info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "AuthenticAMD" in cpu_info and torch.backends.cpu.get_cpu_capability() == "AVX512"


# Evaluated once, as every product needs them.
_HAS_BF16_INSTRUCTIONS = _has_bf16_instructions()
_ONEDNN = _onednn_linear()
_MKL_IGNORES_AVX512 = _mkl_ignores_avx512()
# Matrices with fewer elements stay in the CPU's caches.
_UNCACHED_ELEMENTS = 2**21
# With fewer rows than this, a product is limited by memory bandwidth rather than arithmetic.
_MANY_ROWS = 64
# For many rows: below this number of matrix elements the start-up cost of oneDNN dominates.
_MIN_ELEMENTS = 2**17


def through_fp32(rows: Tensor) -> bool:
    """Whether products of these rows are faster in fp32.

    Not under torch.compile, which would save the copies.
    """
    return (
        not _HAS_BF16_INSTRUCTIONS
        and not torch.compiler.is_compiling()
        and rows.dtype in _HALF_DTYPES
        and rows.device.type == "cpu"
        and rows.numel() >= _FEW_ROWS * rows.shape[-1]
    )


def _by_onednn(rows: Tensor, matrix: Tensor) -> bool:
    """Whether oneDNN is faster, for many rows."""
    return (
        _MKL_IGNORES_AVX512
        and matrix.numel() >= _MIN_ELEMENTS
        and rows.numel() >= _MANY_ROWS * rows.shape[-1]
        and _suits_onednn(rows, matrix)
    )


def _suits_onednn(rows: Tensor, matrix: Tensor) -> bool:
    return (
        _ONEDNN is not None
        and rows.dtype is matrix.dtype is torch.float32
        and rows.device.type == "cpu"
        and not torch.compiler.is_compiling()
    )


def _onednn_product(rows: Tensor, matrix_OI: Tensor, bias: Tensor | None = None) -> Tensor:
    assert _ONEDNN is not None
    return _ONEDNN(rows, matrix_OI, bias, "none", [], "")


def linear_forward(rows: Tensor, matrix_OI: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `x Wᵀ + b`."""
    if _by_onednn(rows, matrix_OI):
        return _onednn_product(rows, matrix_OI, bias)
    if not through_fp32(rows):
        return F.linear(rows, matrix_OI, bias)
    exact_bias = None if bias is None else bias.float()
    return F.linear(rows.float(), matrix_OI.float(), exact_bias).to(rows.dtype)


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """Returns `left @ right`."""
    if right.dim() == 2 and _by_onednn(left, right):
        return _onednn_product(left, right.t())
    return (left.float() @ right.float()).to(left.dtype) if through_fp32(left) else left @ right


def weight_gradient(left: Tensor, right: Tensor) -> Tensor:
    """Returns `leftᵀ @ right`, the sum of the outer products of the rows: [O, I]."""
    left_NO, right_NI = left.flatten(0, -2), right.flatten(0, -2)
    if not through_fp32(left_NO):
        return left_NO.t() @ right_NI
    return (left_NO.float().t() @ right_NI.float()).to(left_NO.dtype)


# --- grouped products: consecutive groups of rows, each with its own matrix ---


@dataclass(frozen=True)
class DeviceGroups:
    """Groups, some of which may be empty, of sorted rows. Their ends are known on the device only (int32).

    Every product is one kernel; the last group has all remaining rows.
    """

    ends: Tensor

    def matmul(self, rows_NI: Tensor, matrices_GIO: Tensor) -> Tensor:
        """Multiplies each row by the matrix of its group: [N, O]."""
        return F.grouped_mm(rows_NI, matrices_GIO, offs=self.ends)

    def weight_gradient(self, left_NO: Tensor, right_NI: Tensor) -> Tensor:
        """Returns for each group the sum of the outer products of its rows: [G, O, I]."""
        return F.grouped_mm(left_NO.t(), right_NI, offs=self.ends)


@dataclass(frozen=True)
class Groups:
    """Groups with known numbers of rows. `use_grouped_mm`: one kernel for all groups, if the device has one.

    That kernel reads the ends of the groups on the device; `on_device`, the counts in its memory, saves a
    copy.
    """

    counts: tuple[int, ...]
    use_grouped_mm: bool = False
    on_device: Tensor | None = field(default=None, compare=False)

    def matmul(self, rows_NI: Tensor, matrices_GIO: Tensor) -> Tensor:
        if self._in_one_kernel(rows_NI, matrices_GIO.shape[2]):
            return self._groups_on_device(rows_NI.device).matmul(rows_NI, matrices_GIO)
        output = rows_NI.new_empty(len(rows_NI), matrices_GIO.shape[2])
        for rows, matrix, part in zip(self._split(rows_NI), matrices_GIO, self._split(output)):
            if through_fp32(rows):
                part.copy_(rows.float() @ matrix.float())
            else:
                torch.mm(rows, matrix, out=part)
        return output

    def weight_gradient(self, left_NO: Tensor, right_NI: Tensor) -> Tensor:
        if self._in_one_kernel(left_NO, right_NI.shape[1]):
            return self._groups_on_device(left_NO.device).weight_gradient(left_NO, right_NI)
        output = left_NO.new_empty(len(self.counts), left_NO.shape[1], right_NI.shape[1])
        for left, right, part in zip(self._split(left_NO), self._split(right_NI), output):
            if through_fp32(left):
                part.copy_(left.float().t() @ right.float())
            else:
                torch.mm(left.t(), right, out=part)
        return output

    def _in_one_kernel(self, rows: Tensor, other_width: int) -> bool:
        return self.use_grouped_mm and grouped_mm_supports(rows, rows.shape[1], other_width)

    def _groups_on_device(self, device: torch.device) -> DeviceGroups:
        if self.on_device is not None:
            return DeviceGroups(self.on_device.cumsum(0, dtype=torch.int32))
        return DeviceGroups(torch.tensor(list(accumulate(self.counts)), dtype=torch.int32, device=device))

    def _split(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows.split(list(self.counts))


GroupedRows = DeviceGroups | Groups


def grouped_mm_supports(rows: Tensor, *widths: int) -> bool:
    """Whether torch's grouped kernel supports these: bf16 on a GPU, all rows aligned to 16 bytes."""
    return rows.is_cuda and rows.dtype == torch.bfloat16 and fit_grouped_matmul(*widths)


# --- deferred weight gradients (zero-bubble schedules) ---
#
# In the input half of a backward, a linear layer saves the factors of its weight gradient (its input and the
# gradient of its output) instead of multiplying them. The weight half computes the product and passes it to
# the parameter through autograd, hooks included. Gradients of biases, norms and embeddings are cheap and
# computed in the input half.


@dataclass
class Product:
    """A weight gradient that has not been computed yet: the function of the product, and its factors."""

    weight: nn.Parameter
    function: Callable[[Tensor, Tensor], Tensor]
    gradient: Tensor
    inputs: Tensor


class DeferredGradients:
    """Deferred products of one rank, by stage and micro-batch; shared by its layers and its executor."""

    def __init__(self) -> None:
        self._collecting: list[Product] | None = None
        self._pending: dict[Cell, list[Product]] = {}

    @contextmanager
    def collect(self, cell: Cell) -> Iterator[None]:
        """Context manager around the input half of a backward, which collects its products."""
        assert self._collecting is None and cell not in self._pending, f"{cell} has two input halves"
        self._collecting = self._pending[cell] = []
        try:
            yield
        finally:
            self._collecting = None

    def take(self, product: Product) -> bool:
        """Defers a product; returns False in a whole backward, where it must be computed at once."""
        if self._collecting is None:
            return False
        self._collecting.append(product)
        return True

    def compute(self, cell: Cell) -> None:
        """Runs the weight half: computes all products of the cell, in the order of the backward."""
        products = self._pending.pop(cell)
        # Popping from the reversed list frees each product's factors before the next one is computed.
        products.reverse()
        while products:
            product = products.pop()
            with torch.no_grad():
                gradient = product.function(product.gradient, product.inputs)
            torch.autograd.backward(product.weight, gradient)

    @property
    def cells(self) -> list[Cell]:
        """The cells with deferred products."""
        return list(self._pending)

    @property
    def elements(self) -> int:
        """Number of tensor elements kept for deferred products."""
        return sum(p.inputs.numel() + p.gradient.numel() for kept in self._pending.values() for p in kept)


def linear(
    x: Tensor, weight: nn.Parameter, bias: Tensor | None, deferred: DeferredGradients | None
) -> Tensor:
    """Returns `x Wᵀ + b`; with `deferred` the weight gradient may be deferred."""
    if deferred is not None or through_fp32(x) or _by_onednn(x, weight):
        # `linear_forward` and `matmul` may differ from torch's products, so backward must use them too.
        return _Linear.apply(x, weight, bias, deferred)
    # A few rows, if gradients are disabled.
    is_bound_by_memory = (
        not torch.is_grad_enabled()
        and weight.numel() >= _UNCACHED_ELEMENTS
        and x.numel() < _MANY_ROWS * x.shape[-1]
    )
    suits_onednn = is_bound_by_memory and _suits_onednn(x, weight)
    return _onednn_product(x, weight, bias) if suits_onednn else F.linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, deferred: DeferredGradients | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # With recomputation, the saved weight is unpacked as another tensor, so keep the parameter itself.
        ctx.parameter, ctx.deferred = weight, deferred
        return linear_forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        grad_input = matmul(gradient, weight) if ctx.needs_input_grad[0] else None
        grad_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = compute_or_defer(ctx.deferred, ctx.parameter, weight_gradient, gradient, x)
        return grad_input, grad_weight, grad_bias, None


def grouped_linear(
    rows: Tensor, weight: nn.Parameter, groups: GroupedRows, deferred: DeferredGradients | None
) -> Tensor:
    """Returns `x Wᵀ` with one matrix per group of rows; `weight` is [groups, outputs, inputs]."""
    return _GroupedLinear.apply(rows, weight, groups, deferred)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: nn.Parameter, groups: GroupedRows, deferred: DeferredGradients | None
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.parameter, ctx.groups, ctx.deferred = weight, groups, deferred
        return groups.matmul(rows, weight.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight = ctx.saved_tensors
        d_out = gradients[0].contiguous()
        d_input = ctx.groups.matmul(d_out, weight) if ctx.needs_input_grad[0] else None
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = compute_or_defer(ctx.deferred, ctx.parameter, ctx.groups.weight_gradient, d_out, rows)
        return d_input, d_weight, None, None


def compute_or_defer(
    deferred: DeferredGradients | None,
    weight: nn.Parameter,
    function: Callable[[Tensor, Tensor], Tensor],
    gradient: Tensor,
    inputs: Tensor,
) -> Tensor | None:
    """Returns the weight gradient, `function(gradient, inputs)`, or None if it is deferred."""
    if deferred is not None and deferred.take(Product(weight, function, gradient, inputs)):
        return None
    return function(gradient, inputs)
