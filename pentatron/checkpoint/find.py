"""The step that a path means: a step itself, a folder of steps, or a run that has one."""

from pathlib import Path

from pentatron.checkpoint.manifest import FILE_NAME, DamagedCheckpoint, read_manifest
from pentatron.checkpoint.store import CheckpointStore, Found
from pentatron.config.errors import UserError


def find_step(path: Path) -> tuple[Found, list[str]]:
    """The step, or the newest one that is whole, and a sentence about each newer one that is not.

    Sums are not compared here.
    """
    if (path / FILE_NAME).is_file():
        try:
            return Found(path, read_manifest(path)), []
        except DamagedCheckpoint as damage:
            raise UserError(f"{damage}; name another step") from None
    if not path.is_dir():
        raise UserError(f"the folder {path} does not exist; name a run, its checkpoints, or one step of them")
    inside = path / "checkpoints"
    store = CheckpointStore(inside if inside.is_dir() else path, keep=None)
    found, complaints = store.newest_valid(verify=False, set_aside=False)
    if found is None:
        reason = complaints[0] if complaints else "it has no step"
        raise UserError(
            f"{store.folder} holds no usable checkpoint ({reason}); name a run, its checkpoints, or one step of them"
        )
    return found, complaints
