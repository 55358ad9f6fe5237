"""The steps that a path means: a step itself, a folder of steps, or a run that has one."""

from pathlib import Path

from pentatron.checkpoint.manifest import FILE_NAME, DamagedCheckpoint, read_manifest, verify_files
from pentatron.checkpoint.store import CheckpointStore, Found
from pentatron.config.errors import UserError

# What Megatron-LM leaves in a folder of checkpoints, or in one of them.
_OF_MEGATRON = ("latest_checkpointed_iteration.txt", "iter_*", "mp_rank_*", "*.distcp", ".metadata")


def checkpoints_of(run: Path) -> Path:
    """Where a run keeps its checkpoints unless it is told otherwise."""
    return run / "checkpoints"


def is_step(path: Path) -> bool:
    return (path / FILE_NAME).is_file()


def steps_at(path: Path) -> Path | None:
    """The folder of steps that a path means: itself, or the checkpoints of a run; None: neither has any, not even damaged ones."""
    for folder in (path, checkpoints_of(path)):
        store = CheckpointStore(folder, keep=None)
        if store.steps() or store.damaged():
            return folder
    return None


def read_step(folder: Path, verify: bool) -> Found:
    """The step of this folder; with `verify`, its sums are compared."""
    # What belongs to it lies beside it, also where it is named by a link or as the current folder.
    folder = folder.resolve()
    try:
        manifest = read_manifest(folder)
        if verify:
            verify_files(folder, manifest)
    except DamagedCheckpoint as damage:
        raise UserError(f"{damage}; name another step") from None
    return Found(folder, manifest)


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
    if is_step(path):
        return read_step(path, verify=False), []
    if not path.is_dir():
        raise UserError(f"the folder {path} does not exist; name a run, its checkpoints, or one step of them")
    store = CheckpointStore(steps_at(path) or path, keep=None)
    found, complaints = store.newest_valid(verify=False, set_aside=False)
    if found is None:
        refuse_other_formats(path)
        nothing = "it is a Hugging Face folder" if (path / "config.json").exists() else "it has no step"
        reason = complaints[0] if complaints else nothing
        raise UserError(
            f"{store.folder} holds no usable checkpoint ({reason}); name a run, its checkpoints, or one step of them"
        )
    return found, complaints
