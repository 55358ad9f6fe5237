"""How a run ends: at its last step, or before it because somebody or the clock says so."""

import time
from dataclasses import dataclass
from signal import Signals

from pentatron.parallel.collectives import largest
from pentatron.parallel.world import World
from pentatron.settings.run import RunConfig
from pentatron.supervise.signals import StopRequest, signal_name

_BY_SIGNAL = 128


@dataclass(frozen=True)
class Ending:
    """An end before the last step, the same on every rank. `line` is what Megatron's log says of it."""

    line: str
    reason: str
    exit_code: int = 0
    signal: Signals | None = None


class Endings:
    """Asked at the end of every step; by evaluations also, before each of theirs, about the clock.

    `began`: when the job began, in seconds of the monotonic clock: the time of day may be set while a run trains.
    """

    def __init__(self, config: RunConfig, world: World, stop: StopRequest, began: float) -> None:
        self.config, self.world, self.stop, self.began = config.loop, world, stop, began

    def by_signal(self, number: Signals) -> Ending:
        wished = self.config.exit_signal_handler and number.name == self.config.exit_signal
        return Ending(
            f"exiting program after receiving {number.name}.",
            "stopped as its launcher is gone"
            if self.stop.is_left_alone
            else f"stopped by {signal_name(number)}",
            0 if wished else _BY_SIGNAL + number,
            number,
        )

    def after_step(self, step: int) -> Ending | None:
        """The clock before the number of steps, as Megatron decides. Every rank must ask."""
        if (late := self.by_the_clock()) is not None:
            return late
        interval = self.config.exit_interval
        if interval is not None and step % interval == 0:
            return Ending(f"exiting program at iteration {step}", f"stopped (--exit-interval {interval})")
        return None

    def by_the_clock(self) -> Ending | None:
        """If it is late for any rank. Every rank must ask."""
        limit, minutes = self.config.exit_duration_in_mins, (time.monotonic() - self.began) / 60
        if limit is None or not largest(int(minutes > limit), self.world.everyone):
            return None
        return Ending(
            f"exiting program after {minutes} minutes",
            f"stopped after {minutes:.1f} minutes (--exit-duration-in-mins {limit:g})",
        )
