"""Draws the loss curve as an SVG file, without a plotting library."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

from pentatron.text import one_line

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 44, 46
_STEP_COLOUR, _MEAN_COLOUR, _VALIDATION_COLOUR = "#9ecae1", "#2171b5", "#d94801"
# Half width of the running mean's window, as a fraction of the curve.
_WINDOW_SHARE = 1 / 50
_MAX_POINTS = 1000

Point = tuple[float, float]


@dataclass(frozen=True)
class PlotAxes:
    """Maps steps and losses to SVG coordinates."""

    x_max: float
    y_min: float
    y_max: float

    def place(self, point: Point) -> Point:
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * point[0] / self.x_max
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (self.y_max - point[1]) / (self.y_max - self.y_min)
        return round(x, 1), round(y, 1)


def loss_curve(title: str, training: Sequence[Point], validation: Sequence[Point]) -> str:
    """Returns an SVG of the training losses, their running mean, and the validation losses as dots."""
    if not training:
        raise ValueError("a curve needs at least one point")
    training = _downsample(training)
    losses = [loss for _, loss in (*training, *validation)]
    step = _tick_step((max(losses) - min(losses)) / 5 or 1.0)
    axes = PlotAxes(max(1.0, training[-1][0]), step * (min(losses) // step), step * (max(losses) // step + 1))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="bold">{escape(one_line(title))}</text>',
        *_grid(axes, step),
        _line(axes, training, _STEP_COLOUR, 1.0),
        _line(axes, _smooth(training), _MEAN_COLOUR, 2.2),
        *(_dot(axes, point) for point in validation),
        *_legend(with_validation=bool(validation)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _downsample(points: Sequence[Point]) -> Sequence[Point]:
    """Downsamples to at most _MAX_POINTS means, to bound the file size."""
    stride = -(-len(points) // _MAX_POINTS)
    chunks = [points[i : i + stride] for i in range(0, len(points), stride)]
    return [(chunk[-1][0], sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]


def _tick_step(rough: float) -> float:
    """Returns the smallest of 1, 2 or 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** len(f"{int(rough)}") / 10 if rough >= 1 else 1.0
    while power > rough:
        power /= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)


def _smooth(points: Sequence[Point]) -> list[Point]:
    """Centred running mean, which does not lag behind a falling loss."""
    max_half_width = math.ceil(len(points) * _WINDOW_SHARE)
    sums = [*accumulate((y for _, y in points), initial=0.0)]
    smoothed = []
    for i, (x, _) in enumerate(points):
        # The window is symmetric at the start, where the loss is steep, so the mean is not biased downwards.
        half_width = min(max_half_width, i)
        first, end = i - half_width, min(len(points), i + half_width + 1)
        smoothed.append((x, (sums[end] - sums[first]) / (end - first)))
    return smoothed


def _grid(axes: PlotAxes, step: float) -> Iterator[str]:
    decimals = max(0, -math.floor(math.log10(step)))
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for i in range(round((axes.y_max - axes.y_min) / step) + 1):
        value = axes.y_min + i * step
        _, y = axes.place((0, value))
        yield f'<line x1="{_LEFT}" y1="{y}" x2="{right}" y2="{y}" stroke="#e5e5e5"/>'
        yield _label(_LEFT - 8, y + 4, "end", f"{value:.{decimals}f}")
    x_step = max(1.0, _tick_step(axes.x_max / 6))
    for i in range(int(axes.x_max // x_step) + 1):
        x, _ = axes.place((i * x_step, axes.y_min))
        yield _label(x, bottom + 18, "middle", f"{i * x_step:.6g}")
    yield f'<line x1="{_LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}" stroke="#888"/>'
    yield _label((_LEFT + right) / 2, _HEIGHT - 8, "middle", "step")
    yield f'<text x="16" y="{_HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 16 {_HEIGHT / 2})">loss</text>'


def _label(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'


def _line(axes: PlotAxes, points: Sequence[Point], colour: str, width: float) -> str:
    path = " ".join(f"{x},{y}" for x, y in map(axes.place, points))
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _dot(axes: PlotAxes, point: Point) -> str:
    x, y = axes.place(point)
    return f'<circle cx="{x}" cy="{y}" r="4" fill="{_VALIDATION_COLOUR}"><title>step {point[0]:.0f}: {point[1]:.4f}</title></circle>'


def _legend(with_validation: bool) -> Iterator[str]:
    x = _WIDTH - _RIGHT - 316
    for name, colour, width in (("each step", _STEP_COLOUR, 1.0), ("running mean", _MEAN_COLOUR, 2.2)):
        yield f'<line x1="{x}" y1="20" x2="{x + 22}" y2="20" stroke="{colour}" stroke-width="{width}"/>'
        yield f'<text x="{x + 28}" y="24">{name}</text>'
        x += 104
    if with_validation:
        yield f'<circle cx="{x + 34}" cy="20" r="4" fill="{_VALIDATION_COLOUR}"/>'
        yield f'<text x="{x + 44}" y="24">validation</text>'
