"""One training step on two pipeline ranks: what is computed, and what is sent on which axis. The middle is the list of
actions that the executor walks."""

from __future__ import annotations

from pentatron.layout.actions import Kind
from pentatron.layout.check import check
from pentatron.layout.schedules import training_schedule
from pictures.canvas import FAINT, GREY, Canvas

_UNIT, _LEFT = 30, 128
_LANES = ("compute", "tensor", "pipeline", "replicas", "everyone")
_INK = {
    "tensor": "#9c5a8a",
    "pipeline": "#c44e52",
    "replicas": "#3a8f8f",
    "everyone": "#7a6bb0",
    "host": "#8a8a8a",
}
_FORWARD, _BACKWARD = "#4c78a8", "#59a14f"


def step_lanes(ranks: int, micro_batches: int) -> str:
    schedule = training_schedule("1f1b", ranks, 1, micro_batches)
    checked = check(schedule)
    before, after = 7, 8
    units = before + checked.time + after
    lane, block = 24, len(_LANES) * 24 + 40
    canvas = Canvas(
        _LEFT + units * _UNIT + 16,
        84 + ranks * block + 30,
        f"A step of 1F1B: {ranks} pipeline ranks, {micro_batches} micro-batches, tensor and data parallel",
    )
    for words, first, length in (
        ("read, agree", 0, 3.5),
        ("count tokens", 3.5, 3.5),
        ("forward and backward", before, checked.time),
        ("reduce, norm", before + checked.time, 4),
        ("update, gather", before + checked.time + 4, 4),
    ):
        x = _LEFT + first * _UNIT
        canvas.line(x, 44, x + length * _UNIT - 6, 44, GREY)
        canvas.text(x, 60, words, 11, GREY)
    for rank in range(ranks):
        top = 84 + rank * block
        canvas.text(12, top + 10, f"pipeline rank {rank}", 12, bold=True)
        rows = {name: top + 18 + i * lane for i, name in enumerate(_LANES)}

        def box(
            row: str, start: float, length: float, fill: str, label: str = "", rows: dict[str, int] = rows
        ) -> None:
            canvas.box(_LEFT + start * _UNIT, rows[row], length * _UNIT - 2, lane - 5, fill, label, size=11)

        for name, y in rows.items():
            canvas.text(_LEFT - 10, y + 14, name, 11, GREY, "end")
            canvas.box(_LEFT, y, units * _UNIT - 2, lane - 5, "#f4f4f4")
        box("compute", 0, 2, _INK["host"], "read")
        box("everyone", 2, 1.5, _INK["everyone"], "go on?")
        box("replicas", 3.5, 2, _INK["replicas"], "tokens")
        ends = {slot.action: before + slot.end for slot in checked.timeline[rank]}
        starts = {slot.action: before + slot.start for slot in checked.timeline[rank]}
        for action, start in starts.items():
            forward = action.kind is Kind.FORWARD
            length = ends[action] - start
            box(
                "compute",
                start,
                length,
                _FORWARD if forward else _BACKWARD,
                f"{action.kind}{action.micro_batch}",
            )
            for quarter in range(4 if forward else 8):
                x = _LEFT + (start + (quarter + 0.5) * length / (4 if forward else 8)) * _UNIT - 2
                canvas.box(x, rows["tensor"] + 3, 2.5, lane - 11, _INK["tensor"])
        for action in schedule.actions[rank]:
            sends = {Kind.SEND_ACTIVATION: Kind.FORWARD, Kind.SEND_GRADIENT: Kind.BACKWARD}
            takes = {Kind.RECEIVE_ACTIVATION: (Kind.FORWARD, 1), Kind.RECEIVE_GRADIENT: (Kind.BACKWARD, -1)}
            if action.kind in sends:
                made = next(
                    a
                    for a in ends
                    if (a.kind, a.stage, a.micro_batch)
                    == (sends[action.kind], action.stage, action.micro_batch)
                )
                x = _LEFT + ends[made] * _UNIT
                canvas.box(x - 12, rows["pipeline"] + 2, 11, lane - 9, _INK["pipeline"], "▸", size=10)
            elif action.kind in takes:
                kind, way = takes[action.kind]
                used = next(
                    a
                    for a in starts
                    if (a.kind, a.stage, a.micro_batch) == (kind, action.stage + way, action.micro_batch)
                )
                x = _LEFT + starts[used] * _UNIT
                canvas.box(x + 1, rows["pipeline"] + 2, 11, lane - 9, FAINT, "◂", GREY, GREY, 10)
        end = max(ends.values())
        box("replicas", end, 2, _INK["replicas"], "reduce")
        box("everyone", before + checked.time + 2, 2, _INK["everyone"], "norm")
        box("compute", before + checked.time + 4, 2, _INK["host"], "update")
        box("replicas", before + checked.time + 6, 2, _INK["replicas"], "gather")
    y = 84 + ranks * block + 14
    canvas.text(
        12,
        y,
        "▸ sent, ◂ received; gather only with ZeRO 1 and 2; a tick on the tensor axis stands for collectives inside layers, not for one of them",
        11,
        GREY,
    )
    return canvas.drawn()
