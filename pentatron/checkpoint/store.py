"""The checkpoints of one run: a folder of steps, each complete or absent.

Commit protocol: every rank writes its file to a new temporary folder; rank 0 writes the manifest last,
renames the folder to the name of the step, and then updates the `latest` file. A crash at any point leaves
older steps intact.
"""

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pentatron.checkpoint import format, retention
from pentatron.checkpoint.format import DamagedCheckpoint, Manifest, SaveResult, read_manifest
from pentatron.checkpoint.verify import Check, VerificationProblem, verify_rank_share
from pentatron.errors import FolderLost, SaveError, UserError
from pentatron.files import free_bytes, free_name, fsync_folder, hidden_name, rename, write_new_synced
from pentatron.parallel.collectives import Group, broadcast_object, gather_objects, largest
from pentatron.parallel.serialization import sendable
from pentatron.parallel.sharding import Fragment
from pentatron.text import in_mib

# The file that names the last step in Megatron-LM.
TRACKER = "latest_checkpointed_iteration.txt"
_DAMAGED = ".damaged"


@sendable
@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that passed its checks."""

    folder: Path
    manifest: Manifest


def step_name(step: int) -> str:
    return f"step-{step:08d}"


class CheckpointStore:
    """The folder of a run's checkpoints.

    `keep`: number of newest steps to retain (None: all). `retain`: interval of steps to retain permanently.
    `verify`: remove older steps only when a retained one has been read back and compared with its digests.
    """

    def __init__(
        self, folder: Path, keep: int | None, retain: int | None = None, verify: bool = True
    ) -> None:
        self.folder = folder
        self.keep, self.retain, self.verify = keep, retain, verify
        # Raises `FolderLost` if this process no longer holds the folder. The argument asks for a thorough
        # check.
        self.guard: Callable[[bool], None] = lambda thorough: None
        # Names of steps that were read back and compared.
        self._verified: set[str] = set()

    def save(
        self,
        step: int,
        fragments: Iterable[Fragment],
        rank_local: Mapping[str, Tensor],
        run_state: Mapping[str, Any],
        config: Mapping[str, Any],
        group: Group,
    ) -> Path:
        """Saves one step synchronously.

        All ranks' fragments cover every tensor exactly; `rank_local` exists only on this rank.
        """
        parts = (*fragments, *format.rank_local_fragments(rank_local))
        draft = Manifest(step, {}, {}, dict(run_state), dict(config))
        stages = self.start(draft, lambda: parts, group, background=False)
        return self.outcome(step, stages.advance(wait=True))

    def start(
        self, draft: Manifest, parts: Callable[[], Sequence[Fragment]], group: Group, background: bool
    ) -> "SaveStages":
        """Starts a save and returns its stages: write, commit, read back, remove old steps.

        `draft` has no files and tensors yet. `outcome` takes the result of the last stage. The folder must
        not be used otherwise until then.
        """
        task = RankSave(self, draft, self._make_temporary(draft.step, group), group)

        def write(_: Sequence[Any]) -> Any:
            return self.write_own(task.temporary, group.rank, parts())

        return SaveStages([write, task.commit, task.read_back, task.remove_outdated], group, background)

    def write_own(self, temporary: Path, rank: int, parts: Sequence[Fragment]) -> format.RankWriteResult:
        """Writes one rank's files in this store's format.

        Errors are returned as text, to be gathered on all ranks.
        """
        return format.write_rank_file(temporary / f"rank-{rank:05d}.safetensors", parts)

    def bytes_of(self, part: Fragment) -> int:
        """Size of a fragment on disk."""
        return part.values.numel() * part.values.element_size()

    def complete(self, temporary: Path, draft: Manifest, rank_results: Sequence[Any]) -> Manifest:
        """Adds all ranks' files and tensors to the manifest.

        Raises ValueError unless the fragments cover every tensor exactly.
        """
        files = {file.name: file for written in rank_results for file in written.files}
        records = (record for written in rank_results for record in written.tensors.items())
        return replace(draft, files=files, tensors=format.merge_tensor_records(records))

    def outcome(self, step: int, verdicts: Sequence[Any] | None) -> Path:
        """Returns the folder of the saved step, or raises the error of the save on all ranks."""
        assert verdicts is not None, "the save is not done yet"
        verdict: SaveResult = verdicts[0]
        if verdict.lost:
            raise FolderLost(verdict.lost)
        if verdict.mistake:
            raise ValueError(f"the checkpoint of step {step} would be wrong: {verdict.mistake}")
        if verdict.failure:
            free = in_mib(free_bytes(self.folder), ".0f")
            raise SaveError(
                f"the checkpoint of step {step} could not be saved to {self.folder} ({verdict.failure}; {free} MiB free)",
                "earlier checkpoints are intact, and once this is fixed training can resume from the newest",
            )
        return Path(verdict.final)

    def temporary(self, step: int) -> Path:
        """Returns a temporary name for a step being written, without creating the folder."""
        return hidden_name(self.folder / step_name(step))

    def _make_temporary(self, step: int, group: Group) -> Path:
        """Creates a temporary folder on rank 0. All ranks get its path or raise the same error."""
        folder = self.temporary(step)
        verdict = SaveResult(str(folder))
        if group.rank == 0:
            try:
                self.guard(True)
                # Before anything is written: leftovers may be what fills the disk.
                self.remove_leftovers()
                folder.mkdir(parents=True)
            except OSError as error:
                verdict = SaveResult(failure=f"rank 0: {error.strerror or error}")
            except FolderLost as error:
                verdict = SaveResult(lost=str(error))
        return self.outcome(step, [broadcast_object(verdict, group)])

    def commit(self, temporary: Path, manifest: Manifest) -> Path:
        """Commits a step whose files are written, and updates `latest`. Returns its final folder."""
        final = self.place(temporary, manifest)
        fsync_folder(self.folder)
        self.update_latest(final)
        return final

    def place(self, temporary: Path, manifest: Manifest) -> Path:
        """Writes the manifest of a finished step and renames the folder to its final name.

        Durable after `fsync_folder`.
        """
        write_new_synced(temporary / format.MANIFEST_FILE, manifest.to_json())
        fsync_folder(temporary)
        self.guard(True)
        # Chosen last: an earlier save of the same step may be renamed for it.
        final = self._free_step(manifest.step)
        self._verified.discard(final.name)
        rename(temporary, final)
        return final

    def update_latest(self, step: Path) -> None:
        """Writes `latest` and Megatron-LM's tracker file.

        Nothing reads them unless the user names them. They are not part of the commit.
        """
        for name, text in (("latest", f"{step.name}\n"), (TRACKER, str(_order(step)[0]))):
            pointer = hidden_name(self.folder / "latest")
            write_new_synced(pointer, text)
            rename(pointer, self.folder / name)
        fsync_folder(self.folder)

    def _free_step(self, step: int) -> Path:
        """Returns a free name for a step, newer than all saves of the same step.

        A step saved again after a rollback gets a suffix; one of an earlier run is renamed.
        """
        self._keep_bases(step)
        taken = [_order(p)[1] for p in self.steps() if _order(p)[0] == step]
        return self.folder / (f"{step_name(step)}-again{max(taken) + 1}" if taken else step_name(step))

    def _keep_bases(self, step: int) -> None:
        """Renames steps of this number that an earlier run left in the folder."""
        bases = retention.read_base_steps(self.folder).steps
        for base in [p for p in self.steps() if _order(p)[0] == step and p.name in bases]:
            retention.rename_base(base)

    def steps(self) -> list[Path]:
        """Finished steps, oldest first. Repeated saves of a step are in order."""
        if not self.folder.is_dir():
            return []
        return sorted((p for p in self.folder.iterdir() if _is_finished(p)), key=_order)

    def newest_valid(
        self, verify: bool, set_aside: bool, check: Check = format.verify_files
    ) -> tuple[Checkpoint | None, list[str]]:
        """Returns the newest step that passes its checks, and a message about each newer one that does not.

        `check` compares digests. `set_aside` renames damaged steps; only the run that holds the folder may do
        so.
        """
        messages: list[str] = []
        if set_aside:
            with contextlib.suppress(OSError):
                retention.restore_replaced(self.folder)
                retention.restore_bases(self.folder)
        for folder in reversed(self._candidates()):
            try:
                manifest = read_manifest(folder)
                if manifest.step != _order(folder)[0]:
                    raise DamagedCheckpoint(f"{folder} contains step {manifest.step}")
                require_one_step(folder, manifest)
                if verify:
                    check(folder, manifest)
                if set_aside and messages:
                    # Not read by Pentatron, and a disk error is reported by the next save.
                    with contextlib.suppress(OSError):
                        self.update_latest(folder)
                return Checkpoint(folder, manifest), messages
            except DamagedCheckpoint as damage:
                messages.append(str(damage))
                if set_aside:
                    messages[-1] += f"; the step is set aside as {self.set_aside(folder).name}"
        return None, messages

    def set_aside(self, step: Path) -> Path:
        """Renames a damaged step, so that it is not loaded again. Returns its new path."""
        renamed = free_name(step.with_name(f"{step.name}{_DAMAGED}"))
        rename(step, renamed)
        return renamed

    def _candidates(self) -> list[Path]:
        """Steps to load from, oldest first: those saved by this run.

        If it has saved none and none was set aside as damaged, its base steps, with the one its weights come
        from last.
        """
        steps, record = self.steps(), retention.read_base_steps(self.folder)
        saved = [step for step in steps if step.name not in record.steps]
        if saved or any(step.name not in record.steps for step in self.damaged()):
            return saved
        return sorted(steps, key=lambda step: record.origin is not None and step.name == record.origin.name)

    def newest_saved_step(self) -> int | None:
        """Number of the newest step saved by this run, or None."""
        bases = retention.read_base_steps(self.folder).steps
        newest, _ = self.newest_valid(verify=False, set_aside=False)
        return None if newest is None or newest.folder.name in bases else newest.manifest.step

    def start_new_run(self) -> None:
        """Marks all existing steps as bases of a new run, which starts from the newest of them."""
        self.record_base_steps(next(reversed(self._candidates()), None))

    def record_base_steps(self, origin: Path | None) -> None:
        """Records all existing steps as bases of this run, and `origin` as the source of its weights."""
        retention.write_base_record(self.folder, [*self.steps(), *self.damaged()], origin)

    def damaged(self) -> list[Path]:
        """Steps that were set aside as damaged."""
        return sorted(p for kind in ("step-", "iter_") for p in self.folder.glob(f"{kind}*{_DAMAGED}*"))

    def mark_verified(self, step: Path) -> None:
        """Marks a step as read back and compared with its digests."""
        self._verified.add(step.name)

    def split_outdated(self, saved: int) -> tuple[list[Path], list[Path]]:
        """Splits this run's steps into those to keep and those to remove once `saved` is committed."""
        bases = retention.read_base_steps(self.folder).steps
        steps = [step for step in self.steps() if step.name not in bases]
        just_saved = [p for p in steps if _order(p)[0] == saved][-1:]
        outdated = retention.Retention(self.keep, self.retain).outdated(steps, just_saved)
        return [step for step in steps if step not in outdated], outdated

    def needs_read_back(self, saved: int) -> bool:
        """Whether a save would remove old steps without leaving one that was read back and compared."""
        kept, outdated = self.split_outdated(saved)
        return self.verify and bool(outdated) and not any(step.name in self._verified for step in kept)

    def remove_leftovers(self) -> None:
        """Removes leftovers of interrupted saves and removals. No save may be pending."""
        retention.remove_steps(self.folder, ())

    def set_aside_failed(self, step: Path) -> None:
        """Sets aside a step that failed its check right after the save."""
        # Best effort: a failing disk may refuse this too, the other ranks wait for the result, and loading
        # detects the damage.
        with contextlib.suppress(OSError):
            self.set_aside(step)
            if remaining := self.steps():
                self.update_latest(remaining[-1])


