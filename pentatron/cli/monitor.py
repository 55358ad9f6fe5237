"""`pentatron monitor [RUN_DIR]`: shows the state of a running, finished or crashed run from the files in its
folder."""

import contextlib
import math
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.cli.options import Options, option, options_help, parse_options, usage
from pentatron.cli.output import say, say_unescaped, with_help
from pentatron.errors import UserError
from pentatron.monitor.metrics import MetricsFollower, RunMetrics
from pentatron.monitor.report import ERROR_PREFIX
from pentatron.monitor.view import RunStatus, Screen, render_view, seconds_per_step, status_line
from pentatron.settings.declaration import Limit
from pentatron.settings.run_config import all_settings
from pentatron.settings.run_length import batch_plan_of
from pentatron.settings.settings import Settings
from pentatron.text import duration, format_count, parse_json

_SECONDS = Limit(lambda seconds: seconds > 0, "a number of seconds above 0")


@dataclass(frozen=True)
class MonitorOptions(Options):
    interval: float = option(5.0, "seconds between updates", value="SECONDS", limit=_SECONDS)
    once: bool = option(False, "print the state once and exit")


USAGE = f"""{usage("pentatron monitor [RUN_DIR]", MonitorOptions)}

Shows the state of a run until it ends or you press Ctrl-C: loss curve and validations, speed, time left, busy time and memory
of every rank, stragglers, the last checkpoint. If the output is not a terminal, prints one line per update. A run that has
ended is shown once. Without RUN_DIR, shows the newest run under runs/ and output_*/.

{options_help(MonitorOptions)}

A rank is busy while it does not wait for others in collectives or for pipeline messages. Waiting is excluded because otherwise
all ranks would seem as slow as the slowest one. Both are measured in logged steps (--log-interval).
"""
State = tuple[RunStatus, RunMetrics]
_ENDED = ("finished", "stopped", "crashed")
# A run without a new step for the time of this many steps, and at least this many seconds, is called silent.
_SILENT_STEPS, _SILENT_SECONDS = 20, 120.0
# Last lines of the log that are searched for the stop reason or the failure.
_LAST_LINES = 10
_HOME, _REST_OF_LINE, _REST_OF_SCREEN, _CLEAR = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[2J"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


@with_help(USAGE)
def monitor_command(words: Sequence[str]) -> int:
    options, plain = parse_options(MonitorOptions, words, "pentatron monitor")
    if len(plain) > 1:
        raise UserError(f"pentatron monitor shows one run; leave out {plain[1]}")
    folder = Path(plain[0]) if plain else newest_run(Path())
    follower = MetricsFollower(folder / "metrics.jsonl")
    if not folder.is_dir():
        ways = "name a run folder, or leave it out for the newest run under runs/"
        raise UserError(f"the folder {folder} does not exist; {ways}")
    if not follower.path.exists():
        raise UserError(f"{folder} has no metrics.jsonl; name a run folder")
    try:
        run, metrics = next(_states(folder, follower, options.interval))
        if options.once or run.state in _ENDED:
            say_unescaped("\n".join(render_view(run, metrics, _screen())))
        elif sys.stdout.isatty():
            _redraw_until_end(_states(folder, follower, options.interval))
        else:
            say(f"watching {folder}")
            _print_until_end(_states(folder, follower, options.interval))
    except KeyboardInterrupt:
        # Ctrl-C ends the monitor, not the run.
        say("")
    return 0


def _states(folder: Path, follower: MetricsFollower, interval: float) -> Iterator[State]:
    """Yields the state of the run at every update, the last time when it has ended."""
    while True:
        metrics = follower.poll()
        run = read_run_status(folder, metrics)
        yield run, metrics
        if run.state in _ENDED:
            return
        time.sleep(interval)


def _redraw_until_end(states: Iterable[State]) -> None:
    out = sys.stdout
    out.write(_CLEAR + _HIDE_CURSOR)
    try:
        for run, metrics in states:
            lines = render_view(run, metrics, _screen())
            if run.state not in _ENDED:
                lines += ["", "Ctrl-C ends the monitor; the run continues"]
            frame = f"{_REST_OF_LINE}\n".join(lines[: max(1, _screen().height - 1)])
            out.write(f"{_HOME}{frame}{_REST_OF_LINE}\n{_REST_OF_SCREEN}")
            out.flush()
    finally:
        out.write(_SHOW_CURSOR)
        out.flush()


def _print_until_end(states: Iterable[State]) -> None:
    shown = -1
    for run, metrics in states:
        if metrics.recent and metrics.step != shown:
            shown = metrics.step
            say(status_line(run, metrics))
        if run.state in _ENDED:
            say_unescaped("\n".join(["", *render_view(run, metrics, _screen())]))


def _screen() -> Screen:
    size = shutil.get_terminal_size((100, 40))
    on_terminal = sys.stdout.isatty()
    colours = on_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    is_unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return Screen(min(size.columns, 140), size.lines if on_terminal else 40, colours, is_unicode)


def newest_run(root: Path) -> Path:
    """Returns the run whose metrics were written last."""
    metrics = [*root.glob("runs/*/metrics.jsonl"), *root.glob("output_*/metrics.jsonl")]
    if not metrics:
        ways = "name its folder: pentatron monitor RUN_DIR"
        raise UserError(f"no run was found under runs/ or output_*/; {ways}")
    return max(metrics, key=lambda path: path.stat().st_mtime).parent


def read_run_status(folder: Path, metrics: RunMetrics) -> RunStatus:
    """Reads the state of the run from its files."""
    saved = _saved_settings(folder)
    total = saved.train_iters
    if not isinstance(total, int):
        file = folder / "config.yaml"
        raise UserError(f"{file} does not have train_iters; name a run folder")
    checkpoint, samples_left = _checkpoint(folder, saved), _samples_left(saved, metrics, total)
    state = _state(folder, metrics, total)
    return RunStatus(str(folder), *state, total, checkpoint, samples_left, _restarts(folder))


def _restarts(folder: Path) -> str:
    """Formats the number of restarts and the reason of the last one; empty if restarts.jsonl is missing or
    unreadable."""
    rows: list[Any] = []
    try:
        for line in (folder / "restarts.jsonl").read_bytes().splitlines():
            # Lines may be truncated or damaged.
            with contextlib.suppress(ValueError):
                rows.append(parse_json(line))
        last, lost = rows[-1], sum(row["steps_lost"] for row in rows)
        return f"{len(rows)}, {format_count(lost, 'step')} lost; the last: rank {last['rank']} {last['how']} after step {last['after_step']}"
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return ""


def _saved_settings(folder: Path) -> Settings:
    """Reads the settings from config.yaml; does not need a YAML parser, because every value is JSON on one
    line."""
    path = folder / "config.yaml"
    values: dict[str, Any] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        name, _, value = line.strip().lstrip("# ").partition(": ")
        if name in all_settings():
            # The file may have been edited.
            with contextlib.suppress(ValueError):
                values[name] = parse_json(value.split("  #")[0])
    return Settings.defaults(**values)


def _samples_left(saved: Settings, metrics: RunMetrics, total: int) -> int | None:
    """Returns the samples of the remaining steps by the batch plan; None if the files do not have the
    information."""
    consumed = metrics.recent[-1].get("consumed_samples") if metrics.recent else None
    if not isinstance(consumed, int) or not saved.global_batch_size:
        return None
    with contextlib.suppress(ValueError, TypeError):
        return batch_plan_of(saved).advance(consumed, max(0, total - metrics.step)) - consumed
    return None


def _state(folder: Path, metrics: RunMetrics, total: int) -> tuple[str, str]:
    """Returns the state of the run, and a line of details if there are any."""
    is_done, alive = metrics.step >= total, _is_alive(folder)
    if is_done and _has_closing_line(folder):
        return "finished", ""
    if alive is False:
        return _end_state(folder, metrics)
    silence = time.time() - (folder / "metrics.jsonl").stat().st_mtime
    timeout = max(_SILENT_SECONDS, _SILENT_STEPS * seconds_per_step(metrics)) if metrics.recent else math.inf
    if silence > timeout:
        unknown = "its process cannot be checked from this machine"
        return "silent", f"no step for {duration(silence)}; {'its process is alive' if alive else unknown}"
    remark = "all steps are done; the final checkpoint or evaluation is not complete"
    return "running", remark if is_done else ""


def _log_lines(folder: Path) -> list[str]:
    log = folder / "train.log"
    return log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []


def _has_closing_line(folder: Path) -> bool:
    """Whether the log of a run has its closing line, which names the run folder, after the last step. A
    folder without a log has metrics only."""
    lines = _log_lines(folder)
    for line in reversed(lines):
        if line.startswith("run folder: "):
            return True
        if "] iteration " in line:
            return False
    return not lines


def _is_alive(folder: Path) -> bool | None:
    """Whether the process that holds the lock of the run folder is alive; None if that is unknown, as on
    another machine."""
    try:
        owner = parse_json((folder / ".lock").read_text(encoding="utf-8"))
        # For a number below 1, os.kill() would signal a process group.
        if owner["host"] != socket.gethostname() or owner["pid"] < 1:
            return None
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # The process exists and belongs to another user.
        return True
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return True


def _end_state(folder: Path, metrics: RunMetrics) -> tuple[str, str]:
    """Returns the state of a run whose process is gone, with the stop reason or the failure from its log."""
    for line in reversed(_log_lines(folder)[-_LAST_LINES:]):
        if f"after step {metrics.step};" in line or "before the first step;" in line:
            return "stopped", line.strip()
        if line.startswith(ERROR_PREFIX):
            return "crashed", line.strip()
    log = folder / "train.log"
    ended = f"it ended after step {metrics.step} without a message in {log}"
    return "crashed", f"{ended}: it failed or was killed"


def _checkpoint(folder: Path, saved: Settings) -> str:
    folders = [Path(str(saved.save))] if saved.save else []
    for parent in [*folders, folder / "checkpoints"]:
        pointer = parent / "latest"
        with contextlib.suppress(OSError):
            text = pointer.read_text(encoding="utf-8", errors="replace") if pointer.is_file() else ""
            if name := text.strip().replace("\0", ""):
                age = duration(max(0.0, time.time() - pointer.stat().st_mtime))
                return f"{parent / name}, saved {age} ago"
    return "none yet"
