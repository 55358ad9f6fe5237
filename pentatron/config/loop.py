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
    check_for_nan_in_loss_and_grad: bool = setting(
        True, "stop before an update with numbers that are none (otherwise such a step is left out)"
    )
    rerun_mode: str = setting(
        "validate_results",
        "compute a step with numbers that are none again, to see whether that repeats and where it begins",
        choices=("disabled", "validate_results", "report_stats"),
        not_yet="statistics of repeated steps",
        available=("disabled", "validate_results"),
    )
    check_for_spiky_loss: bool = setting(False, "warn of a loss over ten times the largest one before")
    check_for_large_grads: bool = setting(
        False, "warn of a gradient norm over ten times the largest one before"
    )
    iterations_to_skip: tuple[int, ...] = setting(
        (), "steps, by their number in the log, whose samples are read but not trained on"
    )