# --- one save ---


@dataclass
class RankSave:
    """The stages of one save on one rank."""

    store: CheckpointStore
    draft: Manifest
    temporary: Path
    group: Group
    verdict: SaveResult = field(default_factory=SaveResult)

    def commit(self, rank_results: Sequence[format.RankWriteResult]) -> SaveResult:
        """Stage 2, rank 0: commits the step if all ranks wrote their files and the fragments are complete."""
        if self.group.rank == 0:
            self.verdict = self._try_commit(rank_results)
            if not self.verdict.final and not self.verdict.lost:
                shutil.rmtree(self.temporary, ignore_errors=True)
        return self.verdict

    def _try_commit(self, rank_results: Sequence[format.RankWriteResult]) -> SaveResult:
        """Commits the step.

        Order: manifest, rename, sync of the folder, read back of the manifest, `latest`.
        """
        for rank, written in enumerate(rank_results):
            if written.mistake:
                return SaveResult(mistake=f"rank {rank}: {written.mistake}")
            if written.failure:
                return SaveResult(failure=f"rank {rank}: {written.failure}")
        final = None
        try:
            self.store.guard(True)
            manifest = self.store.complete(self.temporary, self.draft, rank_results)
            final = self.store.place(self.temporary, manifest)
            # A failure of these two is only a warning, as the step itself is saved.
            notes = []
            if unsynced := _failure_of(fsync_folder, self.store.folder):
                notes.append(
                    f"the step is saved, but {self.store.folder} could not be synced to the disk ({unsynced}), so that a power "
                    f"cut may lose it; older steps are kept"
                )
            # Read from disk: verifies what was written, not what should have been.
            read_manifest(final)
            if reason := _failure_of(self.store.update_latest, final):
                notes.append(f"the step is saved, but the file `latest` could not be updated ({reason})")
            check = not unsynced and self.store.needs_read_back(self.draft.step)
            return SaveResult(str(final), to_check=check, note="; ".join(notes), keeps_older=bool(unsynced))
        except OSError as error:
            return SaveResult(failure=f"rank 0: {error.strerror or error}")
        except FolderLost as error:
            return SaveResult(lost=str(error))
        except (DamagedCheckpoint, UserError) as error:
            if final is not None:
                self.store.set_aside_failed(final)
            return SaveResult(failure=f"rank 0: {error}")
        except (ValueError, TypeError) as error:
            return SaveResult(mistake=str(error))

    def read_back(self, verdicts: Sequence[SaveResult]) -> VerificationProblem | None:
        """Stage 3, all ranks: reads back this rank's share of the files if `to_check`."""
        if not verdicts[0].to_check:
            return None
        folder = Path(verdicts[0].final)
        try:
            manifest = read_manifest(folder)
            return verify_rank_share(folder, manifest, self.group.rank, self.group.size, cold=True)
        except (DamagedCheckpoint, UserError) as error:
            return VerificationProblem(str(error), is_damage=True)

    def remove_outdated(self, problems: Sequence[VerificationProblem | None]) -> SaveResult:
        """Stage 4, rank 0: sets the step aside if it was damaged, otherwise removes outdated steps."""
        if self.group.rank != 0 or not self.verdict.final:
            return self.verdict
        final = Path(self.verdict.final)
        failures = [f"rank {rank}: {problem.text}" for rank, problem in enumerate(problems) if problem]
        if failures:
            self.store.set_aside_failed(final)
            return SaveResult(failure=failures[0])
        if self.verdict.to_check:
            self.store.mark_verified(final)
        if self.verdict.keeps_older:
            return self.verdict
        try:
            self.store.guard(True)
            retention.remove_steps(self.store.folder, self.store.split_outdated(self.draft.step)[1])
        except FolderLost:
            # The step is saved. The run stops before its next step.
            return self.verdict
        except OSError as error:
            note = f"older checkpoints could not be removed ({error.filename}: {error.strerror or error})"
            return replace(self.verdict, note="; ".join(filter(None, (self.verdict.note, note))))
        return self.verdict


