"""Matrices in fp8: how they are scaled, rounded and multiplied.

A tensor has one scale, a power of two that brings its largest element into the upper half of the range (by its current content, so
nothing is remembered between steps). Rounding to a float does not depend on a power of two, so parts of a tensor that are scaled by
themselves, on the ranks of a layout, round as the whole would; only what is ten thousand times smaller than the largest differs.
Scaled by rows, every row has a scale of its own, and so has every column where the matrix is transposed: what is large in one row then
takes no digits from the others.

Tensor cores want both factors with the summed dimension last: a matrix that is multiplied from both sides is written twice in one pass,
as it is and transposed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pentatron.ops.dispatch import by_kernel, operator

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
# Sides of the squares in which the largest elements of rows and columns are looked for.
TILE = 128
# Smaller tensors are zeros for all purposes; their scale would not be a number.
LARGEST_SCALE = 2.0**120
_EXPONENT_BITS = 0x7F800000


@dataclass(frozen=True)
class Scaled:
    """A matrix in fp8: `rows` has it as it is, `columns` transposed, where wanted. Their elements times `unscale`, or
    `columns_unscale`, are the values: one number, or one for each row, [N, 1]. `scale` is what the rows were multiplied by."""

    rows: Tensor | None
    columns: Tensor | None
    unscale: Tensor
    columns_unscale: Tensor
    scale: Tensor


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The power of two that a tensor with this largest element is multiplied by before it is rounded."""
    ratio = (torch.finfo(dtype).max / largest).clamp(max=LARGEST_SCALE)
    return (ratio.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)


