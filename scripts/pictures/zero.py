"""Draws the memory of a data-parallel rank under ZeRO 0 to 3, in bytes for each parameter (bf16)."""

from __future__ import annotations

from pictures.canvas import COLOURS, FAINT, GREY, Canvas

# Name, bytes per parameter in bf16 training, first ZeRO stage that shards it over the replicas. ZeRO 3 keeps
# fp32 shards of the weights, which are the master weights: nothing is kept in bf16.
KEPT = (
    ("weights, bf16", 2.0, 3),
    ("gradients, fp32", 4.0, 2),
    ("master weights, fp32", 4.0, 1),
    ("two moments, fp32", 8.0, 1),
)
_SCALE = 12.0


def bytes_kept(stage: int, ranks: int) -> list[float]:
    """Returns for each row of KEPT the bytes per parameter on one rank."""
    found = [size / ranks if stage >= first else size for _, size, first in KEPT]
    if stage == 3:
        found[0] = 0.0
    return found


def zero_stages(ranks: int) -> str:
    left, top, row = 76, 84, 30
    block = ranks * row + 34
    canvas = Canvas(
        610, top + 4 * block + 10, f"What each of {ranks} replicas keeps, bytes for each parameter (bf16)"
    )
    x = 12.0
    for (name, _, _), colour in zip(KEPT, COLOURS):
        canvas.box(x, 42, 14, 14, colour)
        canvas.text(x + 19, 54, name)
        x += 34 + 6.6 * len(name)
    for stage in range(4):
        y = top + stage * block
        kept = bytes_kept(stage, ranks)
        canvas.text(12, y + 8, f"ZeRO {stage}", 13, bold=True)
        canvas.text(left, y + 8, f"{sum(kept):g} bytes", 12, GREY)
        for rank in range(ranks):
            canvas.text(12, y + 31 + rank * row, f"rank {rank}", colour=GREY)
            at = float(left)
            for (_, size, first), own, colour in zip(KEPT, kept, COLOURS):
                shared = stage >= first
                width = size * _SCALE * 2
                canvas.box(at, y + 17 + rank * row, width - 3, row - 8, FAINT)
                if own:
                    share = (width - 3) / ranks if shared else width - 3
                    canvas.box(
                        at + (rank * share if shared else 0), y + 17 + rank * row, share, row - 8, colour
                    )
                at += width
    return canvas.drawn()
