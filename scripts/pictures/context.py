"""Draws the tokens of each rank under context parallelism, and the keys that its queries attend to."""

from __future__ import annotations

from pentatron.parallel.axes import ContextAxis
from pentatron.parallel.collectives import Group
from pictures.canvas import COLOURS, FAINT, GREY, Canvas

_CELL = 34


def context_chunks(ranks: int) -> str:
    axis = ContextAxis(Group(0, ranks))
    owner = {chunk: rank for rank in range(ranks) for chunk in axis.chunks_of(rank)}
    chunks = 2 * ranks
    left, top = 150, 92
    canvas = Canvas(
        640,
        top + chunks * _CELL + 48,
        f"Context parallel {ranks}: who has which tokens, and who looks at whom",
    )
    canvas.text(left, 56, "keys and values, in chunks of the sequence", colour=GREY)
    canvas.text(left - 14, top - 11, "queries", colour=GREY, anchor="end")
    work = [0.0] * ranks
    for chunk in range(chunks):
        canvas.box(left + chunk * _CELL, top - 26, _CELL - 3, 20, COLOURS[owner[chunk]], str(chunk))
        y = top + chunk * _CELL
        canvas.box(left - 42, y, 28, _CELL - 3, COLOURS[owner[chunk]], str(chunk))
        for key in range(chunks):
            seen = key <= chunk
            fill = COLOURS[owner[chunk]] if seen else FAINT
            canvas.box(left + key * _CELL, y, _CELL - 3, _CELL - 3, fill, "½" if key == chunk else "")
            work[owner[chunk]] += 0.5 if key == chunk else float(seen)
    x = left + chunks * _CELL + 30
    for rank in range(ranks):
        y = top + 8 + rank * 44
        canvas.box(x, y, 16, 16, COLOURS[rank])
        first, second = axis.chunks_of(rank)
        canvas.text(x + 24, y + 13, f"rank {rank}: chunks {first}, {second}")
        canvas.text(x + 24, y + 28, f"{work[rank]:g} squares of work", 11, GREY)
    canvas.text(
        12,
        top + chunks * _CELL + 30,
        "grey: later tokens, not looked at (causal); ½: a triangle on the diagonal",
        colour=GREY,
    )
    return canvas.drawn()
