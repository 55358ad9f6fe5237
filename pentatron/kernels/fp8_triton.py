"""Rounding to fp8 and transposing in one pass. Imported only where there is a GPU to run it, and Triton with it."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _write_rounded(
    matrix,
    scale,
    rows,
    columns,
    height,
    width,
    row_stride,
    column_stride,
    LIMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """One tile. Places in it are 32-bit numbers; only where the tile begins can lie beyond them."""
    across = tl.cdiv(width, WIDE)
    top = (tl.program_id(0) // across).to(tl.int64) * HIGH
    left = (tl.program_id(0) % across).to(tl.int64) * WIDE
    down, right = tl.arange(0, HIGH), tl.arange(0, WIDE)
    inside = (down < height - top)[:, None] & (right < width - left)[None, :]
    begin = matrix + top * row_stride + left * column_stride
    values = tl.load(begin + down[:, None] * row_stride + right[None, :] * column_stride, inside, other=0.0)
    values = values.to(tl.float32) * tl.load(scale)
    values = tl.clamp(values, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if ROWS:
        rounded = values.to(rows.dtype.element_ty)
        tl.store(rows + top * width + left + down[:, None] * width + right[None, :], rounded, inside)
    if COLUMNS:
        turned = tl.trans(values.to(columns.dtype.element_ty))
        place = columns + left * height + top + right[:, None] * height + down[None, :]
        tl.store(place, turned, tl.trans(inside))


def write_rounded(matrix: Tensor, scale: Tensor, rows: Tensor | None, columns: Tensor | None) -> None:
    """Fills what is given: `rows` is like the matrix, `columns` like its transpose; both contiguous."""
    height, width = matrix.shape
    wanted = rows if rows is not None else columns
    assert wanted is not None, "one of the two"
    high, wide = 128, 128
    tiles = triton.cdiv(height, high) * triton.cdiv(width, wide)
    _write_rounded[(tiles,)](
        matrix,
        scale,
        rows if rows is not None else wanted,
        columns if columns is not None else wanted,
        height,
        width,
        matrix.stride(0),
        matrix.stride(1),
        LIMIT=torch.finfo(wanted.dtype).max,
        ROWS=rows is not None,
        COLUMNS=columns is not None,
        HIGH=high,
        WIDE=wide,
        num_warps=8,
    )
