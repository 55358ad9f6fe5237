"""Opens the folders of a run: checks and locks them, moves an earlier run aside, and checks the disk space.

Only files of runs are moved. `job.json` records which files were there before a run first used the folder;
these, and files without a name that runs use, stay. The folder itself is never renamed, so that its lock is
held from before the move to the end of the run.
"""

import contextlib
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pentatron.checkpoint.format import rank_local_fragments
from pentatron.checkpoint.lock import LOCK_FILE, FolderLock, lock_folder
from pentatron.checkpoint.state import TrainState
from pentatron.checkpoint.store import CheckpointStore
from pentatron.errors import FolderLost, UserError
from pentatron.files import free_bytes, fsync_folder, next_numbered_name, rename
from pentatron.monitor.display import Display
from pentatron.optim.build import AnyOptimizer
from pentatron.parallel.collectives import gather_objects, run_on_some_ranks
from pentatron.settings.files import paths_in_run, saved_values
from pentatron.settings.run_config import RunConfig
from pentatron.settings.settings import Settings, Start, is_inside
from pentatron.supervise.attempts import JOB_FILE, Attempt, recorded_foreign, recorded_job, write_job
from pentatron.text import binary_size
from pentatron.train.checkpoints import random_state
from pentatron.train.model import ParallelModel
from pentatron.train.run_folder import RunFolder, damaged_config, is_run_config

_STEP = r"(?:step-\d{8,}|iter_\d{7,})"
# Files that a run overwrites.
_REPLACED = re.compile(
    r"metrics\.jsonl|app_metrics\.json|loss\.svg|sample\.txt|performance_summary\.json|job\.json|config\.yaml"
)
# Files that a run appends to, and a launcher too, before the run has opened its folder.
_APPENDED = re.compile(r"train\.log|restarts\.jsonl|progress\.txt|hang-\d+(?:-\d+)?\.txt")
_OTHER_FILES = re.compile(
    r"metrics\.\d+\.jsonl|(?:config\.yaml|metrics\.jsonl)\.damaged-\d+|latest|latest_checkpointed_iteration\.txt|began-from\.json|"
    r"\.lock(?:\.\w+)?|\.latest\.\w+|\.writable"
)
# Partial files of a process that was killed while it wrote.
_PARTIAL = re.compile(r"(?:config\.yaml|metrics\.jsonl|job\.json|began-from\.json)\.\d+\.tmp")
_STEPS = re.compile(rf"(?:\.|\.replaced-)?{_STEP}.*")
_UNFINISHED = re.compile(rf"\.(?:replaced-)?{_STEP}.*|\.huggingface\.[0-9a-f]{{8}}")
# Files that only this package writes into a step.
_OF_OUR_STEPS = ("manifest.json", "rank-*.safetensors", "weights-*.safetensors")
# Entries of the folders that a run creates beside its steps.
_INSIDE = {
    "ranks": re.compile(r"rank-\d+.*|hang-.*"),
    "memory": re.compile(r"rank-\d+\.csv"),
    "profile": re.compile(r"rank-\d+\.json"),
    "data": re.compile(
        r"\.lock|order|tokenizer\.json|corpus\.json|python_text_document.*|sft-[0-9a-f]{16}.*|\..*"
    ),
    "huggingface": re.compile(
        r"(?:config|generation_config|tokenizer|vocab|merges|special_tokens|added_tokens|chat_template).*|.*\.(?:model|tiktoken)"
    ),
}
_CHECKPOINTS = "checkpoints"


@dataclass
class FolderLocks:
    """Locks of the folders of a run. Only the first rank holds any."""

    locks: list[FolderLock] = field(default_factory=list)

    def require(self, thorough: bool = True) -> None:
        """Raises `FolderLost` if a lock was lost. Called before anything is written."""
        for lock in self.locks:
            lock.require(thorough)

    def are_held(self) -> bool:
        """Whether all locks are held, without an error: `require` stops all ranks a little later."""
        try:
            self.require(thorough=False)
        except FolderLost:
            return False
        return True


