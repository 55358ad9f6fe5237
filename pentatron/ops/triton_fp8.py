"""Triton kernels of `fp8`: rounding and transposing in one pass, and maxima.

Imported only if Triton works.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentatron.ops.fp8 import LARGEST_SCALE, TILE, empty_tile_maxima

_MAXIMA = 8192


@triton.jit
def _write_rounded(
    matrix,
    of_rows,
    of_columns,
    rows,
    columns,
    height,
    width,
    row_stride,
    column_stride,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BY_ROWS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Processes one tile. Offsets within it fit 32 bits, the offset of the tile itself may not."""
    across = tl.cdiv(width, WIDE)
    top = (tl.program_id(0) // across).to(tl.int64) * HIGH
    left = (tl.program_id(0) % across).to(tl.int64) * WIDE
    down, right = tl.arange(0, HIGH), tl.arange(0, WIDE)
    inside = (down < height - top)[:, None] & (right < width - left)[None, :]
    begin = matrix + top * row_stride + left * column_stride
    values = tl.load(begin + down[:, None] * row_stride + right[None, :] * column_stride, inside, other=0.0)
    values = values.to(tl.float32)
    if not BY_ROWS:
        values = tl.clamp(values * tl.load(of_rows), -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if ROWS:
        made = values
        if BY_ROWS:
            made *= tl.load(of_rows + top + down, down < height - top, other=0.0)[:, None]
            made = tl.clamp(made, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        rounded = made.to(rows.dtype.element_ty)
        tl.store(rows + top * width + left + down[:, None] * width + right[None, :], rounded, inside)
    if COLUMNS:
        made = values
        if BY_ROWS:
            made *= tl.load(of_columns + left + right, right < width - left, other=0.0)[None, :]
            made = tl.clamp(made, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        turned = tl.trans(made.to(columns.dtype.element_ty))
        place = columns + left * height + top + right[:, None] * height + down[None, :]
        tl.store(place, turned, tl.trans(inside))


def write_rounded(
    matrix: Tensor, rows: Tensor | None, columns: Tensor | None, of_rows: Tensor, of_columns: Tensor
) -> None:
    """Writes `rows`, of the matrix's layout, and `columns`, of its transpose, if given; both contiguous.

    Both scales are a scalar, or `of_rows` has one per row and `of_columns` one per column.
    """
    height, width = matrix.shape
    wanted = rows if rows is not None else columns
    assert wanted is not None, "one of the two"
    high, wide = 128, 128
    tiles = triton.cdiv(height, high) * triton.cdiv(width, wide)
    written = (wanted if rows is None else rows, wanted if columns is None else columns)
    sizes = (height, width, matrix.stride(0), matrix.stride(1))
    parts = {"ROWS": rows is not None, "COLUMNS": columns is not None, "BY_ROWS": of_rows.dim() > 0}
    constants = {"LIMIT": torch.finfo(wanted.dtype).max, "HIGH": high, "WIDE": wide, **parts}
    _write_rounded[(tiles,)](matrix, of_rows, of_columns, *written, *sizes, **constants, num_warps=8)


@triton.jit
def _scale_of(
    largest, scale, unscale, COUNT: tl.constexpr, LIMIT: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr
):
    """Reduces all maxima in one program, as bit patterns: floats keep their order, NaN is the largest."""
    found = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, COUNT, BLOCK):
        places = first + tl.arange(0, BLOCK)
        values = tl.load(largest + places, places < COUNT, other=0.0).to(tl.float32)
        found = tl.maximum(found, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    highest = tl.max(found, 0).to(tl.float32, bitcast=True)
    ratio = tl.div_rn(LIMIT, highest)
    ratio = tl.minimum(ratio, MOST, propagate_nan=tl.PropagateNan.ALL)
    power = (ratio.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    tl.store(scale, power)
    tl.store(unscale, tl.div_rn(1.0, power))


def scale_of(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale, unscale = (largest.new_empty((), dtype=torch.float32) for _ in range(2))
    count = largest.numel()
    block = min(_MAXIMA, triton.next_power_of_2(max(count, 1)))
    limit = torch.finfo(dtype).max
    _scale_of[(1,)](largest, scale, unscale, count, limit, LARGEST_SCALE, block, num_warps=16)
    return scale, unscale


@triton.jit
def _largest_of_tiles(
    matrix, of_rows, of_columns, height, width, row_stride, column_stride, TILE: tl.constexpr
):
    across = tl.cdiv(width, TILE)
    strip, band = tl.program_id(0) % across, tl.program_id(0) // across
    top, left = band.to(tl.int64) * TILE, strip.to(tl.int64) * TILE
    down, right = tl.arange(0, TILE), tl.arange(0, TILE)
    inside = (down < height - top)[:, None] & (right < width - left)[None, :]
    begin = matrix + top * row_stride + left * column_stride
    values = tl.load(begin + down[:, None] * row_stride + right[None, :] * column_stride, inside, other=0.0)
    # Maxima of bit patterns: non-negative floats keep their order, and NaN is the largest.
    bits = values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    highest = tl.max(bits, 1).to(tl.float32, bitcast=True)
    tl.store(of_rows + strip.to(tl.int64) * height + top + down, highest, down < height - top)
    highest = tl.max(bits, 0).to(tl.float32, bitcast=True)
    tl.store(of_columns + band.to(tl.int64) * width + left + right, highest, right < width - left)


def largest_of_tiles(matrix: Tensor) -> tuple[Tensor, Tensor]:
    height, width = matrix.shape
    row_maxima, column_maxima = empty_tile_maxima(matrix)
    tiles = triton.cdiv(height, TILE) * triton.cdiv(width, TILE)
    if tiles:
        sizes = (height, width, matrix.stride(0), matrix.stride(1))
        _largest_of_tiles[(tiles,)](matrix, row_maxima, column_maxima, *sizes, TILE=TILE, num_warps=8)
    return row_maxima, column_maxima
