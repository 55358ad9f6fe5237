"""Draws one training step on two pipeline ranks: computations, and messages by axis.

The middle is the list of actions that the executor runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pentatron.layout.actions import Action, Kind
from pentatron.layout.check import ScheduleProperties, check
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
# Units of time before and after the schedule; pixels of a lane, and of the head above the first rank.
_BEFORE, _AFTER, _LANE, _HEAD = 7, 8, 24, 84
_BLOCK = len(_LANES) * _LANE + 40
_SENDS = {Kind.SEND_ACTIVATION: Kind.FORWARD, Kind.SEND_GRADIENT: Kind.BACKWARD}
_TAKES = {Kind.RECEIVE_ACTIVATION: (Kind.FORWARD, 1), Kind.RECEIVE_GRADIENT: (Kind.BACKWARD, -1)}


def step_lanes(ranks: int, micro_batches: int) -> str:
    schedule = training_schedule("1f1b", ranks, 1, micro_batches)
    checked = check(schedule)
    units = _BEFORE + checked.time + _AFTER
    canvas = Canvas(
        _LEFT + units * _UNIT + 16,
        _HEAD + ranks * _BLOCK + 30,
        f"A step of 1F1B: {ranks} pipeline ranks, {micro_batches} micro-batches, tensor and data parallel",
    )
    _phases(canvas, checked.time)
    for rank in range(ranks):
        top = _HEAD + rank * _BLOCK
        rows = {name: top + 18 + i * _LANE for i, name in enumerate(_LANES)}
        lanes = _Lanes(canvas, rows, _times(checked, rank))
        canvas.text(12, top + 10, f"pipeline rank {rank}", 12, bold=True)
        for name, y in rows.items():
            canvas.text(_LEFT - 10, y + 14, name, 11, GREY, "end")
            canvas.box(_LEFT, y, units * _UNIT - 2, _LANE - 5, "#f4f4f4")
        lanes.beginning()
        lanes.computed()
        lanes.messages(schedule.actions[rank])
        lanes.ending(_BEFORE + checked.time)
    canvas.text(
        12,
        _HEAD + ranks * _BLOCK + 14,
        "▸ sent, ◂ received; gather only with ZeRO 1 and 2; a tick on the tensor axis stands for collectives inside layers, not for one of them",
        11,
        GREY,
    )
    return canvas.drawn()


def _phases(canvas: Canvas, time: int) -> None:
    """Draws the names of the phases of a step, above all ranks."""
    for words, first, length in (
        ("read, agree", 0, 3.5),
        ("count tokens", 3.5, 3.5),
        ("forward and backward", _BEFORE, time),
        ("reduce, norm", _BEFORE + time, 4),
        ("update, gather", _BEFORE + time + 4, 4),
    ):
        x = _LEFT + first * _UNIT
        canvas.line(x, 44, x + length * _UNIT - 6, 44, GREY)
        canvas.text(x, 60, words, 11, GREY)


def _times(checked: ScheduleProperties, rank: int) -> dict[Action, tuple[float, float]]:
    """Returns the start and the end of each computation of a rank."""
    return {slot.action: (_BEFORE + slot.start, _BEFORE + slot.end) for slot in checked.timeline[rank]}


@dataclass(frozen=True)
class _Lanes:
    """Draws the lanes of one rank."""

    canvas: Canvas
    rows: dict[str, int]
    times: dict[Action, tuple[float, float]]

    def box(self, row: str, start: float, length: float, fill: str, label: str = "") -> None:
        x = _LEFT + start * _UNIT
        self.canvas.box(x, self.rows[row], length * _UNIT - 2, _LANE - 5, fill, label, size=11)

    def beginning(self) -> None:
        self.box("compute", 0, 2, _INK["host"], "read")
        self.box("everyone", 2, 1.5, _INK["everyone"], "go on?")
        self.box("replicas", 3.5, 2, _INK["replicas"], "tokens")

    def computed(self) -> None:
        """Draws each computation, with the collectives inside its layers."""
        for action, (start, end) in self.times.items():
            forward = action.kind is Kind.FORWARD
            fill = _FORWARD if forward else _BACKWARD
            self.box("compute", start, end - start, fill, f"{action.kind}{action.micro_batch}")
            ticks = 4 if forward else 8
            for tick in range(ticks):
                x = _LEFT + (start + (tick + 0.5) * (end - start) / ticks) * _UNIT - 2
                self.canvas.box(x, self.rows["tensor"] + 3, 2.5, _LANE - 11, _INK["tensor"])

    def messages(self, actions: Sequence[Action]) -> None:
        y = self.rows["pipeline"] + 2
        for action in actions:
            if action.kind in _SENDS:
                _, end = self._of(_SENDS[action.kind], action.stage, action.micro_batch)
                self.canvas.box(_LEFT + end * _UNIT - 12, y, 11, _LANE - 9, _INK["pipeline"], "▸", size=10)
            elif action.kind in _TAKES:
                kind, way = _TAKES[action.kind]
                start, _ = self._of(kind, action.stage + way, action.micro_batch)
                self.canvas.box(_LEFT + start * _UNIT + 1, y, 11, _LANE - 9, FAINT, "◂", GREY, GREY, 10)

    def ending(self, last: float) -> None:
        """Draws reduction, norm, update and gather; `last` is when the last rank has computed.

        The reduction over the replicas of this rank begins before that.
        """
        own = max(end for _, end in self.times.values())
        self.box("replicas", own, 2, _INK["replicas"], "reduce")
        self.box("everyone", last + 2, 2, _INK["everyone"], "norm")
        self.box("compute", last + 4, 2, _INK["host"], "update")
        self.box("replicas", last + 6, 2, _INK["replicas"], "gather")

    def _of(self, kind: Kind, stage: int, micro_batch: int) -> tuple[float, float]:
        wanted = (kind, stage, micro_batch)
        return next(times for a, times in self.times.items() if (a.kind, a.stage, a.micro_batch) == wanted)
