"""The steps that a path means: a step itself, a folder of steps, or a run that has one."""

from pathlib import Path

from pentatron.checkpoint.manifest import FILE_NAME, DamagedCheckpoint, read_manifest, verify_files
from pentatron.checkpoint.store import TRACKER, CheckpointStore, Found, require_one_step
from pentatron.checkpoint.verifying import Check
from pentatron.errors import UserError

LATEST = "latest"
# What Megatron-LM leaves in one checkpoint, by the value of --ckpt-format that stands for it.
_OF_MEGATRON = {"torch_dist": (".metadata", "*.distcp"), "torch": ("mp_rank_*",)}


def checkpoints_of(run: Path) -> Path:
    """Where a run keeps its checkpoints unless it is told otherwise."""
    return run / "checkpoints"


def followed(path: Path) -> Path:
    """The step that a pointer names, if the path is one; else the path."""
    if path.name != LATEST or not path.is_file():
        return path
    named = pointed_at(path.parent)
    # A name from a file is not to be trusted with a path.
    step = path.parent / named
    return step if Path(named).name == named and is_step(step) else path


def pointed_at(steps: Path) -> str:
    """What `latest` says; nothing relies on it unless the user names it."""
    try:
        return (steps / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def is_step(path: Path) -> bool:
    return (path / FILE_NAME).is_file()


def steps_at(path: Path) -> Path | None:
    """The folder of steps that a path means: itself, or the checkpoints of a run; None: neither has any, not even damaged ones."""
    for folder in (path, checkpoints_of(path)):
        store = CheckpointStore(folder, keep=None)
        if store.steps() or store.damaged():
            return folder
    return None


def read_step(folder: Path, verify: bool, check: Check = verify_files) -> Found:
    """The step of this folder; with `verify`, its sums are compared, by `check`."""
    # What belongs to it lies beside it, also where it is named by a link or as the current folder.
    folder = folder.resolve()
    try:
        manifest = read_manifest(folder)
        require_one_step(folder, manifest)
        if verify:
            check(folder, manifest)
    except DamagedCheckpoint as damage:
        raise UserError(f"{damage}; name another step") from None
    return Found(folder, manifest)


def megatron_step(path: Path) -> tuple[Path, str] | None:
    """The checkpoint of Megatron-LM that a path means, and its format; nothing of it is read but the tracker."""
    for folder in (path, _newest_iteration(path)):
        if folder is None or not folder.is_dir():
            continue
        for name, patterns in _OF_MEGATRON.items():
            if any(next(folder.glob(pattern), None) for pattern in patterns):
                return folder, name
    return None


def _newest_iteration(path: Path) -> Path | None:
    try:
        said = (path / TRACKER).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        said = ""
    if said.isdecimal():
        return path / f"iter_{int(said):07d}"
    if said == "release":
        return path / said
    return max(path.glob("iter_" + "[0-9]" * 7), default=None)


def refuse_other_formats(path: Path) -> None:
    """Names what a folder holds that somebody may take for a checkpoint of ours, and what permits to read it."""
    found = megatron_step(path)
    if found is not None:
        kind = (
            "in its format torch_dist"
            if found[1] == "torch_dist"
            else "in its older format, one file for each rank"
        )
        raise UserError(
            f"{found[0]} is a checkpoint of Megatron-LM {kind}; such files hold pickle, so reading them must be permitted: add "
            f"--ckpt-format {found[1]} to pentatron train or export (they are read by a process apart that runs nothing of them)"
        )
    # Steps of ours leave that file too, beside a pointer of their own.
    if (path / TRACKER).is_file() and not (path / "latest").exists():
        raise UserError(
            f"{path / TRACKER} is of Megatron-LM, but {_newest_iteration(path)} holds no checkpoint; name the folder of one"
        )


def find_step(path: Path, check: Check | None = None) -> tuple[Found, list[str]]:
    """The step, or the newest one that is whole, and a sentence about each newer one that is not.

    Sums are not compared here, unless `check` does.
    """
    path = followed(path)
    if is_step(path):
        return read_step(path, check is not None, check or verify_files), []
    if not path.is_dir():
        raise UserError(f"the folder {path} does not exist; name a run, its checkpoints, or one step of them")
    store = CheckpointStore(steps_at(path) or path, keep=None)
    found, complaints = store.newest_valid(check is not None, set_aside=False, check=check or verify_files)
    if found is None:
        refuse_other_formats(path)
        nothing = "it is a Hugging Face folder" if (path / "config.json").exists() else "it has no step"
        reason = complaints[0] if complaints else nothing
        raise UserError(
            f"{store.folder} holds no usable checkpoint ({reason}); name a run, its checkpoints, or one step of them"
        )
    return found, complaints
