"""FP8 matrices: scaling, rounding and multiplication.

By default a tensor has one scale, a power of two that brings its largest element (amax) into the upper half
of the range. It is computed from the current values, so there is no state between steps. Scaling by a power
of two does not change the rounding, so parts of a tensor that are scaled separately, on the ranks of a
layout, round as the whole tensor would; only elements ten thousand times smaller than the largest differ.
With scales by rows, every row has its own, and so has every column of the transposed matrix: large values in
one row do not cost the others precision.

Tensor cores need the summed dimension last in both factors. A matrix that is multiplied from both sides is
therefore written twice in one pass: row-major and transposed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pentatron.ops.dispatch import operator, uses_triton

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
# Side of the square tiles whose row and column maxima are computed.
TILE = 128
# Limits the scale of tensors that are nearly zero, which would be inf.
LARGEST_SCALE = 2.0**120
_EXPONENT_BITS = 0x7F800000


@dataclass(frozen=True)
class Fp8Matrix:
    """A matrix in fp8: `rows` is row-major, `columns` transposed; None if not needed.

    The values are the elements times `unscale`, or `columns_unscale`: a scalar, or one number per row, [N,
    1]. `scale` is the factor of the rows.
    """

    rows: Tensor | None
    columns: Tensor | None
    unscale: Tensor
    columns_unscale: Tensor
    scale: Tensor


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the power of two by which a tensor with this largest element is multiplied before rounding."""
    ratio = (torch.finfo(dtype).max / largest).clamp(max=LARGEST_SCALE)
    return (ratio.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)


def _like_scale(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return largest.new_empty((), dtype=torch.float32), largest.new_empty((), dtype=torch.float32)


@operator("fp8_scale_of", _like_scale)
def scale_of(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns scale and inverse scale from the maxima of parts of a tensor, in a single kernel."""
    if uses_triton(largest):
        from pentatron.ops.triton_fp8 import scale_of as by_triton

        return by_triton(largest.contiguous(), dtype)
    scale = scale_for(largest.amax().float(), dtype)
    return scale, scale.reciprocal()


def quantize(
    matrix: Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = True, by_rows: bool = False
) -> Fp8Matrix:
    """Rounds a matrix to fp8: row-major, transposed or both, with one scale or one per written row."""
    if not by_rows:
        # Reduce rows first: a compiler can then fuse the reduction with the kernel that writes the rows.
        largest = torch.linalg.vector_norm(matrix, float("inf"), dim=-1)
        scale, unscale = scale_of(largest, dtype)
        return quantize_with_scale(matrix, scale, dtype, rows, columns, unscale)
    if rows and columns:
        row_maxima, column_maxima = _largest_of_tiles(matrix)
        columns_scale = scale_for(column_maxima.amax(0)[:, None], dtype)
        rows_scale = scale_for(row_maxima.amax(0)[:, None], dtype)
        return quantize_with_scale(matrix, rows_scale, dtype, columns_scale=columns_scale)
    maxima = torch.linalg.vector_norm(matrix, float("inf"), dim=-1 if rows else 0).float()[:, None]
    return quantize_with_scale(matrix, scale_for(maxima, dtype), dtype, rows, columns)


def quantize_with_scale(
    matrix: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    rows: bool = True,
    columns: bool = True,
    unscale: Tensor | None = None,
    columns_scale: Tensor | None = None,
) -> Fp8Matrix:
    """Same as `quantize`, with a known scale of the whole matrix, and its inverse if it is known too.

    With `columns_scale` both scales have one number per written row.
    """
    # A single number, for which a compiler would generate a kernel of its own.
    unscale = scale.reciprocal() if unscale is None else unscale
    columns_unscale = unscale if columns_scale is None else columns_scale.reciprocal()
    written = _rounded(matrix, scale, columns_scale, dtype, rows, columns)
    of_rows, of_columns = written[0] if rows else None, written[-1] if columns else None
    return Fp8Matrix(of_rows, of_columns, unscale, columns_unscale, scale)


def scales_of(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns the scales of whole matrices, computed with few kernels for all of them."""
    largest = torch._foreach_norm(list(matrices), float("inf"))
    return scale_for(torch.stack(largest).float(), dtype)


def scaled_matmul(
    left_rows: Tensor,
    right_columns: Tensor,
    unscale: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    fast: bool = False,
) -> Tensor:
    """Returns `left rightᵀ`; both have the summed dimension last. `unscale`: the inverse scales of both.

    `fast` accumulates with less precision, which is the GPU's default.
    """
    left_unscale, right_unscale = unscale[0], unscale[1].t()
    if left_rows.device.type == "cuda":
        factors = (left_rows, right_columns.t(), left_unscale, right_unscale)
        return torch._scaled_mm(*factors, out_dtype=dtype, use_fast_accum=fast)
    return ((left_rows.float() @ right_columns.float().t()) * (left_unscale * right_unscale)).to(dtype)


def rounded(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Reference of the kernel in torch operations."""
    limit = torch.finfo(dtype).max
    return (matrix.float() * scale).clamp(-limit, limit).to(dtype)


def _like_rounded(
    matrix: Tensor, scale: Tensor, columns_scale: Tensor | None, dtype: torch.dtype, rows: bool, columns: bool
) -> list[Tensor]:
    shapes = [matrix.shape] * rows + [matrix.shape[::-1]] * columns
    return [matrix.new_empty(shape, dtype=dtype) for shape in shapes]


@operator("fp8_rounded", _like_rounded)
def _rounded(
    matrix: Tensor, scale: Tensor, columns_scale: Tensor | None, dtype: torch.dtype, rows: bool, columns: bool
) -> list[Tensor]:
    """Returns the matrix row-major if `rows`, then transposed if `columns`."""
    written = _like_rounded(matrix, scale, columns_scale, dtype, rows, columns)
    of_rows, of_columns = written[0] if rows else None, written[-1] if columns else None
    _write(matrix, of_rows, of_columns, scale, scale if columns_scale is None else columns_scale)
    return written


def _write(
    matrix: Tensor, rows: Tensor | None, columns: Tensor | None, rows_scale: Tensor, columns_scale: Tensor
) -> None:
    if uses_triton(matrix):
        from pentatron.ops.triton_fp8 import write_rounded

        write_rounded(matrix, rows, columns, rows_scale, columns_scale)
        return
    for output, values, scale in ((rows, matrix, rows_scale), (columns, matrix.t(), columns_scale)):
        if output is not None:
            output.copy_(rounded(values, scale, output.dtype))


def empty_tile_maxima(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns empty tensors for row maxima per strip of columns, and column maxima per strip of rows."""
    height, width = matrix.shape
    row_maxima = matrix.new_empty((-(-width // TILE), height), dtype=torch.float32)
    return row_maxima, matrix.new_empty((-(-height // TILE), width), dtype=torch.float32)


@operator("fp8_largest_of_tiles", empty_tile_maxima)
def _largest_of_tiles(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the fp32 maxima of absolute values of rows and columns, per strip of TILE columns and rows."""
    if uses_triton(matrix):
        from pentatron.ops.triton_fp8 import largest_of_tiles

        return largest_of_tiles(matrix)
    height, width = matrix.shape
    padded = F.pad(matrix.abs().float(), (0, -width % TILE, 0, -height % TILE))
    tiles = padded.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE))
    row_maxima = tiles.amax(3).flatten(0, 1)[:height].t()
    return row_maxima.contiguous(), tiles.amax(1).flatten(1)[:, :width].contiguous()
