"""A loss curve in letters: braille dots where the terminal can show them, stars where it cannot."""

import math
from collections.abc import Callable, Sequence

from pentatron.text import in_digits

Point = tuple[float, float]

_BLANK = 0x2800
# The bits of a braille letter, by column and row of the dot.
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_DOT = "o"


def draw_curve(
    points: Sequence[Point], marks: Sequence[Point], width: int, height: int, braille: bool = True
) -> list[str]:
    """Lines of at most `width` letters: the curve, `marks` as circles over it, and its axes.

    Every column shows the mean of its points. Numbers that are none are left out.
    """
    points = [p for p in points if math.isfinite(p[1])]
    marks = [m for m in marks if math.isfinite(m[1])]
    if not points:
        return []
    values = [y for _, y in (*points, *marks)]
    low, high = min(values), max(values)
    high += 1e-9 if high == low else 0.0
    label = max(len(_number(v)) for v in (low, high))
    across, down = (2, 4) if braille else (1, 1)
    cells = max(8, width - label - 3)
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    columns, rows = cells * across, height * down

    def place(point: Point) -> tuple[int, int]:
        x = round((columns - 1) * (point[0] - first) / (last - first))
        y = round((rows - 1) * (high - point[1]) / (high - low))
        return min(max(x, 0), columns - 1), min(max(y, 0), rows - 1)

    filled: set[tuple[int, int]] = set()
    before: tuple[int, int] | None = None
    for x, y in _means(points, place):
        # Up or down to the next column without a gap.
        start = y if before is None or x - before[0] > 1 else before[1]
        filled |= {(x, row) for row in range(min(start, y), max(start, y) + 1)}
        filled |= _between(before, (x, y))
        before = (x, y)
    grid = [[_letter(filled, column, row, braille) for column in range(cells)] for row in range(height)]
    for mark in marks:
        x, y = place(mark)
        grid[y // down][x // across] = _DOT
    names = {0: _number(high), height - 1: _number(low)}
    lines = [f"{names.get(i, ''):>{label}} {'┤' if i in names else '│'}" for i in range(height)]
    axis = f"{'':>{label}} └" + "─" * cells
    middle = max(1, cells - len(_step(first)) - len(_step(last)))
    legend = f"{_DOT} validation" if marks and middle > 14 else ""
    steps = f"{'':>{label}}  {_step(first)}{legend:^{middle}}{_step(last)}"
    drawn = [line + "".join(row).rstrip() for line, row in zip(lines, grid)] + [axis, steps]
    return drawn if braille else [_plain(line) for line in drawn]


def _means(points: Sequence[Point], place: Callable[[Point], tuple[int, int]]) -> list[tuple[int, int]]:
    by_column: dict[int, list[Point]] = {}
    for point in points:
        by_column.setdefault(place(point)[0], []).append(point)
    found = []
    for column, inside in sorted(by_column.items()):
        mean = sum(y for _, y in inside) / len(inside)
        found.append((column, place((inside[0][0], mean))[1]))
    return found


def _between(before: tuple[int, int] | None, here: tuple[int, int]) -> set[tuple[int, int]]:
    """A straight line over columns that have no point of their own."""
    if before is None or here[0] - before[0] <= 1:
        return set()
    (x0, y0), (x1, y1) = before, here
    return {(x, round(y0 + (y1 - y0) * (x - x0) / (x1 - x0))) for x in range(x0, x1 + 1)}


def _letter(filled: set[tuple[int, int]], column: int, row: int, braille: bool) -> str:
    if not braille:
        return "*" if (column, row) in filled else " "
    bits = sum(_BITS[x][y] for x in range(2) for y in range(4) if (2 * column + x, 4 * row + y) in filled)
    return chr(_BLANK + bits) if bits else " "


def _number(value: float) -> str:
    return in_digits(value)


def _step(value: float) -> str:
    return f"step {value:.0f}"


def _plain(line: str) -> str:
    return line.translate(str.maketrans("┤│└─", "||+-"))
