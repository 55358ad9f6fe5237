"""Draws the results of a benchmark: `python plot_results.py [FOLDER]`, by default those beside this file.

Reads summary.csv and writes throughput.svg, memory.svg and time.svg, which any browser shows; where matplotlib is
installed, the same as .png. Needs nothing but Python, so that results can be drawn wherever they are copied to.
"""

import csv
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

_WIDTH = 820
_ROW, _BAR = 26, 16
_TOP, _BOTTOM, _RIGHT = 76, 52, 24
# Room for the number behind the longest bar, and width of a letter of the names.
_BEHIND, _LETTER = 62, 7.0
_BLUE, _ORANGE, _GREY, _GREEN = "#2171b5", "#d94801", "#c6c6c6", "#41ab5d"

Row = dict[str, str]


@dataclass(frozen=True)
class Part:
    """One colour of the bars."""

    label: str
    colour: str
    value: Callable[[Row], float]


@dataclass(frozen=True)
class Chart:
    """A picture of bars, one for each layout; several parts stand one behind the other. `axis` names the unit."""

    file: str
    title: str
    axis: str
    parts: Sequence[Part]
    label: Callable[[Row], str]
    largest: float | None = None
    mark: float | None = None
    mark_label: str = ""

    def total(self, row: Row) -> float:
        return sum(part.value(row) for part in self.parts)


def _number(name: str) -> Callable[[Row], float]:
    return lambda row: float(row[name] or 0)


def _percent(name: str) -> Callable[[Row], float]:
    return lambda row: 100 * float(row[name] or 0)


CHARTS = (
    Chart(
        "throughput",
        "Throughput by layout",
        "tokens/s of all processes together",
        [Part("tokens/s", _BLUE, _number("tokens_per_second"))],
        lambda row: f"{float(row['tokens_per_second']):,.0f}",
    ),
    Chart(
        "memory",
        "Memory by layout",
        "peak MiB on the fullest rank (on a CPU: of the whole process)",
        [Part("MiB", _GREEN, _number("memory_mib_per_rank"))],
        lambda row: f"{float(row['memory_mib_per_rank']):,.0f}",
    ),
    Chart(
        "time",
        "Where the time of a step goes",
        "% of a step, mean of all ranks",
        [
            Part("computing", _BLUE, lambda row: 100 - _percent("communication_share")(row)),
            Part("waiting in collectives", _ORANGE, _percent("collective_share")),
            Part("waiting for the pipeline", _GREY, _percent("pipeline_wait_share")),
        ],
        lambda row: f"{100 - _percent('communication_share')(row):.0f} %",
        largest=100.0,
        mark=80.0,
        mark_label="aim: 80 %",
    ),
)


def read(summary: Path) -> tuple[list[Row], int]:
    """The layouts that ran, the fastest first, and the number of others."""
    with summary.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    good = [row for row in rows if row["status"] == "ok"]
    good.sort(key=lambda row: -float(row["tokens_per_second"]))
    return good, len(rows) - len(good)


def subtitle(rows: Sequence[Row]) -> str:
    """Where and how the numbers came about."""
    row = rows[0]
    count = int(row["processes"])
    batches = sorted({int(other["global_batch_size"]) for other in rows})
    batch = f"{batches[0]}" if len(batches) == 1 else f"{batches[0]} to {batches[-1]}"
    return (
        f"{count} process{'es' if count > 1 else ''} on {row['device']}, {row['precision']}; "
        f"{batch} × {row['seq_length']} tokens a step"
    )


def usable(chart: Chart, rows: Sequence[Row]) -> list[Row]:
    """Where torch itself communicates on a GPU (ZeRO 3) the waiting is not known."""
    return [row for row in rows if chart.file != "time" or row["communication_share"]]


