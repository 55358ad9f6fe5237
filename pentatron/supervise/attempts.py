"""Which start of a job this is: what tells a restart by a launcher from a command that is typed again."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pentatron.files import write_file
from pentatron.text import parse_json

FILE_NAME = "job.json"


@dataclass(frozen=True)
class Launched:
    """By a launcher that restarts jobs. `job`: its name for the job; None: it tells none. `restarts`: how often it restarted it so far."""

    job: str | None
    restarts: int


@dataclass(frozen=True)
class Attempt:
    """One start. `restarted`: the same job has used the run's folder before, so its run goes on. `began`: when the job began, in seconds of the
    monotonic clock of this machine; None: not recorded."""

    restarted: bool = False
    launchers: Mapping[str, Launched] = field(default_factory=dict)
    began: float | None = None


FIRST = Attempt()


def attempt_in(folder: Path, launchers: Mapping[str, Launched]) -> Attempt:
    """What this start is to the folder of a run. A launcher counts restarts of a job; the folder says whether that job used it."""
    return Attempt(any(_is_restart(folder, name, now) for name, now in launchers.items()), launchers)


def _is_restart(folder: Path, launcher: str, now: Launched) -> bool:
    if now.restarts == 0:
        return False
    recorded = _read(folder)
    before = None if recorded is None else recorded.get(launcher)
    if recorded is None or now.job is None:
        # Nothing tells the folder's job from this one: a restart goes on.
        return before is None or before.restarts < now.restarts
    # Otherwise the folder holds an earlier run, which this job has not met yet, or one that this start itself began.
    return before is not None and before.job == now.job and before.restarts < now.restarts


def write_job(folder: Path, attempt: Attempt | None, foreign: Sequence[str]) -> None:
    """Records in the run's folder, which must be ours, which start of which job uses it (None: not told), and what no run made there."""
    launchers = (
        None if attempt is None else {n: asdict(launched) for n, launched in attempt.launchers.items()}
    )
    said = {**({} if launchers is None else {"launchers": launchers}), "foreign": list(foreign)}
    write_file(folder / FILE_NAME, f"{json.dumps(said)}\n".encode())


def recorded_job(folder: Path) -> dict[str, Any] | None:
    """What runs recorded in the folder; None: nothing, or a file of this name is not theirs."""
    path = folder / FILE_NAME
    try:
        found = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("foreign"), list) else None


def recorded_foreign(folder: Path) -> list[str]:
    """Paths below the folder that were there before a run first used it, or that no run made."""
    recorded = recorded_job(folder)
    return [] if recorded is None else [name for name in recorded["foreign"] if isinstance(name, str)]


def _read(folder: Path) -> dict[str, Launched] | None:
    """None: no start was recorded, or not by a file that can be read."""
    try:
        found = (recorded_job(folder) or {})["launchers"]
        return {str(name): Launched(**launched) for name, launched in found.items()}
    except (KeyError, TypeError, AttributeError):
        return None
