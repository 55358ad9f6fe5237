"""Text view of a run for `pentatron monitor`: progress, losses, throughput, and the slowest rank."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pentatron.monitor.metrics import RunMetrics, damaged_lines
from pentatron.text import duration, format_significant, in_mib, one_line, printable

# Recommended maximum share of communication in a step, and minimum GPU utilisation.
MOST_COMMUNICATION = 0.20
LEAST_UTILISATION = 0.80


# --- loss curve in text: braille dots, or stars in ASCII ---


Point = tuple[float, float]

_BLANK = 0x2800
# Bits of a braille character, by column and row of the dot.
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_DOT = "o"


def terminal_curve(
    points: Sequence[Point], marks: Sequence[Point], width: int, height: int, braille: bool = True
) -> list[str]:
    """Returns lines of at most `width` characters: the curve, `marks` as circles, and the axes.

    Each column shows the mean of its points. NaN and inf are skipped.
    """
    points = [p for p in points if math.isfinite(p[1])]
    marks = [m for m in marks if math.isfinite(m[1])]
    if not points:
        return []
    values = [y for _, y in (*points, *marks)]
    low, high = min(values), max(values)
    high += 1e-9 if high == low else 0.0
    label = max(len(format_significant(v)) for v in (low, high))
    cell_width, cell_height = (2, 4) if braille else (1, 1)
    cells = max(8, width - label - 3)
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    columns, rows = cells * cell_width, height * cell_height

    def place(point: Point) -> tuple[int, int]:
        x = round((columns - 1) * (point[0] - first) / (last - first))
        y = round((rows - 1) * (high - point[1]) / (high - low))
        return min(max(x, 0), columns - 1), min(max(y, 0), rows - 1)

    filled = _joined_means(points, place)
    grid = [[_character(filled, column, row, braille) for column in range(cells)] for row in range(height)]
    for x, y in map(place, marks):
        grid[y // cell_height][x // cell_width] = _DOT
    labels = {0: format_significant(high), height - 1: format_significant(low)}
    lines = [f"{labels.get(i, ''):>{label}} {'┤' if i in labels else '│'}" for i in range(height)]
    axis = f"{'':>{label}} └" + "─" * cells
    left, right = f"step {first:.0f}", f"step {last:.0f}"
    middle = max(1, cells - len(left) - len(right))
    legend = f"{_DOT} validation" if marks and middle > 14 else ""
    steps = f"{'':>{label}}  {left}{legend:^{middle}}{right}"
    drawn = [line + "".join(row).rstrip() for line, row in zip(lines, grid)] + [axis, steps]
    return drawn if braille else [line.translate(str.maketrans("┤│└─", "||+-")) for line in drawn]


def _joined_means(points: Sequence[Point], place: Callable[[Point], tuple[int, int]]) -> set[tuple[int, int]]:
    """Returns (column, row) of the dots of a line through the mean of the points in each column."""
    by_column: dict[int, list[Point]] = {}
    for point in points:
        by_column.setdefault(place(point)[0], []).append(point)
    columns = [(x, inside[0][0], [y for _, y in inside]) for x, inside in sorted(by_column.items())]
    means = [(x, place((step, sum(values) / len(values)))[1]) for x, step, values in columns]
    filled: set[tuple[int, int]] = set()
    for (x0, y0), (x, y) in zip([means[0], *means], means):
        if x - x0 > 1:
            # A straight line over columns without points.
            filled |= {(i, round(y0 + (y - y0) * (i - x0) / (x - x0))) for i in range(x0, x + 1)}
        else:
            # Connects neighbouring columns vertically.
            filled |= {(x, row) for row in range(min(y0, y), max(y0, y) + 1)}
    return filled


def _character(filled: set[tuple[int, int]], column: int, row: int, braille: bool) -> str:
    if not braille:
        return "*" if (column, row) in filled else " "
    bits = sum(_BITS[x][y] for x in range(2) for y in range(4) if (2 * column + x, 4 * row + y) in filled)
    return chr(_BLANK + bits) if bits else " "


# Fields of a row with the seconds of every rank.
_TIMES = ("busy_seconds", "collective_seconds", "message_seconds")
# A rank is slow if its time exceeds the median by this factor.
_SLOW = 1.2
_MAX_RANKS = 16
_BAR_WIDTH = 24
_COLOURS = {"bold": "1", "good": "32", "bad": "31", "warn": "33", "faint": "2"}


@dataclass(frozen=True)
class RunStatus:
    """State of the run other than its metrics. `state`: running, finished, stopped, crashed or silent.

    `samples_left`: to the last step if known, as the batch size may ramp up.
    """

    name: str
    state: str
    about_state: str
    total_steps: int
    checkpoint: str
    samples_left: int | None = None
    restarts: str = ""


@dataclass(frozen=True)
class Screen:
    width: int = 100
    height: int = 40
    colours: bool = False
    unicode: bool = True

    def paint(self, text: str, style: str) -> str:
        return f"\x1b[{_COLOURS[style]}m{text}\x1b[0m" if self.colours else text


def render_view(run: RunStatus, metrics: RunMetrics, screen: Screen) -> list[str]:
    """Returns the lines of the screen."""
    style = {"running": "good", "finished": "good", "crashed": "bad"}.get(run.state, "warn")
    head = [f"{screen.paint(one_line(run.name), 'bold')}: {screen.paint(run.state, style)}"]
    head += [printable(run.about_state)] if run.about_state else []
    head += [damaged_lines(len(metrics.damaged))] if metrics.damaged else []
    if not metrics.recent:
        return [*head, "no step has finished yet"]
    head += ["", _progress(run, metrics, screen), _losses(metrics)]
    foot = ["", *_speed(metrics, screen), *_ranks(metrics, screen)]
    foot += [f"checkpoint    {one_line(run.checkpoint)}"]
    foot += [f"restarts      {one_line(run.restarts)}"] if run.restarts else []
    room = screen.height - len(head) - len(foot) - 3
    points, marks = sorted(metrics.losses.items()), sorted(metrics.validations.items())
    return [*head, *terminal_curve(points, marks, screen.width, min(14, max(5, room)), screen.unicode), *foot]


def seconds_per_step(metrics: RunMetrics) -> float:
    return statistics.mean(row["seconds"] for row in metrics.recent)


def _seconds_left(run: RunStatus, metrics: RunMetrics) -> float:
    samples = sum(row.get("global_batch_size", 0) for row in metrics.recent)
    if run.samples_left is None or not samples:
        return max(0, run.total_steps - metrics.step) * seconds_per_step(metrics)
    return run.samples_left * sum(row["seconds"] for row in metrics.recent) / samples


def _progress(run: RunStatus, metrics: RunMetrics, screen: Screen) -> str:
    share = min(1.0, metrics.step / run.total_steps) if run.total_steps else 1.0
    filled = round(_BAR_WIDTH * share)
    full, empty = ("█", "░") if screen.unicode else ("#", ".")
    left = f"  left {duration(_seconds_left(run, metrics))}" if run.state in ("running", "silent") else ""
    bar = screen.paint(full * filled, "good") + screen.paint(empty * (_BAR_WIDTH - filled), "faint")
    return f"step {metrics.step}/{run.total_steps}  {bar} {100 * share:.0f}%{left}"


def _losses(metrics: RunMetrics) -> str:
    recent = [row["loss"] for row in metrics.recent]
    text = f"loss {recent[-1]:.4f} (mean of {len(recent)}: {statistics.mean(recent):.4f})"
    if metrics.validations:
        step, loss = max(metrics.validations.items())
        best_step, best = min(metrics.validations.items(), key=lambda item: item[1])
        text += f"  validation {loss:.4f} at step {step}"
        text += f" (best {best:.4f} at step {best_step})" if best_step != step else ""
    return text


def _speed(metrics: RunMetrics, screen: Screen) -> list[str]:
    rows, last = list(metrics.recent), metrics.recent[-1]
    seconds = sum(row["seconds"] for row in rows) or math.inf
    tokens = sum(row.get("tokens", row.get("tokens_per_second", 0) * row["seconds"]) for row in rows)
    parts = [f"{tokens / seconds:,.0f} tokens/s"]
    after_first = sum(row["seconds"] for row in rows[1:])
    if "consumed_samples" in last and "consumed_samples" in rows[0] and after_first:
        samples = last["consumed_samples"] - rows[0]["consumed_samples"]
        parts.insert(0, f"{samples / after_first:,.1f} samples/s")
    parts.append(f"{1000 * seconds_per_step(metrics):,.0f} ms a step")
    if "teraflops_per_device" in last:
        rate = statistics.mean(row.get("teraflops_per_device", 0.0) for row in rows)
        parts.append(f"{format_significant(rate)} TFLOP/s per process")
    lines = [f"speed         {'  '.join(parts)}"]
    if "gradient_norm" in last and "learning_rate" in last:
        rate, norm = last["learning_rate"], last["gradient_norm"]
        lines.append(f"optimizer     learning rate {rate:.2e}  gradient norm {norm:.3f}")
    return lines + _health(metrics, screen)


def _health(metrics: RunMetrics, screen: Screen) -> list[str]:
    """Fractions of communication and GPU utilisation, with their recommended limits."""
    ranks = [row["ranks"] for row in metrics.ranks]
    busy, collectives, messages = (sum(sum(step.get(time, ())) for step in ranks) for time in _TIMES)
    waiting = collectives + messages
    lines = []
    if total := waiting + busy:
        share, pipeline = waiting / total, messages / total
        shown = screen.paint(f"{share:.0%}", "good" if share < MOST_COMMUNICATION else "warn")
        part = f" ({pipeline:.0%} in the pipeline)" if pipeline >= 0.01 else ""
        aim = f"aim: below {MOST_COMMUNICATION:.0%}"
        lines.append(f"communication {shown} of a step is waiting for other ranks{part}; {aim}")
    percentages = [p for of_step in ranks for p in of_step.get("gpu_utilisation", ())]
    if percentages:
        mean = statistics.mean(percentages) / 100
        shown = screen.paint(f"{mean:.0%}", "good" if mean > LEAST_UTILISATION else "warn")
        lines.append(f"utilisation   {shown} of the GPUs; aim: above {LEAST_UTILISATION:.0%}")
    return lines


def _ranks(metrics: RunMetrics, screen: Screen) -> list[str]:
    """One line per rank; with many ranks, the busiest and those with the most memory."""
    if not metrics.ranks:
        return [f"memory        {in_mib(_memory(metrics.recent[-1]))} MiB (rank 0)"]
    ranks = [row["ranks"] for row in metrics.ranks]
    memory = [max(of_rank) for of_rank in zip(*(of_step["memory_bytes"] for of_step in ranks))]
    if len(memory) == 1:
        return [f"memory        {in_mib(memory[0])} MiB"]
    measured = ([of_step[time] for of_step in ranks if time in of_step] for time in _TIMES)
    # Medians over the last measured steps, as one step may be an outlier.
    busy, collectives, messages = ([statistics.median(rank) for rank in zip(*steps)] for steps in measured)
    waiting = [a + b for a, b in zip(collectives, messages)]
    if not busy:
        most, least = in_mib(max(memory)), in_mib(min(memory))
        return [
            f"memory        {most} MiB on rank {memory.index(max(memory))}, {least} on the rank with the least"
        ]
    # Rows of the file may lack ranks.
    memory = memory[: min(len(busy), len(waiting))]
    every = range(len(memory))
    order = sorted(every, key=lambda rank: -busy[rank])
    chosen = {*order[: _MAX_RANKS - 4], *sorted(every, key=lambda rank: -memory[rank])[:4]}
    shown = every if len(memory) <= _MAX_RANKS else sorted(chosen)
    slowest, median = order[0], statistics.median(busy)
    full = "█" if screen.unicode else "#"
    lines = ["ranks         busy" + " " * _BAR_WIDTH + "ms   waiting ms   memory MiB"]
    for rank in shown:
        bar = full * max(1, round(_BAR_WIDTH * busy[rank] / (max(busy) or 1)))
        is_slow = rank == slowest and busy[rank] > _SLOW * median
        bar = f"{screen.paint(bar, 'bad' if is_slow else 'good')}{' ' * (_BAR_WIDTH - len(bar))}"
        times = f"{1000 * busy[rank]:6,.0f}   {1000 * waiting[rank]:10,.0f}"
        slower = f"{busy[rank] / median:.1f} × the median" if median else "median busy time is 0"
        tail = screen.paint(f"  slowest: {slower}", "bad") if is_slow else ""
        lines.append(f"  {rank:>5}       {bar}{times}   {in_mib(memory[rank], '10,.0f')}{tail}")
    if len(shown) < len(memory):
        lines.append(f"  {len(memory) - len(shown)} more ranks have lower busy time and memory")
    return lines


def status_line(run: RunStatus, metrics: RunMetrics) -> str:
    """Formats the view in one line, for a log."""
    last, left = metrics.recent[-1], duration(_seconds_left(run, metrics))
    speed = f"{last.get('tokens_per_second', 0):,.0f} tokens/s  {in_mib(_memory(last))} MiB"
    return f"step {metrics.step}/{run.total_steps}  {_losses(metrics)}  {speed}  left {left}"


def _memory(row: dict[str, Any]) -> int:
    return int(max(row.get("ranks", {}).get("memory_bytes", [row.get("memory_bytes", 0)])))