def _two_numbers(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return largest.new_empty((), dtype=torch.float32), largest.new_empty((), dtype=torch.float32)


@operator("fp8_scale_of", _two_numbers)
def scale_of(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The scale of a tensor, and what undoes it, by the largest elements of its parts: in one kernel, where a compiler makes two."""
    if by_kernel(largest):
        from pentatron.ops.triton_fp8 import scale_of as by_triton

        return by_triton(largest.contiguous(), dtype)
    scale = scale_for(largest.amax().float(), dtype)
    return scale, scale.reciprocal()


def scaled(
    matrix: Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = True, by_rows: bool = False
) -> Scaled:
    """The matrix in fp8, written as it is, transposed, or both; with one scale, or with one for each row of what is written."""
    if not by_rows:
        # Row by row first: a compiler can then make it part of what writes the rows.
        largest = torch.linalg.vector_norm(matrix, float("inf"), dim=-1)
        scale, unscale = scale_of(largest, dtype)
        return scaled_by(matrix, scale, dtype, rows, columns, unscale)
    if rows and columns:
        of_rows, of_columns = _largest_of_tiles(matrix)
        second = scale_for(of_columns.amax(0)[:, None], dtype)
        return _written(matrix, scale_for(of_rows.amax(0)[:, None], dtype), second, dtype, rows, columns)
    found = torch.linalg.vector_norm(matrix, float("inf"), dim=-1 if rows else 0).float()[:, None]
    return _written(matrix, scale_for(found, dtype), None, dtype, rows, columns)


def scaled_by(
    matrix: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    rows: bool = True,
    columns: bool = True,
    unscale: Tensor | None = None,
) -> Scaled:
    """The same with a scale that is known, for all of it; and with what undoes it, where that is known too."""
    return _written(matrix, scale, None, dtype, rows, columns, unscale)


def scales_of(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The scales of whole matrices, found in few kernels for all of them."""
    largest = torch._foreach_norm(list(matrices), float("inf"))
    return scale_for(torch.stack(largest).float(), dtype)


def _written(
    matrix: Tensor,
    scale: Tensor,
    of_columns: Tensor | None,
    dtype: torch.dtype,
    rows: bool,
    columns: bool,
    unscale: Tensor | None = None,
) -> Scaled:
    # A number for which a compiler would make a kernel of its own.
    unscale = scale.reciprocal() if unscale is None else unscale
    columns_unscale = unscale if of_columns is None else of_columns.reciprocal()
    made = turned = None
    if rows and columns:
        made, turned = _rounded_both(matrix, scale, of_columns, dtype)
    elif rows:
        made = _rounded_rows(matrix, scale, dtype)
    else:
        turned = _rounded_columns(matrix, scale, dtype)
    return Scaled(made, turned, unscale, columns_unscale, scale)


def product(
    left_rows: Tensor,
    right_columns: Tensor,
    unscale: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    fast: bool = False,
) -> Tensor:
    """`left rightᵀ`, where both have the summed dimension last, with what undoes the scale of each. `fast` sums in fewer bits, as a GPU does
    by itself."""
    of_left, of_right = unscale[0], unscale[1].t()
    if left_rows.device.type == "cuda":
        return torch._scaled_mm(
            left_rows,
            right_columns.t(),
            scale_a=of_left,
            scale_b=of_right,
            out_dtype=dtype,
            use_fast_accum=fast,
        )
    return ((left_rows.float() @ right_columns.float().t()) * (of_left * of_right)).to(dtype)


def rounded(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """In plain torch operations: what the kernel does."""
    limit = torch.finfo(dtype).max
    return (matrix.float() * scale).clamp(-limit, limit).to(dtype)


def _write(
    matrix: Tensor, rows: Tensor | None, columns: Tensor | None, of_rows: Tensor, of_columns: Tensor
) -> None:
    if by_kernel(matrix):
        from pentatron.ops.triton_fp8 import write_rounded

        write_rounded(matrix, rows, columns, of_rows, of_columns)
        return
    for place, values, scale in ((rows, matrix, of_rows), (columns, matrix.t(), of_columns)):
        if place is not None:
            place.copy_(rounded(values, scale, place.dtype))


def _like_both(
    matrix: Tensor, scale: Tensor, columns_scale: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return _as_it_is(matrix, dtype), _transposed(matrix, dtype)


def _like_rows(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return _as_it_is(matrix, dtype)


def _like_columns(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return _transposed(matrix, dtype)


def strips(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Empty places for a number of each row and strip of columns, and of each column and strip of rows."""
    height, width = matrix.shape
    of_rows = matrix.new_empty((-(-width // TILE), height), dtype=torch.float32)
    return of_rows, matrix.new_empty((-(-height // TILE), width), dtype=torch.float32)


@operator("fp8_rounded_both", _like_both)
def _rounded_both(
    matrix: Tensor, scale: Tensor, columns_scale: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    rows, columns = _as_it_is(matrix, dtype), _transposed(matrix, dtype)
    _write(matrix, rows, columns, scale, scale if columns_scale is None else columns_scale)
    return rows, columns


@operator("fp8_rounded_rows", _like_rows)
def _rounded_rows(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    rows = _as_it_is(matrix, dtype)
    _write(matrix, rows, None, scale, scale)
    return rows


@operator("fp8_rounded_columns", _like_columns)
def _rounded_columns(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    columns = _transposed(matrix, dtype)
    _write(matrix, None, columns, scale, scale)
    return columns


@operator("fp8_largest_of_tiles", strips)
def _largest_of_tiles(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The largest elements, without sign, of each row in each strip of columns, and of each column in each strip of rows; in fp32."""
    if by_kernel(matrix):
        from pentatron.ops.triton_fp8 import largest_of_tiles

        return largest_of_tiles(matrix)
    height, width = matrix.shape
    padded = F.pad(matrix.abs().float(), (0, -width % TILE, 0, -height % TILE))
    tiles = padded.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE))
    of_rows = tiles.amax(3).flatten(0, 1)[:height].t()
    return of_rows.contiguous(), tiles.amax(1).flatten(1)[:, :width].contiguous()


def _as_it_is(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    return matrix.new_empty(matrix.shape, dtype=dtype)


def _transposed(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    return matrix.new_empty((matrix.shape[1], matrix.shape[0]), dtype=dtype)
