"""Stop reasons of a run before its last step: a signal, --exit-interval or --exit-duration-in-mins."""

import time
from dataclasses import dataclass
from signal import Signals

from pentatron.parallel.collectives import largest
from pentatron.parallel.world import World
from pentatron.settings.run_config import RunConfig
from pentatron.supervise.signals import StopRequest, signal_name

# A shell reports a process that ended by signal N with exit code 128 + N.
_BY_SIGNAL = 128


@dataclass(frozen=True)
class StopReason:
    """Why a run stops before its last step; equal on all ranks. `line` is the line of Megatron's log."""

    line: str
    reason: str
    exit_code: int = 0
    signal: Signals | None = None


class StopConditions:
    """Checks the stop conditions after every step, and before every step of an evaluation.

    `began`: start of the job on the monotonic clock, which a change of the system time does not affect.
    """

    def __init__(self, config: RunConfig, world: World, stop: StopRequest, began: float) -> None:
        self.config, self.world, self.stop, self.began = config.loop, world, stop, began

    def by_signal(self, number: Signals) -> StopReason:
        is_expected = self.config.exit_signal_handler and number.name == self.config.exit_signal
        how = "as its launcher is gone" if self.stop.is_orphaned else f"by {signal_name(number)}"
        line, code = f"exiting program after receiving {number.name}.", _BY_SIGNAL + number
        return StopReason(line, f"stopped {how}", 0 if is_expected else code, number)

    def after_step(self, step: int) -> StopReason | None:
        """Checks the time limit first, then the step interval, as Megatron does. Collective."""
        if (ending := self.by_time_limit()) is not None:
            return ending
        interval = self.config.exit_interval
        if interval is not None and step % interval == 0:
            return StopReason(f"exiting program at iteration {step}", f"stopped (--exit-interval {interval})")
        return None

    def by_time_limit(self) -> StopReason | None:
        """Checks --exit-duration-in-mins: all ranks stop if it has passed on one. Collective."""
        limit, minutes = self.config.exit_duration_in_mins, (time.monotonic() - self.began) / 60
        if limit is None or not largest(int(minutes > limit), self.world.all_ranks):
            return None
        reason = f"stopped after {minutes:.1f} minutes (--exit-duration-in-mins {limit:g})"
        return StopReason(f"exiting program after {minutes} minutes", reason)
