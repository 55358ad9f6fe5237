"""Draws the rank grid and its process groups, which are those of `pentatron.layout.ranks.Grid`."""

from __future__ import annotations

from pentatron.layout.ranks import Axis, Grid
from pictures.canvas import COLOURS, GREY, Canvas

_CELL, _GAP, _PANEL_GAP = 40, 5, 34
_SAYS: dict[Axis, str] = {
    "tensor": "share each layer",
    "context": "share each sequence",
    "data": "same weights, other samples",
    "pipeline": "stages one after the other",
    "replicas": "sum gradients (data × context)",
}


def rank_groups(grid: Grid, axes: tuple[Axis, ...]) -> str:
    """Draws one panel for each axis: ranks with one colour form a group."""
    columns, rows = grid.pipeline * grid.tensor, grid.data * grid.context
    panel = max(columns * (_CELL + _GAP) + (grid.pipeline - 1) * 12, 190)
    height = 92 + rows * (_CELL + _GAP) + (grid.data - 1) * (6 if grid.context > 1 else 0) + 44
    sizes = " × ".join(
        f"{size} {axis}"
        for axis, size in (("tensor", grid.tensor), ("context", grid.context), ("data", grid.data), ("pipeline", grid.pipeline))
        if size > 1
    )  # fmt: skip
    canvas = Canvas(
        len(axes) * (panel + _PANEL_GAP) + 12,
        height,
        f"{grid.world_size} ranks: {sizes}; one colour, one group",
    )
    for number, axis in enumerate(axes):
        _panel(canvas, grid, axis, 12 + number * (panel + _PANEL_GAP))
    names = "columns: pipeline stages, inside them tensor ranks; rows: data" + (
        ", inside them context" if grid.context > 1 else " ranks"
    )
    canvas.text(12, height - 14, names, colour=GREY)
    return canvas.drawn()


def _panel(canvas: Canvas, grid: Grid, axis: Axis, left: float) -> None:
    canvas.text(left, 52, axis, 13, bold=True)
    canvas.text(left, 68, _SAYS[axis], 11, GREY)
    for colour, group in enumerate(grid.groups(axis)):
        for rank in group:
            at = grid.coordinates(rank)
            x = left + (at.pipeline * grid.tensor + at.tensor) * (_CELL + _GAP) + at.pipeline * 12
            row = at.data * grid.context + at.context
            y = 80 + row * (_CELL + _GAP) + (at.data * 6 if grid.context > 1 else 0)
            canvas.box(x, y, _CELL, _CELL, COLOURS[colour % len(COLOURS)], str(rank), size=14)
