"""What a run began with, compared with what `--load` names when it goes on."""

from pathlib import Path

from pentatron.checkpoint.bases import read_record
from pentatron.checkpoint.find import checkpoints_of, is_step
from pentatron.errors import UserError


def require_same_origin(checkpoints: Path, load: str) -> None:
    """Refuses to go on with a run whose weights come from something else than `--load` names."""
    record = read_record(checkpoints)
    origin = None if record is None else record.origin
    if origin is not None and _is_meant(origin, Path(load)):
        return
    began = "new weights" if origin is None else str(origin)
    raise UserError(
        f"the run in {checkpoints} began with {began}, and --load names {load}; leave --load out to go on with that run, choose "
        f"another --run-dir or --save for a new one, or start anew with --fresh"
    )


def _is_meant(origin: Path, load: Path) -> bool:
    """Whether the step or the folder that a run began with is what a path means now: a folder of steps may have newer ones since."""
    if _in_hub_cache(origin) is not None and _in_hub_cache(origin) == _in_hub_cache(load):
        return True
    if is_step(load):
        return origin.resolve() == load.resolve()
    return not {origin.resolve(), origin.resolve().parent}.isdisjoint(
        {load.resolve(), checkpoints_of(load).resolve()}
    )


def _in_hub_cache(path: Path) -> tuple[str, ...] | None:
    """Model and revision of a downloaded folder, wherever the cache lies."""
    parts = path.parts[-3:]
    return parts if len(parts) == 3 and parts[1] == "snapshots" else None
