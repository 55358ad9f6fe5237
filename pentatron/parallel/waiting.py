"""How long this rank stands still for others, measured where it does: in collectives and for messages.

A rank that is slow makes all others wait in the next collective, so the time of a step is nearly the same on all of
them; without the waiting it shows who is slow. On a CPU the caller itself stands still and its clock is read. On a GPU
the caller only queues work; there an event before and one after, on the stream that computes, tell how long that
stream stood still. Communication that runs beside computation costs nothing and is not counted.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pentatron.parallel.whereabouts import Call, Whereabouts

# Messages are those between the stages of a pipeline; waiting for one includes the bubble.
Cause = Literal["collective", "message"]


@dataclass(frozen=True)
class Waited:
    """Seconds."""

    collectives: float
    messages: float

    @property
    def seconds(self) -> float:
        return self.collectives + self.messages


class Waits:
    """Counts between `begin` and `end`; at other times nothing is measured and nothing is kept.

    `whereabouts` is told of every wait, at all times: somebody may want to know for whom this rank waits.
    """

    def __init__(self, whereabouts: Whereabouts | None = None) -> None:
        self.whereabouts = whereabouts or Whereabouts()
        self._counting = False
        # Inside a wait that is counted already.
        self._inside = False
        self._seconds: dict[Cause, float] = {"collective": 0.0, "message": 0.0}
        self._events: list[tuple[Cause, Any, Any]] = []

    def begin(self) -> None:
        self._counting = True
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._events.clear()

    def end(self) -> Waited:
        """On a GPU, waits until what was counted has happened."""
        self._counting = False
        for cause, before, after in self._events:
            after.synchronize()
            self._seconds[cause] += before.elapsed_time(after) / 1000
        self._events.clear()
        return Waited(self._seconds["collective"], self._seconds["message"])

    @contextmanager
    def standing(
        self, device: torch.device, cause: Cause = "collective", call: Call | None = None
    ) -> Iterator[None]:
        """Around whatever may have to wait; `device` is where the tensor lies that travels."""
        with self.whereabouts.inside(call):
            if self._counting and not self._inside:
                with self._counted(device, cause):
                    yield
            else:
                yield

    @contextmanager
    def _counted(self, device: torch.device, cause: Cause) -> Iterator[None]:
        self._inside = True
        try:
            if device.type == "cuda":
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                before.record()
                yield
                after.record()
                self._events.append((cause, before, after))
            else:
                started = time.perf_counter()
                yield
                self._seconds[cause] += time.perf_counter() - started
        finally:
            self._inside = False