def _failure_of(action: Callable[[Path], None], path: Path) -> str:
    """Runs an action; returns its I/O error, or an empty string."""
    try:
        action(path)
    except OSError as error:
        return str(error.strerror or error)
    return ""


# One stage of a save: takes the results of the previous stage of all ranks, in rank order.
Stage = Callable[[Sequence[Any]], Any]


class SaveStages:
    """Runs a save in stages, gathering each stage's results on all ranks before the next.

    A stage may run in a background thread. Only the caller's thread runs collectives: in a second thread,
    their order relative to those of training would differ between ranks.
    """

    def __init__(self, stages: Sequence[Stage], group: Group, background: bool) -> None:
        self._remaining, self._group, self._background = list(stages), group, background
        self._running = self._start(())

    def _start(self, previous: Sequence[Any]) -> "Future[Any]":
        """Runs the next stage now or in a daemon thread, and returns a future of its result."""
        stage, future = self._remaining.pop(0), Future[Any]()

        def work() -> None:
            try:
                future.set_result(stage(previous))
            except BaseException as error:
                future.set_exception(error)

        if self._background:
            # Daemon, so that a second signal can end the process: a step being written is not committed yet.
            threading.Thread(target=work, name="checkpoint", daemon=True).start()
        else:
            future.set_result(stage(previous))
        return future

    def advance(self, wait: bool) -> Sequence[Any] | None:
        """Advances as far as all ranks are ready.

        Returns the last stage's results of all ranks, or None if not finished. Collective: every rank must
        call it with the same `wait`. Raises the exception of this rank's stage.
        """
        while True:
            if not wait and largest(int(not self._running.done()), self._group):
                return None
            results = gather_objects(self._running.result(), self._group)
            if not self._remaining:
                return results
            self._running = self._start(results)


# --- names of steps ---


def require_one_step(folder: Path, manifest: Manifest) -> None:
    """Checks that the run state is of the manifest's step. Imported checkpoints have no run state."""
    state_step = manifest.run_state.get("step", manifest.step)
    if state_step != manifest.step:
        raise DamagedCheckpoint(
            f"{folder}/{format.MANIFEST_FILE} is of step {manifest.step}, but its run state is of step {state_step!r}"
        )


def _is_finished(path: Path) -> bool:
    """Whether a folder is a finished step.

    Megatron-LM also names steps iter_0000100; such a folder needs our manifest, or our files if the manifest
    was lost.
    """
    match = retention.STEP_NAME.fullmatch(path.name)
    if match is None or not path.is_dir():
        return False
    return match[3] is None or any(
        any(path.glob(name)) for name in (format.MANIFEST_FILE, "rank-*.safetensors")
    )


def _order(folder: Path) -> tuple[int, int]:
    """Returns (step, number of repeated saves) of a step's folder, as its sort key."""
    match = retention.STEP_NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1] or match[3]), int(match[2] or 0)
