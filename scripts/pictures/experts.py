"""Draws how tokens are dispatched to experts on other ranks.

The holders of experts are those of `ExpertAxis`; tokens are sorted as the dispatcher sorts them.
"""

from __future__ import annotations

from pentatron.parallel.axes import ExpertAxis
from pentatron.parallel.collectives import Group
from pictures.canvas import COLOURS, FAINT, GREY, Canvas

# Expert of each token, by rank: one expert is popular, and one gets no tokens.
CHOSEN = ((0, 2, 1, 2), (2, 0, 5, 4), (6, 2, 7, 6), (4, 1, 6, 2))
_EXPERTS, _TOKEN, _RANK = 8, 28, 176


def expert_dispatch() -> str:
    ranks = len(CHOSEN)
    axes = [ExpertAxis(Group(rank, ranks)) for rank in range(ranks)]
    holder = {expert: axis.ep_rank for axis in axes for expert in axis.own(_EXPERTS)}
    canvas = Canvas(
        ranks * _RANK + 110,
        356,
        f"{_EXPERTS} experts on {ranks} ranks (expert parallel {ranks}), one expert for each token",
    )
    tokens_y, rows_y, experts_y = 60, 190, 246
    # Rows arrive in the order of their source ranks; then each rank sorts them by its experts.
    arrived: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for rank, chosen in enumerate(CHOSEN):
        for expert, token in sorted((expert, token) for token, expert in enumerate(chosen)):
            arrived[holder[expert]].append((expert, rank, token))
    places = {}
    for rank, rows in enumerate(arrived):
        for number, row in enumerate(sorted(rows)):
            places[row] = 104 + rank * _RANK + number * 23
    for (expert, rank, token), x in places.items():
        canvas.line(
            104 + rank * _RANK + token * 36 + _TOKEN / 2,
            tokens_y + _TOKEN,
            x + 10,
            rows_y - 3,
            COLOURS[holder[expert]],
            1.3,
        )
    for rank, chosen in enumerate(CHOSEN):
        left = 104 + rank * _RANK
        canvas.text(left, tokens_y - 10, f"rank {rank}", 13, bold=True)
        for token, expert in enumerate(chosen):
            canvas.box(left + token * 36, tokens_y, _TOKEN, _TOKEN, COLOURS[holder[expert]], str(expert))
    for (expert, _, _), x in places.items():
        canvas.box(x, rows_y, 20, 22, COLOURS[holder[expert]], str(expert), size=11)
    for rank, axis in enumerate(axes):
        for number, expert in enumerate(axis.own(_EXPERTS)):
            rows = sum(1 for row in arrived[rank] if row[0] == expert)
            x = 104 + rank * _RANK + number * 76
            canvas.box(
                x,
                experts_y,
                70,
                40,
                COLOURS[rank] if rows else FAINT,
                f"expert {expert}",
                "white" if rows else GREY,
            )
            canvas.text(x + 35, experts_y + 56, f"{rows} token{'' if rows == 1 else 's'}", 11, GREY, "middle")
    for y, words in (
        (tokens_y + 18, "tokens"),
        (rows_y - 50, "all-to-all"),
        (rows_y + 15, "arrived"),
        (experts_y + 24, "computed"),
    ):
        canvas.text(12, y, words, colour=GREY)
    canvas.text(
        12,
        340,
        "the number is the expert that the router chose; results go back the same way, and an expert without tokens takes part",
        colour=GREY,
    )
    return canvas.drawn()
