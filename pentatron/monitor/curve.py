"""The loss curve as an SVG picture, drawn by hand: no plotting library is needed to look at a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 44, 46

Point = tuple[float, float]


@dataclass(frozen=True)
class Axes:
    """Maps steps and losses to the page."""

    x_max: float
    y_min: float
    y_max: float

    def place(self, point: Point) -> Point:
        x = _LEFT + (_WIDTH - _LEFT - _RIGHT) * point[0] / self.x_max
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (self.y_max - point[1]) / (self.y_max - self.y_min)
        return round(x, 1), round(y, 1)


def loss_curve(title: str, training: Sequence[Point], validation: Sequence[Point]) -> str:
    """An SVG with the training losses, their running mean, and the validation losses as dots."""
    if not training:
        raise ValueError("a curve needs at least one point")
    losses = [loss for _, loss in (*training, *validation)]
    step = _round_step((max(losses) - min(losses)) / 5 or 1.0)
    axes = Axes(
        x_max=max(1.0, training[-1][0]),
        y_min=step * (min(losses) // step),
        y_max=step * (max(losses) // step + 1),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
        *_grid(axes, step),
        _line(axes, training, "#9ecae1", 1.0),
        _line(axes, _smooth(training), "#2171b5", 2.2),
        *(_dot(axes, point) for point in validation),
        *_legend(bool(validation)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least `rough`."""
    power = 10.0 ** len(f"{int(rough)}") / 10 if rough >= 1 else 1.0
    while power > rough:
        power /= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)


def _smooth(points: Sequence[Point], decay: float = 0.9) -> list[Point]:
    smoothed, mean, weight = [], 0.0, 0.0
    for x, y in points:
        mean, weight = decay * mean + (1 - decay) * y, decay * weight + (1 - decay)
        smoothed.append((x, mean / weight))
    return smoothed


def _grid(axes: Axes, step: float) -> list[str]:
    found = []
    lines = round((axes.y_max - axes.y_min) / step)
    for i in range(lines + 1):
        value = axes.y_min + i * step
        _, y = axes.place((0, value))
        found.append(f'<line x1="{_LEFT}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}" stroke="#e5e5e5"/>')
        found.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{value:.3g}</text>')
    x_step = _round_step(axes.x_max / 6)
    for i in range(int(axes.x_max // x_step) + 1):
        x, _ = axes.place((i * x_step, axes.y_min))
        found.append(
            f'<text x="{x}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{i * x_step:.6g}</text>'
        )
    bottom = _HEIGHT - _BOTTOM
    found.append(f'<line x1="{_LEFT}" y1="{bottom}" x2="{_WIDTH - _RIGHT}" y2="{bottom}" stroke="#888"/>')
    found.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">step</text>'
    )
    found.append(
        f'<text x="16" y="{_HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 16 {_HEIGHT / 2})">loss</text>'
    )
    return found


def _line(axes: Axes, points: Sequence[Point], colour: str, width: float) -> str:
    path = " ".join(f"{x},{y}" for x, y in map(axes.place, points))
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _dot(axes: Axes, point: Point) -> str:
    x, y = axes.place(point)
    return f'<circle cx="{x}" cy="{y}" r="4" fill="#d94801"><title>step {point[0]:.0f}: {point[1]:.4f}</title></circle>'


def _legend(with_validation: bool) -> list[str]:
    x = _WIDTH - _RIGHT - 190
    found = [
        f'<line x1="{x}" y1="20" x2="{x + 22}" y2="20" stroke="#2171b5" stroke-width="2.2"/>',
        f'<text x="{x + 28}" y="24">training</text>',
    ]
    if with_validation:
        found.append(f'<circle cx="{x + 105}" cy="20" r="4" fill="#d94801"/>')
        found.append(f'<text x="{x + 115}" y="24">validation</text>')
    return found
