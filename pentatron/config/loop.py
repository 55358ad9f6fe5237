"""When a run ends early, what is watched while it trains, and what is measured."""

from dataclasses import dataclass

from pentatron.config.setting import setting

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")


@dataclass(frozen=True)
class LoopConfig:
    """Early ends, checks, timers and profiles"""

    exit_interval: int | None = setting(None, "save and end at every multiple of so many steps")
    exit_duration_in_mins: float | None = setting(
        None, "save and end after so many minutes, the start included"
    )
    exit_signal_handler: bool = setting(
        False, "take --exit-signal for a wish: save and end with exit code 0 (without: 128 + its number)"
    )
    exit_signal: str = setting("SIGTERM", "the signal that --exit-signal-handler is about", choices=SIGNALS)
