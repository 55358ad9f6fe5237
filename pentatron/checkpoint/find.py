"""The step that a path means: a step itself, a folder of steps, or a run that has one."""

from pathlib import Path

from pentatron.checkpoint.manifest import FILE_NAME, DamagedCheckpoint, read_manifest
from pentatron.checkpoint.store import CheckpointStore, Found
from pentatron.config.errors import UserError

# What Megatron-LM leaves in a folder of checkpoints, or in one of them.
_OF_MEGATRON = ("latest_checkpointed_iteration.txt", "iter_*", "mp_rank_*", "*.distcp", ".metadata")


def refuse_other_formats(path: Path) -> None:
    """Names what a folder holds that somebody may take for a checkpoint of ours."""
    if path.is_dir() and any(next(path.glob(pattern), None) for pattern in _OF_MEGATRON):
        raise UserError(
            f"{path} holds checkpoints in a format of Megatron-LM, which is not read here; convert them to a Hugging Face folder with "
            f"its tools, and load that (--load HF_DIR) or import it (pentatron import HF_DIR OUT)"
        )


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
        refuse_other_formats(path)
        reason = complaints[0] if complaints else "it has no step"
        raise UserError(
            f"{store.folder} holds no usable checkpoint ({reason}); name a run, its checkpoints, or one step of them"
        )
    return found, complaints
