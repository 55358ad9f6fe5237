"""Draws tokens per second on one GPU, ours beside other libraries, from bench/results."""

from __future__ import annotations

from collections.abc import Sequence

from bench.performance_page import Result, beside_reference, name_of, place_of
from pictures.canvas import COLOURS, GREY, Canvas

# Ours stand out; the others are grey.
_INK = {"ours": COLOURS[0], "ours:fp8": COLOURS[1]}
_OTHERS = "#9a9a9a"
_LEFT, _WIDTH, _RIGHT, _BAR, _HEAD = 190, 430, 150, 20, 30


def speeds(results: Sequence[Result]) -> str:
    groups: dict[str, list[tuple[Result, float | None]]] = {}
    for r, ratio in beside_reference(results):
        if "tok_s" in r:
            groups.setdefault(place_of(r), []).append((r, ratio))
    bars = [r for group in groups.values() for r, _ in group]
    assert bars, "nothing in bench/results was measured beside torchtitan"
    (device,) = {r["versions"]["gpu"] for r in bars}
    fastest = max(r["tok_s"] for r in bars)
    height = 50 + len(bars) * _BAR + len(groups) * _HEAD
    title = f"Training on one {device}: tokens a second (× torchtitan's fastest block)"
    canvas = Canvas(_LEFT + _WIDTH + _RIGHT, height, title)
    y = 34.0
    for place, group in groups.items():
        y += _HEAD
        canvas.text(12, y - 6, place, 13, bold=True)
        for r, ratio in sorted(group, key=lambda pair: -pair[0]["tok_s"]):
            canvas.text(_LEFT - 8, y + 14, name_of(r), colour=GREY, anchor="end")
            width = _WIDTH * r["tok_s"] / fastest
            canvas.box(_LEFT, y + 2, width, _BAR - 4, _INK.get(r["case"], _OTHERS))
            against = "" if ratio is None else f" ({ratio:.2f} ×)"
            canvas.text(_LEFT + width + 6, y + 14, f"{r['tok_s']:,}{against}")
            y += _BAR
    return canvas.drawn()