def open_folders(
    config: RunConfig,
    folder: RunFolder,
    start: Start,
    attempt: Attempt,
    display: Display,
    cleanup: contextlib.ExitStack,
) -> FolderLocks:
    """Creates and locks the run folder and the checkpoint folder until the end of the run."""
    run, save = folder.path.resolve(), Path(config.checkpoint.save).resolve()
    if save != run and start is not Start.NEW and CheckpointStore(folder.path, keep=None).steps():
        # A run with --save alone has its log and its checkpoints in that folder.
        raise UserError(
            f"{folder.path} contains checkpoints itself, of a run with --save {folder.path}; give --save instead of --run-dir to resume it, "
            f"or choose another --run-dir"
        )
    if start is Start.NEW:
        _require_harmless(run, save)
    data = config.data
    paths = (*data.data_path, *data.train_data_path, *data.valid_data_path, *data.test_data_path)
    inputs = [path for path in (*paths, data.tokenizer_model, data.vocab_file, data.merge_file) if path]
    _inspect(run, save, start, inputs)
    writes_steps = config.checkpoint.save_checkpoints or save.exists()
    folder.create()
    if writes_steps and save != run:
        RunFolder(Path(config.checkpoint.save)).create()
    opened, places = FolderLocks(), {run: "--run-dir"}
    if writes_steps:
        places.setdefault(save, "--save")
    if start is Start.NEW and (run / _CHECKPOINTS).is_dir():
        # Locked because it is moved aside: another job may be saving there.
        places.setdefault((run / _CHECKPOINTS).resolve(), "--save")
    try:
        for place, flag in places.items():
            lock = lock_folder(place, display.say, f"stop it, or choose another {flag}")
            opened.locks.append(cleanup.enter_context(lock))
        # Again under the locks: another job may have changed the folders since.
        inspected = _inspect(run, save, start, inputs)
    except UserError:
        for taken in opened.locks:
            taken.remove_if_created()
        raise
    contents, foreign = inspected[0], recorded_foreign(run)
    for entry in contents.others if contents.holds_run else ():
        if _PARTIAL.fullmatch(entry.name) and entry.name not in foreign and entry.parent == run:
            entry.unlink()
    if start is Start.NEW:
        for line in _move_aside(inspected):
            display.say(line)
    if (damage := damaged_config(folder.config)) is not None:
        renamed = next_numbered_name(folder.config, ".damaged-")
        rename(folder.config, renamed)
        display.say(
            f"note: {folder.config} is damaged ({damage}); it was renamed to {renamed.name}, and is written again"
        )
    if not config.train.skip_train or not (run / JOB_FILE).exists():
        foreign = [str(path.relative_to(run)) for path in contents.others if path.exists()]
        write_job(run, None if config.train.skip_train else attempt, foreign)
    store = CheckpointStore(Path(config.checkpoint.save), keep=None)
    if start is Start.IN_PLACE and not config.train.skip_train and store.steps():
        # Existing steps are recorded as an earlier run's, so that an early restart does not resume them.
        store.start_new_run()
    return opened


# --- contents of a folder ---


@dataclass(frozen=True)
class Contents:
    """Entries of a folder.

    `holds_run`: whether a run has used it. `made`: files of runs, also in subfolders, with steps first.
    `others`: entries that no run made.
    """

    folder: Path
    holds_run: bool
    made: tuple[Path, ...]
    others: tuple[Path, ...]


def list_contents(folder: Path, save: Path | None = None) -> Contents:
    """Lists a folder. `save`: the checkpoint folder, which is listed too if it lies inside."""
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    below = {folder / _CHECKPOINTS: None}
    if save is not None and save.is_relative_to(folder) and save != folder:
        below[save] = None
    # Symbolic links out of the run folder are not followed.
    followed = [p for p in below if not p.is_symlink() and p.is_dir() and p.resolve().is_relative_to(folder)]
    paths = [*(path for place in followed for path in sorted(place.iterdir())), *entries]
    # A name such as `data` or `train.log` alone does not show that a run used the folder.
    holds_run = (
        is_run_config(folder / "config.yaml")
        or recorded_job(folder) is not None
        or any(_is_our_step(path) or path.name == "began-from.json" for path in paths)
    )
    if not holds_run:
        return Contents(folder, False, (), tuple(entry for entry in entries if entry.name != LOCK_FILE))
    foreign = {folder / name for name in recorded_foreign(folder)}
    made = [path for path in paths if path not in foreign and _is_of_a_run(path)]
    made += [path for path in _output_folders(folder) if not foreign.intersection((path, *path.parents))]
    made = [path for path in dict.fromkeys(made) if path.name != LOCK_FILE]
    # Files of runs, and folders whose entries were listed one by one.
    seen = {*made, *(parent for path in (*made, *below) for parent in (path, *path.parents))}
    others = [path for path in dict.fromkeys(paths) if path not in seen and path.name != LOCK_FILE]
    steps_first = sorted(made, key=lambda path: not _STEPS.fullmatch(path.name))
    return Contents(folder, True, tuple(steps_first), tuple(others))


