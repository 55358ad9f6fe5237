"""Matrices in fp8: how they are scaled, rounded and multiplied.

A tensor has one scale, a power of two that brings its largest element into the upper half of the range (by its current content, so
nothing is remembered between steps). Rounding to a float does not depend on a power of two, so parts of a tensor that are scaled by
themselves, on the ranks of a layout, round as the whole would; only what is ten thousand times smaller than the largest differs.

Tensor cores want both factors with the summed dimension last: a matrix that is multiplied from both sides is rounded once and
written twice, as it is and transposed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pentatron.kernels.choice import by_kernel

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
# Of every dimension of a matrix, in elements: what the tensor cores of a GPU can take.
MULTIPLE = 16
# Smaller tensors are zeros for all purposes; their scale would not be a number.
_LARGEST_SCALE = 2.0**120
_EXPONENT_BITS = 0x7F800000


@dataclass(frozen=True)
class Scaled:
    """A matrix in fp8: its elements times `unscale` are the values. `rows` has it as it is, `columns` transposed, where wanted."""

    rows: Tensor | None
    columns: Tensor | None
    unscale: Tensor
    scale: Tensor


def largest_element(matrix: Tensor) -> Tensor:
    """Without its sign, in fp32; not a number if there is such an element."""
    # Row by row first: a compiler can then make it part of what writes the rows.
    return torch.linalg.vector_norm(matrix, float("inf"), dim=-1).amax().float()


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The power of two that a tensor with this largest element is multiplied by before it is rounded."""
    ratio = (torch.finfo(dtype).max / largest).clamp(max=_LARGEST_SCALE)
    return (ratio.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)


def scaled(matrix: Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = True) -> Scaled:
    """The matrix in fp8, written as it is, transposed, or both."""
    return scaled_by(matrix, scale_for(largest_element(matrix), dtype), dtype, rows, columns)


def scaled_by(
    matrix: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = True
) -> Scaled:
    """The same with a scale that is known."""
    if rows and columns:
        both = _rounded_both(matrix, scale, dtype)
        return Scaled(both[0], both[1], scale.reciprocal(), scale)
    made = _rounded_rows(matrix, scale, dtype) if rows else _rounded_columns(matrix, scale, dtype)
    return Scaled(made if rows else None, None if rows else made, scale.reciprocal(), scale)


def product(
    left_rows: Tensor,
    right_columns: Tensor,
    unscale: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    fast: bool = False,
) -> Tensor:
    """`left rightᵀ`, where both have the summed dimension last. `fast` sums in fewer bits, as a GPU does by itself."""
    if left_rows.device.type == "cuda":
        return torch._scaled_mm(
            left_rows,
            right_columns.t(),
            scale_a=unscale[0],
            scale_b=unscale[1],
            out_dtype=dtype,
            use_fast_accum=fast,
        )
    return ((left_rows.float() @ right_columns.float().t()) * (unscale[0] * unscale[1])).to(dtype)


def rounded(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """In plain torch operations: what the kernel does."""
    limit = torch.finfo(dtype).max
    return (matrix.float() * scale).clamp(-limit, limit).to(dtype)


def _write(matrix: Tensor, scale: Tensor, rows: Tensor | None, columns: Tensor | None) -> None:
    if by_kernel(matrix):
        from pentatron.kernels.fp8_triton import write_rounded

        write_rounded(matrix, scale, rows, columns)
        return
    for place, values in ((rows, matrix), (columns, matrix.t())):
        if place is not None:
            place.copy_(rounded(values, scale, place.dtype))


@torch.library.custom_op("pentatron::fp8_rounded_both", mutates_args=())
def _rounded_both(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = _as_it_is(matrix, dtype), _transposed(matrix, dtype)
    _write(matrix, scale, rows, columns)
    return rows, columns


@torch.library.custom_op("pentatron::fp8_rounded_rows", mutates_args=())
def _rounded_rows(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    rows = _as_it_is(matrix, dtype)
    _write(matrix, scale, rows, None)
    return rows


@torch.library.custom_op("pentatron::fp8_rounded_columns", mutates_args=())
def _rounded_columns(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    columns = _transposed(matrix, dtype)
    _write(matrix, scale, None, columns)
    return columns


@_rounded_both.register_fake
def _(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _as_it_is(matrix, dtype), _transposed(matrix, dtype)


@_rounded_rows.register_fake
def _(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return _as_it_is(matrix, dtype)


@_rounded_columns.register_fake
def _(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return _transposed(matrix, dtype)


def _as_it_is(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    return matrix.new_empty(matrix.shape, dtype=dtype)


def _transposed(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    return matrix.new_empty((matrix.shape[1], matrix.shape[0]), dtype=dtype)
