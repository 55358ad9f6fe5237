"""How a run ends: at its last step, or before it because somebody or the clock says so."""

import time
from dataclasses import dataclass
from signal import Signals

from pentatron.config.run import RunConfig
from pentatron.parallel.collectives import largest
from pentatron.parallel.world import World
from pentatron.train.interrupt import StopRequest, signal_name

_BY_SIGNAL = 128
# Larger than any signal's number.
_LATE = 1000


@dataclass(frozen=True)
class Ending:
    """An end before the last step, the same on every rank. `line` is what Megatron's log says of it."""

    line: str
    reason: str
    exit_code: int = 0
    signal: Signals | None = None


class Endings:
    """Asked at the end of every step, and between the steps of an evaluation.

    `started`: when the first process of the run began, in seconds since the epoch.
    """

    def __init__(self, config: RunConfig, world: World, stop: StopRequest, started: float) -> None:
        self.config, self.world, self.stop, self.started = config.loop, world, stop, started

    def by_signal(self, number: Signals) -> Ending:
        wished = self.config.exit_signal_handler and number.name == self.config.exit_signal
        return Ending(
            f"exiting program after receiving {number.name}.",
            f"stopped by {signal_name(number)}",
            0 if wished else _BY_SIGNAL + number,
            number,
        )

    def after_step(self, step: int) -> Ending | None:
        """The clock before the number of steps, as Megatron decides. Every rank must ask."""
        if self.config.exit_duration_in_mins is not None and largest(self._is_late(), self.world.everyone):
            return self._by_the_clock()
        interval = self.config.exit_interval
        if interval is not None and step % interval == 0:
            return Ending(f"exiting program at iteration {step}", f"stopped (--exit-interval {interval})")
        return None

    def between_steps(self) -> Ending | None:
        """A reason to break off what is not a training step. Every rank must ask."""
        verdict = largest(int(self.stop.signal or _LATE * self._is_late()), self.world.everyone)
        if verdict == _LATE:
            return self._by_the_clock()
        return self.by_signal(Signals(verdict)) if verdict else None

    def _by_the_clock(self) -> Ending:
        minutes = (time.time() - self.started) / 60
        return Ending(
            f"exiting program after {minutes} minutes",
            f"stopped after {minutes:.1f} minutes (--exit-duration-in-mins {self.config.exit_duration_in_mins:g})",
        )

    def _is_late(self) -> int:
        limit = self.config.exit_duration_in_mins
        return int(limit is not None and time.time() - self.started > limit * 60)
