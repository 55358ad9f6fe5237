"""When a run ends early, what is watched while it trains, and what is measured."""

from dataclasses import dataclass
from typing import ClassVar

from pentatron.config.limits import ABOVE_ZERO, ZERO_OR_MORE
from pentatron.config.needs.run import (
    EXIT_SIGNAL_HANDLER,
    MANUAL_GC,
    no_loss_scale_search,
    replicas_to_compare,
    steps_within_the_run,
    stop_at_nan,
)
from pentatron.config.setting import FREE, OnResume, setting

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")


@dataclass(frozen=True)
class LoopConfig:
    """Early ends, checks, timers and profiles"""

    on_resume: ClassVar[OnResume] = FREE

    exit_interval: int | None = setting(
        None, "save and end at every multiple of so many steps", limit=ABOVE_ZERO
    )
    exit_duration_in_mins: float | None = setting(
        None, "save and end after so many minutes, the start included", limit=ABOVE_ZERO
    )
    exit_signal_handler: bool = setting(
        False, "take --exit-signal for a wish: save and end with exit code 0 (without: 128 + its number)"
    )
    exit_signal: str = setting(
        "SIGTERM",
        "the signal that --exit-signal-handler is about",
        choices=SIGNALS,
        needs=EXIT_SIGNAL_HANDLER,
    )
    check_for_nan_in_loss_and_grad: bool = setting(
        True,
        "stop before an update with numbers that are none (otherwise such a step is left out)",
        needs=no_loss_scale_search,
    )
    rerun_mode: str = setting(
        "validate_results",
        "compute a step with numbers that are none again, to see whether that repeats and where it begins",
        choices=("disabled", "validate_results", "report_stats"),
        not_yet="statistics of repeated steps",
        available=("disabled", "validate_results"),
        needs=stop_at_nan,
    )
    check_for_spiky_loss: bool = setting(False, "warn of a loss over ten times the largest one before")
    check_for_large_grads: bool = setting(
        False, "warn of a gradient norm over ten times the largest one before"
    )
    iterations_to_skip: tuple[int, ...] = setting(
        (),
        "steps, by their number in the log, whose samples are read but not trained on",
        limit=ABOVE_ZERO,
        needs=steps_within_the_run,
    )
    check_weight_hash_across_dp_replicas_interval: int | None = setting(
        None,
        "steps between comparisons of the weights that several ranks hold (never)",
        limit=ABOVE_ZERO,
        needs=replicas_to_compare,
    )
    timing_log_level: int = setting(
        0,
        "which parts of a step are timed: 0 none, 1 the large ones, 2 computing and messages",
        choices=(0, 1, 2),
    )
    timing_log_option: str = setting(
        "minmax", "of the ranks' times: the largest, both ends, or all", choices=("max", "minmax", "all")
    )
    manual_gc: bool = setting(False, "collect Python's garbage at chosen steps, on all ranks together")
    manual_gc_interval: int = setting(
        0, "steps between collections (0: before the first step alone)", limit=ZERO_OR_MORE, needs=MANUAL_GC
    )
    manual_gc_eval: bool = setting(True, "collect around each evaluation too", needs=MANUAL_GC)
    enable_one_logger: bool = setting(
        False,
        "NVIDIA's one-logger",
        sets={"--no-one-logger": False},
        notice="the package is not part of this program; app_metrics.json has the times it would report",
    )
    retro_project_dir: str | None = setting(
        None, "retrieval data", notice="models with retrieval are not built here, so this changes nothing"
    )
    retro_cyclic_train_iters: int | None = setting(
        None,
        "samples before the data begins again",
        notice="data begins again by itself where it ends (--dataloader-type), so this changes nothing",
        limit=ABOVE_ZERO,
    )
