"""Whether this start is a restart: by our own launcher, by torchrun, or by Slurm that put the job back into the queue."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pentatron.cli.supervised import this_worker
from pentatron.train.attempts import Attempt, Launched, attempt_in

# Set by the launcher for its workers: the monotonic clock when the job began.
BEGAN = "PENTATRON_BEGAN"
_TORCHRUN = "TORCHELASTIC_RESTART_COUNT"


def this_attempt(environment: Mapping[str, str], run_dir: Path) -> Attempt:
    """This start of the job, as one of the run in the folder. Our own launcher knows itself whether its job has used the folder."""
    launchers: dict[str, Launched] = {}
    if _TORCHRUN in environment:
        launchers["torchrun"] = Launched(_elastic_job(environment), _count(environment, _TORCHRUN))
    if "SLURM_JOB_ID" in environment or "SLURM_RESTART_COUNT" in environment:
        launchers["slurm"] = Launched(
            environment.get("SLURM_JOB_ID"), _count(environment, "SLURM_RESTART_COUNT")
        )
    place = this_worker()
    if place is not None and place.restarts > 0:
        attempt = Attempt(True, launchers)
    else:
        attempt = attempt_in(run_dir, launchers)
    return replace(attempt, began=_began(environment) if place is not None else time.monotonic())


def _began(environment: Mapping[str, str]) -> float:
    """When our launcher began: a job that is restarted has one limit of time for all its attempts."""
    try:
        return float(environment[BEGAN])
    except (KeyError, ValueError):
        return time.monotonic()


def _elastic_job(environment: Mapping[str, str]) -> str | None:
    """What is the same in all restarts of one torchrun, and on all ranks, and in no other torchrun.

    On one machine: the folder it keeps for its workers' errors, which it makes anew each time it is called.
    """
    errors, local, world = (
        environment.get(name, "") for name in ("TORCHELASTIC_ERROR_FILE", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    )
    if errors and local == world:
        return str(Path(errors).parents[2])
    name = environment.get("TORCHELASTIC_RUN_ID", "none")
    if name != "none":
        return name
    point = [environment.get(part, "") for part in ("MASTER_ADDR", "MASTER_PORT")]
    return ":".join(point) if all(point) else None


def _count(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0").strip()
    return int(text) if text.isascii() and text.isdecimal() else 0