def _is_our_step(entry: Path) -> bool:
    """Whether a folder is a checkpoint of this package: Megatron-LM also names steps iter_0000100."""
    if not _STEPS.fullmatch(entry.name) or entry.is_symlink() or not entry.is_dir():
        return False
    return any(next(entry.glob(name), None) for name in _OF_OUR_STEPS)


def _is_of_a_run(entry: Path) -> bool:
    """Whether a run made the entry, by its name and content. Runs create no symbolic links."""
    name = entry.name
    if entry.is_symlink():
        return False
    if name == "config.yaml":
        return is_run_config(entry) or damaged_config(entry) is not None
    if not entry.is_dir():
        return any(names.fullmatch(name) for names in (_REPLACED, _APPENDED, _OTHER_FILES))
    if name in _INSIDE:
        inner = list(entry.iterdir())
        return bool(inner) and all(_INSIDE[name].fullmatch(path.name) for path in inner)
    # Names with a leading dot are of steps that were being written or removed, and may be empty.
    return _is_our_step(entry) or (name.startswith(".") and bool(_UNFINISHED.fullmatch(name)))


def _output_folders(folder: Path) -> list[Path]:
    """Returns further folders inside the run folder that the saved configuration names, as TensorBoard's."""
    config = folder / "config.yaml"
    if not is_run_config(config):
        return []
    values = saved_values(config.read_text(encoding="utf-8", errors="replace"))
    places = [folder / place for place in paths_in_run(str(config), values).values() if place != "."]
    places += [folder / "wandb"] if Settings.defaults(**values).wandb_project else []
    return [place for place in places if place.exists() and not place.is_symlink()]


# --- checks and moves ---


def _require_harmless(*places: Path) -> None:
    """Raises an error for the home folder and folders around it."""
    for place in places:
        with contextlib.suppress(RuntimeError):
            if Path.home().resolve().is_relative_to(place):
                raise UserError(
                    f"{place} is {'your home folder' if place == Path.home().resolve() else 'a folder around your home folder'}, and a new run "
                    f"would move an earlier one in it aside; choose a separate folder with --run-dir or --save"
                )


def _inspect(run: Path, save: Path, start: Start, inputs: Iterable[str]) -> list[Contents]:
    """Lists the folders; raises an error if a new run would overwrite, move or mix with other files."""
    inspected = [list_contents(run, save)]
    if not save.is_relative_to(run):
        inspected.append(list_contents(save))
    others = () if inspected[0].holds_run else inspected[0].others
    if overwritten := [entry for entry in others if _REPLACED.fullmatch(entry.name) and not entry.is_dir()]:
        raise UserError(
            f"{overwritten[0]} is not the file of a run, and a run would overwrite it; choose another folder with --run-dir"
        )
    if start is not Start.NEW:
        return inspected
    for contents in inspected:
        names = [entry.name for entry in contents.others if _would_mix(entry)]
        if names and not contents.holds_run:
            raise UserError(
                f"{contents.folder} contains {_few(names)}, which no run created, and a new run would write there; choose another --save or --run-dir"
            )
        for path in inputs:
            if is_inside(path, *map(str, contents.made)):
                raise UserError(
                    f"{path} is a file of the earlier run in {contents.folder}, which would be moved aside; choose another --save or --run-dir"
                )
        if contents.made and Path.cwd().is_relative_to(contents.folder):
            raise UserError(
                f"{contents.folder} is {'the current folder' if Path.cwd() == contents.folder else 'around the current folder'}, and the run in it "
                f"would have to be moved aside; choose another --save or --run-dir, or move it yourself"
            )
    return inspected


