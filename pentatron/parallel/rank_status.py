"""Progress of this rank: its step, its phase, and the collective it waits in.

The training thread writes with plain assignments; another thread reads periodically and publishes the status
(supervise/heartbeat.py).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any


@dataclass(frozen=True)
class PendingCall:
    """A collective or message that this rank waits for.

    `number` counts the collectives of a group from 1; messages have number 0. `size` is in elements.
    """

    what: str
    group: str
    number: int
    size: int

    def __str__(self) -> str:
        which = f"#{self.number} " if self.number else ""
        return f"{self.what} {which}of {self.group} ({self.size} elements)"


@dataclass(eq=False)
class RankStatus:
    """Progress of this rank.

    `step` is the last completed step, `calls` counts all collectives and messages, `counts` the collectives
    of each group.
    """

    step: int = 0
    # The step from which the run started or resumed.
    began: int = 0
    phase: str = "starting"
    calls: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    waits_in: PendingCall | None = None
    # Whether this run has taken the lock of its folder.
    opened: bool = False
    # Seconds of the first step, which compiles and fills caches, and of the longest later one.
    first_step: float = 0.0
    longest_step: float = 0.0
    on_step_done: Callable[[], None] | None = None
    on_opened: Callable[[], None] | None = None

    @property
    def place(self) -> tuple[int, str, int]:
        """Position in the run; it changes as long as the rank makes progress."""
        return self.step, self.phase, self.calls

    def run_folder_locked(self) -> None:
        self.opened = True
        if self.on_opened is not None:
            self.on_opened()

    def begin_at(self, step: int) -> None:
        """Called when the run starts or resumes after this step."""
        self.began, self.first_step = step, 0.0
        self.step_done(step, 0.0)

    def step_done(self, step: int, seconds: float) -> None:
        """Called after a step that took `seconds`; 0 for a skipped one."""
        self.step = step
        if self.first_step:
            self.longest_step = max(self.longest_step, seconds)
        else:
            self.first_step = seconds
        if self.on_step_done is not None:
            self.on_step_done()

    def enter(self, what: str, group: str, size: int) -> PendingCall:
        """Counts a collective; every rank of the group must begin the same one with the same number."""
        number = self.counts.get(group, 0) + 1
        self.counts[group] = number
        self.calls += 1
        return PendingCall(what, group, number, size)

    @contextmanager
    def inside(self, call: PendingCall | None) -> Iterator[None]:
        """Around the waiting for a collective or a message."""
        before = self.waits_in
        self.waits_in = call or before
        try:
            yield
        finally:
            self.waits_in = before
            self.calls += 1

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def to_json(self) -> dict[str, Any]:
        call = self.waits_in
        status = {name: value for name, value in vars(self).items() if not name.startswith("on_")}
        # Copied, as the training thread adds groups.
        return status | {"counts": dict(self.counts), "waits_in": call and list(astuple(call))}
