"""Recognizes restarts of a job by a launcher, such as torchrun or Slurm, as opposed to a repeated command."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pentatron.files import write_file
from pentatron.text import parse_json

JOB_FILE = "job.json"


@dataclass(frozen=True)
class LauncherState:
    """A start by a launcher that restarts jobs.

    `job`: its job ID, None if it has none. `restarts`: how often it has restarted the job.
    """

    job: str | None
    restarts: int


@dataclass(frozen=True)
class Attempt:
    """One start of a job.

    `restarted`: the job has used the run folder before and resumes its run. `began`: start of the job on this
    machine's monotonic clock, if known.
    """

    restarted: bool = False
    launchers: Mapping[str, LauncherState] = field(default_factory=dict)
    began: float | None = None


FIRST_ATTEMPT = Attempt()


def identify_attempt(folder: Path, launchers: Mapping[str, LauncherState]) -> Attempt:
    """Compares the job ID and restart count of the launchers with those recorded in the run folder."""
    return Attempt(any(_is_restart(folder, name, now) for name, now in launchers.items()), launchers)


def _is_restart(folder: Path, launcher: str, now: LauncherState) -> bool:
    if now.restarts == 0:
        return False
    recorded = _recorded_launchers(folder)
    before = None if recorded is None else recorded.get(launcher)
    if recorded is None or now.job is None:
        # The jobs cannot be distinguished: it counts as a restart.
        return before is None or before.restarts < now.restarts
    # With another job ID the folder holds an earlier run; with an equal count this start itself created it.
    return before is not None and before.job == now.job and before.restarts < now.restarts


def write_job(folder: Path, attempt: Attempt | None, foreign: Sequence[str]) -> None:
    """Records the attempt and the `foreign` files, which no run made, in the locked run folder."""
    known = {} if attempt is None else {"launchers": {n: asdict(s) for n, s in attempt.launchers.items()}}
    write_file(folder / JOB_FILE, f"{json.dumps({**known, 'foreign': list(foreign)})}\n".encode())


def recorded_job(folder: Path) -> dict[str, Any] | None:
    """Returns the content of job.json; None without one, or if it is not the file of a run."""
    path = folder / JOB_FILE
    try:
        content = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and isinstance(content.get("foreign"), list) else None


def recorded_foreign(folder: Path) -> list[str]:
    """Returns the recorded relative paths of files that no run made."""
    recorded = recorded_job(folder)
    return [name for name in recorded["foreign"] if isinstance(name, str)] if recorded else []


def _recorded_launchers(folder: Path) -> dict[str, LauncherState] | None:
    try:
        launchers = (recorded_job(folder) or {})["launchers"]
        return {str(name): LauncherState(**launched) for name, launched in launchers.items()}
    except (KeyError, TypeError, AttributeError):
        return None