def _would_mix(entry: Path) -> bool:
    """Whether a new run would write into the entry."""
    if entry.name == _CHECKPOINTS:
        return not entry.is_dir() or any(inner.name != LOCK_FILE for inner in entry.iterdir())
    if entry.name in _INSIDE:
        # The launcher creates `ranks` before the run opens its folder.
        return entry.name != "ranks"
    return bool(_OTHER_FILES.fullmatch(entry.name) or _STEPS.fullmatch(entry.name))


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def _move_aside(inspected: Iterable[Contents]) -> Iterable[str]:
    """Moves the files of earlier runs to new folders, and yields a line about each."""
    for contents in inspected:
        if not contents.made:
            continue
        aside = next_numbered_name(contents.folder, ".")
        moved: list[tuple[Path, Path]] = []
        try:
            aside.mkdir()
            for path in contents.made:
                target = aside / path.relative_to(contents.folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                rename(path, target)
                moved.append((path, target))
            for place in {aside.parent, *(side.parent for pair in moved for side in pair)}:
                fsync_folder(place)
        except OSError as error:
            # Either all files are moved or none.
            for path, target in reversed(moved):
                rename(target, path)
            with contextlib.suppress(OSError):
                aside.rmdir()
            raise UserError(
                f"the earlier run {contents.folder} cannot be moved to {aside} ({error.strerror}); move it yourself, or choose another "
                f"--save or --run-dir"
            ) from None
        stayed = [str(path.relative_to(contents.folder)) for path in contents.others]
        rest = f"; {_few(stayed)}, which no run created, stayed" if stayed else ""
        yield f"the earlier run was moved to {aside}{rest}"


# --- disk space for checkpoints ---


def check_disk_space(
    model: ParallelModel, optimizer: AnyOptimizer, store: CheckpointStore, state: TrainState
) -> list[str]:
    """Raises an error if no checkpoint fits; returns a note if those to be kept do not. Collective."""
    config, world = model.config, model.world
    left = saves_left(config, state.step)
    if left == 0:
        if world.is_first and config.checkpoint.save_checkpoints and not config.train.skip_train:
            # No further save will remove the partial files of a run that was killed after its last step.
            with contextlib.suppress(OSError):
                store.remove_leftovers()
        return []
    owned = (optimizer.fragments(owned_only=True), model.routers.fragments(owned_only=True))
    parts = itertools.chain(*owned, rank_local_fragments(random_state(world)))
    # The size of a checkpoint over all ranks, without the small manifest.
    size = sum(gather_objects(sum(map(store.bytes_of, parts)), world.all_ranks))
    check = partial(_check_free_space, config, store, size, left, state.step)
    return run_on_some_ranks(world.is_first, check, world.all_ranks) or []


def saves_left(config: RunConfig, step: int) -> int:
    """Returns how many checkpoints the run will save after this step."""
    last, interval = config.train.train_iters, config.checkpoint.save_interval
    if config.train.skip_train or not config.checkpoint.save_checkpoints or (step >= last > 0):
        return 0
    return last // interval - step // interval + (last % interval > 0 or last == 0)


def _check_free_space(
    config: RunConfig, store: CheckpointStore, size: int, left: int, step: int
) -> list[str]:
    # Partial files of a killed run do not count: a save removes them first.
    store.remove_leftovers()
    free = free_bytes(store.folder)
    if free < size:
        raise UserError(
            f"a checkpoint takes {binary_size(size)} and {store.folder} has {binary_size(free)} free, so no checkpoint can be saved; make room, "
            f"choose another folder with --save, or train without checkpoints (--no-save-checkpoints)"
        )
    keep, interval = config.checkpoint.keep_checkpoints, config.checkpoint.save_retain_interval
    retained = 0 if interval is None else config.train.train_iters // interval - step // interval
    # The oldest checkpoint is removed only after a new one is complete.
    at_once = left if keep is None else min(left, max(1, keep + 1 - len(store.steps())) + retained)
    if free >= at_once * size:
        return []
    retention = "all are kept" if keep is None else f"--keep-checkpoints {keep}"
    retention += f", and {retained} permanently" if retained else ""
    return [
        f"a checkpoint takes {binary_size(size)}, and {store.folder} will hold up to {at_once} more at once ({retention}): {binary_size(at_once * size)}, but "
        f"{binary_size(free)} are free; keep fewer with --keep-checkpoints, or make room before a save fails"
    ]
