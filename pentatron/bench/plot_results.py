"""Draws bar charts of benchmark results: `python plot_results.py [FOLDER]`.

FOLDER is by default the folder of this file. Reads summary.csv and writes throughput.svg, memory.svg and
time.svg, and .png files if matplotlib is installed. The file is copied beside the results, so it must not
import pentatron, nor anything else outside the standard library.
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
# Space for the value after the longest bar, and the width of a letter of the layout names.
_VALUE, _LETTER = 62, 7.0
_BLUE, _ORANGE, _GREY, _GREEN = "#2171b5", "#d94801", "#c6c6c6", "#41ab5d"

Row = dict[str, str]


@dataclass(frozen=True)
class Segment:
    """A segment of each bar, in one colour."""

    label: str
    colour: str
    value: Callable[[Row], float]


@dataclass(frozen=True)
class Chart:
    """A chart with one bar per layout, stacked from `parts`.

    `axis`: label of the axis. `mark`: value of a dashed line.
    """

    file: str
    title: str
    axis: str
    parts: Sequence[Segment]
    label: Callable[[Row], str]
    largest: float | None = None
    mark: float | None = None
    mark_label: str = ""


def _number(name: str, factor: float = 1) -> Callable[[Row], float]:
    return lambda row: factor * float(row[name] or 0)


def _computing_percent(row: Row) -> float:
    return 100 - 100 * float(row["communication_share"] or 0)


CHARTS = (
    Chart(
        "throughput",
        "Throughput by layout",
        "tokens/s of all processes together",
        [Segment("tokens/s", _BLUE, _number("tokens_per_second"))],
        lambda row: f"{float(row['tokens_per_second']):,.0f}",
    ),
    Chart(
        "memory",
        "Memory by layout",
        "peak MiB on the fullest rank (on a CPU: of the whole process)",
        [Segment("MiB", _GREEN, _number("memory_mib_per_rank"))],
        lambda row: f"{float(row['memory_mib_per_rank']):,.0f}",
    ),
    Chart(
        "time",
        "Where the time of a step goes",
        "% of a step, mean of all ranks",
        [
            Segment("computing", _BLUE, _computing_percent),
            Segment("waiting in collectives", _ORANGE, _number("collective_share", 100)),
            Segment("waiting for the pipeline", _GREY, _number("pipeline_wait_share", 100)),
        ],
        lambda row: f"{_computing_percent(row):.0f} %",
        largest=100.0,
        mark=80.0,
        mark_label="aim: 80 %",
    ),
)


def read(summary: Path) -> tuple[list[Row], int]:
    """Returns the rows of layouts that ran, fastest first, and the number of other rows."""
    with summary.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    finished = [row for row in rows if row["status"] == "ok"]
    finished.sort(key=lambda row: -float(row["tokens_per_second"]))
    return finished, len(rows) - len(finished)


def subtitle(rows: Sequence[Row]) -> str:
    """Returns the conditions of the benchmark: processes, device, precision and batch."""
    row = rows[0]
    count = int(row["processes"])
    batches = sorted({int(other["global_batch_size"]) for other in rows})
    batch = f"{batches[0]}" if len(batches) == 1 else f"{batches[0]} to {batches[-1]}"
    device = f"{count} process{'es' if count > 1 else ''} on {row['device']}, {row['precision']}"
    return f"{device}; {batch} × {row['seq_length']} tokens a step"


def draw(chart: Chart, rows: Sequence[Row], others: int) -> str:
    """Returns the chart as SVG. `others`: number of rows without a result."""
    left = 16 + _LETTER * max(len(row["layout"]) for row in rows)
    height = _TOP + _ROW * len(rows) + _BOTTOM
    longest = max(sum(part.value(row) for part in chart.parts) for row in rows)
    step, end = _scale(chart.largest or longest)
    largest = chart.largest or end
    per_unit = (_WIDTH - left - _RIGHT - _VALUE) / largest
    bottom = _TOP + _ROW * len(rows)
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="16" y="26" font-size="16" font-weight="bold">{escape(chart.title)}</text>',
        f'<text x="16" y="46" fill="#555">{escape(subtitle(rows))}</text>',
        *(_legend(chart) if len(chart.parts) > 1 else ()),
    ]
    for value in (i * step for i in range(round(largest / step) + 1)):
        x = round(left + value * per_unit, 1)
        elements += [
            f'<line x1="{x}" y1="{_TOP - 6}" x2="{x}" y2="{bottom}" stroke="#e5e5e5"/>',
            f'<text x="{x}" y="{bottom + 16}" text-anchor="middle" fill="#555">{_short(value)}</text>',
        ]
    for i, row in enumerate(rows):
        elements += _bar(chart, row, left, _TOP + _ROW * i, per_unit)
    if chart.mark is not None:
        x = round(left + chart.mark * per_unit, 1)
        elements += [
            f'<line x1="{x}" y1="{_TOP - 6}" x2="{x}" y2="{bottom}" stroke="#333" stroke-dasharray="4 3"/>',
            f'<text x="{x}" y="{_TOP - 10}" text-anchor="middle" fill="#333">{escape(chart.mark_label)}</text>',
        ]
    elements.append(f'<text x="{left}" y="{bottom + 36}" fill="#333">{escape(chart.axis)}</text>')
    if others:
        text = f"{others} more without a result: see summary.csv"
        elements.append(f'<text x="{_WIDTH - _RIGHT}" y="46" text-anchor="end" fill="#777">{text}</text>')
    return "\n".join([*elements, "</svg>"]) + "\n"


def _legend(chart: Chart) -> list[str]:
    """Returns the legend, which is laid out from right to left above the bars."""
    elements: list[str] = []
    x = float(_WIDTH - _RIGHT)
    for part in reversed(chart.parts):
        x -= 6.4 * len(part.label) + 32
        elements.append(f'<rect x="{x}" y="16" width="12" height="12" fill="{part.colour}"/>')
        elements.append(f'<text x="{x + 17}" y="26">{escape(part.label)}</text>')
    return elements


def _bar(chart: Chart, row: Row, left: float, top: float, per_unit: float) -> list[str]:
    middle = top + _ROW / 2 + 4
    elements = [f'<text x="{left - 8}" y="{middle}" text-anchor="end">{escape(row["layout"])}</text>']
    x = left
    for part in chart.parts:
        width = round(part.value(row) * per_unit, 1)
        elements.append(
            f'<rect x="{round(x, 1)}" y="{top + (_ROW - _BAR) / 2}" width="{width}" height="{_BAR}" fill="{part.colour}">'
            f"<title>{escape(row['layout'])}: {part.value(row):,.1f} {escape(part.label)}</title></rect>"
        )
        x += width
    elements.append(f'<text x="{round(x, 1) + 6}" y="{middle}" fill="#333">{escape(chart.label(row))}</text>')
    return elements


def _scale(largest: float) -> tuple[float, float]:
    """Returns the grid spacing, which is 1, 2 or 5 times a power of ten, and the end of the axis."""
    rough = max(largest, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return step, step * math.ceil(largest / step)


def _short(number: float) -> str:
    units = ((1e9, 1e9, " G"), (1e6, 1e6, " M"), (1e4, 1e3, " k"), (-math.inf, 1, ""))
    return next(f"{number / size:g}{unit}" for least, size, unit in units if number >= least)


def draw_png(chart: Chart, rows: Sequence[Row], file: Path) -> bool:
    """Draws the chart with matplotlib; returns False if it is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 1.6 + 0.32 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names, start, bars = [row["layout"] for row in rows], [0.0] * len(rows), None
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
    """Draws the charts of a folder with a summary.csv, and returns the files; none without results."""
    rows, others = read(folder / "summary.csv")
    written = []
    for chart in CHARTS:
        # With ZeRO 3 on a GPU torch itself communicates, and the waiting time is unknown.
        shown = [row for row in rows if chart.file != "time" or row["communication_share"]]
        if shown:
            svg, png = (folder / f"{chart.file}.{suffix}" for suffix in ("svg", "png"))
            svg.write_text(draw(chart, shown, others + len(rows) - len(shown)), encoding="utf-8")
            written += [svg, png] if draw_png(chart, shown, png) else [svg]
    return written


def main(words: Sequence[str]) -> int:
    folder = Path(words[0]) if words else Path(__file__).resolve().parent
    summary = folder / "summary.csv"
    written = draw_all(folder) if summary.is_file() else []
    if not written:
        missing = "has no summary.csv; run benchmark.sh first, or name the folder of its results"
        empty = f"no layout in {summary} has a result to draw"
        sys.stderr.write(f"plot_results.py: {empty if summary.is_file() else f'{folder} {missing}'}\n")
        return 2
    sys.stdout.write("".join(f"{file}\n" for file in written))
    if not any(file.suffix == ".png" for file in written):
        sys.stdout.write("no .png: matplotlib is not installed; the .svg files open in any browser\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