def draw(chart: Chart, rows: Sequence[Row], others: int) -> str:
    """One SVG."""
    left = 16 + _LETTER * max(len(row["layout"]) for row in rows)
    height = _TOP + _ROW * len(rows) + _BOTTOM
    step, largest = _scale(chart.largest or max(chart.total(row) for row in rows))
    largest = chart.largest or largest
    per_unit = (_WIDTH - left - _RIGHT - _BEHIND) / largest
    bottom = _TOP + _ROW * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="16" y="26" font-size="16" font-weight="bold">{escape(chart.title)}</text>',
        f'<text x="16" y="46" fill="#555">{escape(subtitle(rows))}</text>',
        *(_legend(chart) if len(chart.parts) > 1 else ()),
    ]
    for i in range(round(largest / step) + 1):
        x = round(left + i * step * per_unit, 1)
        parts.append(f'<line x1="{x}" y1="{_TOP - 6}" x2="{x}" y2="{bottom}" stroke="#e5e5e5"/>')
        parts.append(
            f'<text x="{x}" y="{bottom + 16}" text-anchor="middle" fill="#555">{_short(i * step)}</text>'
        )
    for i, row in enumerate(rows):
        parts += _bar(chart, row, left, _TOP + _ROW * i, per_unit)
    if chart.mark is not None:
        x = round(left + chart.mark * per_unit, 1)
        line = f'<line x1="{x}" y1="{_TOP - 6}" x2="{x}" y2="{bottom}" stroke="#333" stroke-dasharray="4 3"/>'
        parts += [
            line,
            f'<text x="{x}" y="{_TOP - 10}" text-anchor="middle" fill="#333">{escape(chart.mark_label)}</text>',
        ]
    parts.append(f'<text x="{left}" y="{bottom + 36}" fill="#333">{escape(chart.axis)}</text>')
    if others:
        text = f"{others} more without a result: see summary.csv"
        parts.append(f'<text x="{_WIDTH - _RIGHT}" y="46" text-anchor="end" fill="#777">{text}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend(chart: Chart) -> list[str]:
    """On the right above the bars, from right to left."""
    found: list[str] = []
    x = float(_WIDTH - _RIGHT)
    for part in reversed(chart.parts):
        x -= 6.4 * len(part.label) + 32
        found.append(f'<rect x="{x}" y="16" width="12" height="12" fill="{part.colour}"/>')
        found.append(f'<text x="{x + 17}" y="26">{escape(part.label)}</text>')
    return found


def _bar(chart: Chart, row: Row, left: float, top: float, per_unit: float) -> list[str]:
    middle = top + _ROW / 2 + 4
    found = [f'<text x="{left - 8}" y="{middle}" text-anchor="end">{escape(row["layout"])}</text>']
    x = left
    for part in chart.parts:
        width = round(part.value(row) * per_unit, 1)
        found.append(
            f'<rect x="{round(x, 1)}" y="{top + (_ROW - _BAR) / 2}" width="{width}" height="{_BAR}" fill="{part.colour}">'
            f"<title>{escape(row['layout'])}: {part.value(row):,.1f} {escape(part.label)}</title></rect>"
        )
        x += width
    found.append(f'<text x="{round(x, 1) + 6}" y="{middle}" fill="#333">{escape(chart.label(row))}</text>')
    return found


def _scale(largest: float) -> tuple[float, float]:
    """The distance of the lines, 1, 2 or 5 times a power of ten, and the end of the axis."""
    rough = max(largest, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return step, step * math.ceil(largest / step)


def _short(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if unit == 'k' else size):g} {unit}"
    return f"{number:g}"


def draw_png(chart: Chart, rows: Sequence[Row], file: Path) -> bool:
    """The same with matplotlib, where it is installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 1.6 + 0.32 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [row["layout"] for row in rows]
    start = [0.0] * len(rows)
    bars = None
    for part in chart.parts:
        values = [part.value(row) for row in rows]
        bars = axes.barh(names, values, left=start, color=part.colour, label=part.label)
        start = [a + b for a, b in zip(start, values)]
    axes.bar_label(bars, [chart.label(row) for row in rows], padding=4)
    axes.invert_yaxis()
    axes.set_xlim(0, (chart.largest or max(start)) * 1.12)
    axes.set_xlabel(chart.axis)
    axes.set_title(f"{chart.title}\n{subtitle(rows)}", fontsize=11)
    if len(chart.parts) > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=len(chart.parts))
    if chart.mark is not None:
        axes.axvline(chart.mark, color="#333", linestyle="--", linewidth=1)
    figure.savefig(file, dpi=120)
    return True


def draw_all(folder: Path) -> list[Path]:
    """Every picture of a folder that holds a summary.csv; none where no layout has a result."""
    rows, others = read(folder / "summary.csv")
    written = []
    for chart in CHARTS:
        shown = usable(chart, rows)
        if not shown:
            continue
        picture = folder / f"{chart.file}.svg"
        picture.write_text(draw(chart, shown, others + len(rows) - len(shown)), encoding="utf-8")
        written.append(picture)
        if draw_png(chart, shown, picture.with_suffix(".png")):
            written.append(picture.with_suffix(".png"))
    return written


def main(words: Sequence[str]) -> int:
    folder = Path(words[0]) if words else Path(__file__).resolve().parent
    if not (folder / "summary.csv").is_file():
        sys.stderr.write(
            f"plot_results.py: {folder} has no summary.csv; run benchmark.sh first, or name the folder of its results\n"
        )
        return 2
    written = draw_all(folder)
    if not written:
        sys.stderr.write(f"plot_results.py: no layout in {folder / 'summary.csv'} has a result to draw\n")
        return 2
    sys.stdout.write("".join(f"{file}\n" for file in written))
    if not any(file.suffix == ".png" for file in written):
        sys.stdout.write("no .png: matplotlib is not installed; the .svg files open in any browser\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
