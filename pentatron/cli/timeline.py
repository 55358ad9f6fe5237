"""A pipeline schedule in time: one row for every pipeline rank, in a terminal or as a picture."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import TypeVar

from pentatron.layout.actions import Kind, Placement
from pentatron.layout.check import NAMES, Checked, Slot

# Background colours of a 256-colour terminal for forward, backward and weight gradients, one for each stage of a rank in
# turn.
_FORWARD, _BACKWARD, _WEIGHT = (25, 31, 62, 67), (28, 64, 100, 65), (94, 130, 136, 137)
_PICTURE_FORWARD = ("#4c78a8", "#7fa3c9", "#35577a", "#9dbbd9")
_PICTURE_BACKWARD = ("#59a14f", "#8bc07f", "#3f7a37", "#aad3a1")
_PICTURE_WEIGHT = ("#b07a2b", "#cfa05c", "#8a5d1c", "#dcb985")
_IDLE = "·"

T = TypeVar("T")


def letter(placement: Placement, stage: int) -> str:
    """Which of its rank's stages this is: a, b, ...; nothing where each rank has one."""
    own = placement.stages_of(placement.rank_of[stage])
    return "" if len(own) == 1 else _letter(own.index(stage))


def _letter(index: int) -> str:
    return chr(ord("a") + index) if index < 26 else f"({index})"


def _label(placement: Placement, slot: Slot) -> str:
    return f"{slot.action.kind.value}{slot.action.micro_batch}{letter(placement, slot.action.stage)}"


# --- terminal ---


def rows(checked: Checked, placement: Placement, width: int, colours: bool) -> list[str]:
    """The schedule in lines of at most `width` characters; a long one continues below."""
    cell = 1 + max(len(_label(placement, slot)) for slots in checked.timeline for slot in slots)
    margin = len(f"rank {placement.ranks - 1} ")
    per_line = max(1, (width - margin - 2) // cell)
    lines = []
    for first in range(0, checked.time, per_line):
        last = min(checked.time, first + per_line)
        lines.append(" " * margin + " " + _scale(first, last, cell))
        for rank, slots in enumerate(checked.timeline):
            drawn = "".join(_cells(slots, placement, first, last, cell, colours))
            lines.append(f"rank {rank}".ljust(margin) + f"▕{drawn}▏")
        lines.append("")
    return [*lines, *_legend(checked, placement)]


def _scale(first: int, last: int, cell: int) -> str:
    """Time above the columns, every fifth step."""
    marks = (f"{time:<{cell}}" if time % 5 == 0 else " " * cell for time in range(first, last))
    return "".join(mark[:cell] for mark in marks).rstrip()


def _cells(
    slots: Sequence[Slot], placement: Placement, first: int, last: int, cell: int, colours: bool
) -> Iterator[str]:
    """What one rank does from `first` to `last`; a computation that lasts several steps fills them all."""
    at = first
    for slot in slots:
        start, end = max(slot.start, first), min(slot.end, last)
        if start >= end:
            continue
        yield _idle(start - at, cell)
        length = (end - start) * cell
        # Where a line ends inside a computation, the next one goes on with a dash.
        text = _label(placement, slot) if start == slot.start else "─"
        yield _painted(text[: length - 1].ljust(length - 1, "─") + " ", placement, slot, colours)
        at = end
    yield _idle(last - at, cell)


def _idle(steps: int, cell: int) -> str:
    return (_IDLE.center(cell - 1) + " ") * steps


def _painted(text: str, placement: Placement, slot: Slot, colours: bool) -> str:
    if not colours:
        return text
    palette = {Kind.FORWARD: _FORWARD, Kind.WEIGHT: _WEIGHT}.get(slot.action.kind, _BACKWARD)
    return f"\x1b[97;48;5;{_of_stage(palette, placement, slot)}m{text[:-1]}\x1b[0m "


def _of_stage(palette: Sequence[T], placement: Placement, slot: Slot) -> T:
    own = placement.stages_of(placement.rank_of[slot.action.stage])
    return palette[own.index(slot.action.stage) % len(palette)]


def _legend(checked: Checked, placement: Placement) -> list[str]:
    kinds = {slot.action.kind for slots in checked.timeline for slot in slots}
    names = "F0 forward, "
    if Kind.INPUT in kinds:
        names += "I0 input gradient, W0 weight gradient" + (", " if Kind.BACKWARD in kinds else "")
    if Kind.BACKWARD in kinds or Kind.INPUT not in kinds:
        names += "B0 backward"
    names += " of micro-batch 0"
    if Kind.INPUT not in kinds:
        names += " (a backward takes two steps)"
    elif Kind.BACKWARD in kinds:
        names += " (B is I and W in one)"
    lines = [f"{names}, {_IDLE} waiting"]
    if placement.stages > placement.ranks:
        dealt = (
            f"{_letter(i)} stages {first}-{first + placement.ranks - 1}"
            for i, first in enumerate(range(0, placement.stages, placement.ranks))
        )
        lines.append(f"letters tell the stages of a rank apart: {', '.join(dealt)}")
    return lines


# --- picture ---

_STEP, _ROW, _LEFT, _TOP = 22, 26, 70, 50


def picture(checked: Checked, placement: Placement, title: str) -> str:
    """The schedule as an SVG."""
    keys = _keys(checked, placement)
    # Letters are as wide as the font that is found makes them; this leaves room for wide ones.
    wide = max(10 * len(title), *(7 * len(line) for line in keys)) + 24
    width, height = max(_LEFT + checked.time * _STEP + 20, wide), _TOP + placement.ranks * _ROW + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for rank, slots in enumerate(checked.timeline):
        y = _TOP + rank * _ROW
        parts.append(f'<text x="12" y="{y + 16}">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{checked.time * _STEP}" height="{_ROW - 4}" fill="#eeeeee"/>'
        )
        parts += [_box(slot, placement, y) for slot in slots]
    y = _TOP + placement.ranks * _ROW
    parts += [
        f'<text x="{_LEFT + time * _STEP}" y="{y + 12}" fill="#777777">{time}</text>'
        for time in range(0, checked.time + 1, 5)
    ]
    parts += [f'<text x="12" y="{y + 34 + 15 * i}">{escape(line)}</text>' for i, line in enumerate(keys)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _keys(checked: Checked, placement: Placement) -> list[str]:
    colours = "blue: forward, green: backward (takes two steps), grey: waiting; the numbers are micro-batches"
    if any(checked.deferred):
        colours = (
            "blue: forward, green: input gradient (two steps: whole backward), brown: weight gradient, grey: waiting; "
            "the numbers are micro-batches"
        )
    return [colours, *_legend(checked, placement)[1:]]


def _box(slot: Slot, placement: Placement, y: int) -> str:
    palettes = {Kind.FORWARD: _PICTURE_FORWARD, Kind.WEIGHT: _PICTURE_WEIGHT}
    palette = palettes.get(slot.action.kind, _PICTURE_BACKWARD)
    x, width = _LEFT + slot.start * _STEP, (slot.end - slot.start) * _STEP
    text = f"{slot.action.micro_batch}{letter(placement, slot.action.stage)}"
    return (
        f"<g><title>{NAMES.get(slot.action.kind, slot.action.kind.name.lower())} of micro-batch {slot.action.micro_batch}, stage "
        f'{slot.action.stage}</title><rect x="{x}" y="{y}" width="{width - 1}" height="{_ROW - 4}" rx="2" '
        f'fill="{_of_stage(palette, placement, slot)}"/><text x="{x + width / 2:g}" y="{y + 15}" fill="white" '
        f'text-anchor="middle">{text}</text></g>'
    )
