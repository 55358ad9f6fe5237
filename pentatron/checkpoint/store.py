"""The checkpoints of one run: a folder of steps, each complete or not there at all.

Saving: every rank writes its file into a fresh temporary folder; rank 0 writes the manifest last, renames the
folder into place and then moves the `latest` pointer. Whatever is killed in between leaves older steps untouched.
"""

import contextlib
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pentatron.checkpoint.format import (
    FILE_NAME,
    DamagedCheckpoint,
    Manifest,
    Verdict,
    Written,
    manifest_of,
    own_fragments,
    read_manifest,
    verify_files,
    write_part,
)
from pentatron.checkpoint.retention import (
    Retention,
    keep_base,
    read_bases,
    read_record,
    record_bases,
    remove_steps,
    restore_bases,
    restore_replaced,
)
from pentatron.checkpoint.verify import Check, Obstacle, problem_of_share
from pentatron.errors import FolderLost, NotSaved, UserError
from pentatron.files import free_name, hidden_name, rename, sync_folder, write_new
from pentatron.parallel.collectives import Group, broadcast_object, gather_objects, largest
from pentatron.parallel.encoding import sendable
from pentatron.parallel.shards import Fragment
from pentatron.text import in_mib

# A save as work that all ranks do in stages, in the background if wished: what every rank's stage gave is
# known to all before the next one.
#
# Only the caller's thread ever talks to other ranks. A collective of a second thread would meet those of
# training in another order on each rank, and hang or mix them up.


# Gets what the stage before gave on every rank, in their order; the first one gets nothing.
Stage = Callable[[Sequence[Any]], Any]


class Stages:
    def __init__(self, stages: Sequence[Stage], group: Group, background: bool) -> None:
        self._left, self._group, self._background = list(stages), group, background
        self._running = self._start(())

    def _start(self, before: Sequence[Any]) -> "Future[Any]":
        stage = self._left.pop(0)
        return run(lambda: stage(before), self._background)

    def advance(self, wait: bool) -> Sequence[Any] | None:
        """Goes on as far as all ranks have come; what the last stage gave on every rank, or None if they are not done.

        Every rank must ask, with the same `wait`. An exception of this rank's stage is raised here.
        """
        while True:
            if not wait and largest(int(not self._running.done()), self._group):
                return None
            everyone = gather_objects(self._running.result(), self._group)
            if not self._left:
                return everyone
            self._running = self._start(everyone)


def run(action: Callable[[], Any], background: bool) -> "Future[Any]":
    """Runs it now, or in a thread of its own."""
    future: Future[Any] = Future()

    def work() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    if background:
        # A daemon: a process that is told twice to end ends, and what it was writing is no step yet.
        threading.Thread(target=work, name="checkpoint", daemon=True).start()
    else:
        future.set_result(action())
    return future


class Save:
    """One rank's part in one save, stage by stage."""

    def __init__(
        self,
        store: "CheckpointStore",
        step: int,
        temporary: Path,
        run_state: Mapping[str, Any],
        config: Mapping[str, Any],
        group: Group,
    ) -> None:
        self.store, self.step, self.temporary, self.group = store, step, temporary, group
        self.run_state, self.config = run_state, config
        self.verdict = Verdict()

    def write(self, parts: Sequence[Fragment]) -> Any:
        return self.store.write_own(self.temporary, self.group.rank, parts)

    def settle(self, everyone: Sequence[Written]) -> Verdict:
        """Rank 0 commits the step if every rank wrote its part and the parts fit together."""
        if self.group.rank == 0:
            self.verdict = self._decide(everyone)
            if not self.verdict.final and not self.verdict.lost:
                shutil.rmtree(self.temporary, ignore_errors=True)
        return self.verdict

    def _decide(self, everyone: Sequence[Written]) -> Verdict:
        for rank, written in enumerate(everyone):
            if written.mistake:
                return Verdict(mistake=f"rank {rank}: {written.mistake}")
            if written.failure:
                return Verdict(failure=f"rank {rank}: {written.failure}")
        final = None
        try:
            self.store.guard(True)
            manifest = self.store.complete(self.temporary, self.step, everyone, self.run_state, self.config)
            final = self.store.place(self.temporary, manifest)
            unsynced = self._sync()
            # What is there now is looked at, not what was meant to be.
            read_manifest(final)
            note = "; ".join(filter(None, (unsynced, self._point_to(final))))
            to_check = not unsynced and self.store.needs_check(self.step)
            return Verdict(str(final), to_check=to_check, note=note, keeps_older=bool(unsynced))
        except OSError as error:
            return Verdict(failure=f"rank 0: {error.strerror or error}")
        except FolderLost as error:
            return Verdict(lost=str(error))
        except (DamagedCheckpoint, UserError) as error:
            if final is not None:
                self.store.withdraw(final)
            return Verdict(failure=f"rank 0: {error}")
        except (ValueError, TypeError) as error:
            return Verdict(mistake=str(error))

    def _sync(self) -> str:
        """What is to be told where the name of the step may not survive a power cut; the step is there, and is not saved again."""
        try:
            sync_folder(self.store.folder)
        except OSError as error:
            return (
                f"the step is saved, but {self.store.folder} could not be synced to the disk ({error.strerror or error}), so that a power "
                f"cut may lose it; older steps are kept"
            )
        return ""

    def _point_to(self, step: Path) -> str:
        """What is to be told where that fails: the step is saved without it."""
        try:
            self.store.point_to(step)
        except OSError as error:
            return f"the step is saved, but the file `latest` could not be made to name it ({error.strerror or error})"
        return ""

    def check(self, verdicts: Sequence[Verdict]) -> Obstacle | None:
        """Each rank reads its share of the files, if that is wanted."""
        if not verdicts[0].to_check:
            return None
        folder = Path(verdicts[0].final)
        try:
            manifest = read_manifest(folder)
        except (DamagedCheckpoint, UserError) as error:
            return Obstacle(str(error), is_damage=True)
        return problem_of_share(folder, manifest, self.group.rank, self.group.size, cold=True)

    def conclude(self, problems: Sequence[Obstacle | None]) -> Verdict:
        """What is not as it was written is set aside, and everything older stays; else rank 0 removes what may go."""
        if self.group.rank != 0 or not self.verdict.final:
            return self.verdict
        final = Path(self.verdict.final)
        found = [f"rank {rank}: {problem.text}" for rank, problem in enumerate(problems) if problem]
        if found:
            self.store.withdraw(final)
            return Verdict(failure=found[0])
        if self.verdict.to_check:
            self.store.trust(final)
        if self.verdict.keeps_older:
            return self.verdict
        try:
            self.store.guard(True)
            self.store.remove_old(self.step)
        except FolderLost:
            # The step itself is saved, and the run stops before its next step.
            return self.verdict
        except OSError as error:
            # The step itself is saved.
            note = f"older checkpoints could not be removed ({error.filename}: {error.strerror or error})"
            return replace(self.verdict, note="; ".join(filter(None, (self.verdict.note, note))))
        return self.verdict


# Where users of Megatron-LM look for the number of the last step.
TRACKER = "latest_checkpointed_iteration.txt"
STEP_NAME = re.compile(r"step-(\d{8,})(?:-again(\d+))?|iter_(\d{7,})")
_DAMAGED = ".damaged"


@sendable
@dataclass(frozen=True)
class Found:
    """A checkpoint that passed its checks."""

    folder: Path
    manifest: Manifest


def step_name(step: int) -> str:
    return f"step-{step:08d}"


class CheckpointStore:
    """`keep`: how many of the newest steps stay (None: all). `retain`: every step that is a multiple of it stays for good.

    `verify`: older steps go only when one that stays has been read and compared with its sums.
    """

    def __init__(
        self, folder: Path, keep: int | None, retain: int | None = None, verify: bool = True
    ) -> None:
        self.folder = folder
        self.keep, self.retain, self.verify = keep, retain, verify
        # Raises `FolderLost` if the folder is not this process's any more; with False, it may look less closely.
        self.guard: Callable[[bool], None] = lambda thorough: None
        # Names of steps that were read and compared.
        self._verified: set[str] = set()

    def save(
        self,
        step: int,
        fragments: Iterable[Fragment],
        own: Mapping[str, Tensor],
        run_state: Mapping[str, Any],
        config: Mapping[str, Any],
        group: Group,
    ) -> Path:
        """Saves one step. Over the group, the fragments make up every tensor exactly; `own` is this rank's alone."""
        parts = (*fragments, *own_fragments(own))
        stages = self.start(step, lambda: parts, run_state, config, group, background=False)
        return self.outcome(step, stages.advance(wait=True))

    def start(
        self,
        step: int,
        parts: Callable[[], Sequence[Fragment]],
        run_state: Mapping[str, Any],
        config: Mapping[str, Any],
        group: Group,
        background: bool,
    ) -> Stages:
        """Begins to save. What the stages give in the end is for `outcome`; nobody else may use the folder until then."""
        save = Save(self, step, self._agree_on_temporary(step, group), run_state, config, group)
        return Stages(
            [lambda _: save.write(parts()), save.settle, save.check, save.conclude], group, background
        )

    def write_own(self, temporary: Path, rank: int, parts: Sequence[Fragment]) -> Written:
        """One rank's part, in files of this store's format; errors come back as text, so that the other ranks hear of them."""
        return write_part(temporary / f"rank-{rank:05d}.safetensors", parts)

    def bytes_of(self, part: Fragment) -> int:
        """What it takes on the disk."""
        return part.values.numel() * part.values.element_size()

    def complete(
        self,
        temporary: Path,
        step: int,
        everyone: Sequence[Any],
        run_state: Mapping[str, Any],
        config: Mapping[str, Any],
    ) -> Manifest:
        """The manifest of what all ranks wrote; ValueError if the parts do not fit together."""
        return manifest_of(step, everyone, run_state, config)

    def outcome(self, step: int, verdicts: Sequence[Any] | None) -> Path:
        """Where the step lies; or the error that all ranks raise."""
        assert verdicts is not None, "the save is not done yet"
        verdict: Verdict = verdicts[0]
        if verdict.lost:
            raise FolderLost(verdict.lost)
        if verdict.mistake:
            raise ValueError(f"the checkpoint of step {step} would be wrong: {verdict.mistake}")
        if verdict.failure:
            raise self._not_saved(step, verdict.failure)
        return Path(verdict.final)

    def temporary(self, step: int) -> Path:
        """A name for a step that is being written; the folder is not made yet."""
        return hidden_name(self.folder / step_name(step))

    def _agree_on_temporary(self, step: int, group: Group) -> Path:
        """A fresh folder made by rank 0; if it could not be made, every rank hears why."""
        made, problem, lost = self.temporary(step), "", ""
        if group.rank == 0:
            try:
                self.guard(True)
                # First of all, as it may be what fills the disk.
                self.remove_leftovers()
                made.mkdir(parents=True)
            except OSError as error:
                problem = f"rank 0: {error.strerror or error}"
            except FolderLost as error:
                lost = str(error)
        made, problem, lost = broadcast_object((made, problem, lost), group)
        if lost:
            raise FolderLost(lost)
        if problem:
            raise self._not_saved(step, problem)
        return Path(made)

    def _not_saved(self, step: int, reason: str) -> NotSaved:
        existing = next(p for p in (self.folder, *self.folder.parents) if p.exists())
        free = shutil.disk_usage(existing).free
        return NotSaved(
            f"the checkpoint of step {step} could not be saved to {self.folder} ({reason}; {in_mib(free, '.0f')} MiB free)",
            "earlier checkpoints are intact, and once this is mended training can go on from the newest",
        )

    def commit(self, temporary: Path, manifest: Manifest) -> Path:
        """Makes a step of files that are written, and points to it; returns where it now lies."""
        final = self.place(temporary, manifest)
        sync_folder(self.folder)
        self.point_to(final)
        return final

    def place(self, temporary: Path, manifest: Manifest) -> Path:
        """Gives a step whose files are written its manifest and its name: it is there. `sync_folder` then makes it last."""
        write_new(temporary / FILE_NAME, manifest.to_json())
        sync_folder(temporary)
        self.guard(True)
        # Last of all, as an earlier save of the same step may make way for it.
        final = self._free_step(manifest.step)
        self._verified.discard(final.name)
        rename(temporary, final)
        return final

    def point_to(self, step: Path) -> None:
        """For people and their scripts; nothing reads it unless the user names it. The second file is the one that Megatron's users look for."""
        for name, text in (("latest", f"{step.name}\n"), (TRACKER, str(_order(step)[0]))):
            pointer = hidden_name(self.folder / "latest")
            write_new(pointer, text)
            rename(pointer, self.folder / name)
        sync_folder(self.folder)

    def _free_step(self, step: int) -> Path:
        """A name newer than any of this step: saved again after a rollback, it stands beside the old one. One of an earlier run makes way."""
        self._keep_bases(step)
        taken = [_order(p)[1] for p in self.steps() if _order(p)[0] == step]
        return self.folder / (f"{step_name(step)}-again{max(taken) + 1}" if taken else step_name(step))

    def _keep_bases(self, step: int) -> None:
        """Steps of this number that an earlier run left in the folder get other names, and stay."""
        bases = read_bases(self.folder) or ()
        for base in [p for p in self.steps() if _order(p)[0] == step and p.name in bases]:
            keep_base(base)

    def steps(self) -> list[Path]:
        """Finished steps, oldest first; of a step saved again, the last one last."""
        if not self.folder.is_dir():
            return []
        return sorted((p for p in self.folder.iterdir() if _is_finished(p)), key=_order)

    def newest_valid(
        self, verify: bool, set_aside: bool, check: Check = verify_files
    ) -> tuple[Found | None, list[str]]:
        """The newest step that passes its checks, and a sentence about each one that did not. `check` compares sums.

        With `set_aside` the bad ones are renamed, so that nobody meets them again; only the run that holds the
        folder may ask for that.
        """
        complaints: list[str] = []
        if set_aside:
            with contextlib.suppress(OSError):
                restore_replaced(self.folder)
                restore_bases(self.folder)
        for folder in reversed(self._candidates()):
            try:
                manifest = read_manifest(folder)
                if manifest.step != _order(folder)[0]:
                    raise DamagedCheckpoint(f"{folder} says it is step {manifest.step}")
                require_one_step(folder, manifest)
                if verify:
                    check(folder, manifest)
                if set_aside and complaints:
                    # Nothing here reads it, and a disk that cannot take it is met by the next save.
                    with contextlib.suppress(OSError):
                        self.point_to(folder)
                return Found(folder, manifest), complaints
            except DamagedCheckpoint as damage:
                complaints.append(str(damage))
                if set_aside:
                    complaints[-1] += f"; the step is set aside as {self.set_aside(folder).name}"
        return None, complaints

    def set_aside(self, step: Path) -> Path:
        """Renames a damaged step, so that nobody takes it for a good one; where it now lies."""
        aside = free_name(step.with_name(f"{step.name}{_DAMAGED}"))
        rename(step, aside)
        return aside

    def _candidates(self) -> list[Path]:
        """The steps the run has saved. What it began from counts while there are none, and none was lost: of several, that comes last."""
        steps, record = self.steps(), read_record(self.folder)
        own = [step for step in steps if record is None or step.name not in record.steps]
        if own or record is None:
            return own
        if any(step.name not in record.steps for step in self.damaged()):
            return []
        return sorted(steps, key=lambda step: record.origin is not None and step.name == record.origin.name)

    def newest_own(self) -> int | None:
        """The number of the last step that the run itself has saved."""
        bases = read_bases(self.folder) or ()
        found, _ = self.newest_valid(verify=False, set_aside=False)
        return None if found is None or found.folder.name in bases else found.manifest.step

    def begin_again(self) -> None:
        """Every step that is there belongs to earlier runs from now on; the newest of them is what this one begins from."""
        self.record_beginning(next(reversed(self._candidates()), None))

    def record_beginning(self, origin: Path | None) -> None:
        """Keeps for later starts which steps are not the run's own, and what its weights come from."""
        record_bases(self.folder, [*self.steps(), *self.damaged()], origin)

    def damaged(self) -> list[Path]:
        """Steps that were set aside earlier."""
        return sorted(p for kind in ("step-", "iter_") for p in self.folder.glob(f"{kind}*{_DAMAGED}*"))

    def trust(self, step: Path) -> None:
        """The step was read and compared with its sums."""
        self._verified.add(step.name)

    def divide(self, saved: int) -> tuple[list[Path], list[Path]]:
        """Which steps stay once this one is saved, and which go: what it replaces, and the oldest beyond `keep`."""
        bases = read_bases(self.folder) or ()
        steps = [step for step in self.steps() if step.name not in bases]
        just_saved = [p for p in steps if _order(p)[0] == saved][-1:]
        going = Retention(self.keep, self.retain).outdated(steps, just_saved)
        return [step for step in steps if step not in going], going

    def needs_check(self, saved: int) -> bool:
        """Whether a save would leave no step that was ever read and compared, had it not been for those it removes."""
        staying, going = self.divide(saved)
        return self.verify and bool(going) and not any(step.name in self._verified for step in staying)

    def remove_leftovers(self) -> None:
        """What killed saves and removals have left; nothing may be under way."""
        remove_steps(self.folder, ())

    def remove_old(self, saved: int) -> None:
        remove_steps(self.folder, self.divide(saved)[1])

    def withdraw(self, step: Path) -> None:
        """A step that turned out to be damaged as soon as it was saved."""
        # A disk that loses what it took may refuse this too. The other ranks wait for the verdict, and whoever loads finds the damage.
        with contextlib.suppress(OSError):
            self.set_aside(step)
            if left := self.steps():
                self.point_to(left[-1])


def require_one_step(folder: Path, manifest: Manifest) -> None:
    """The manifest's own number, and that of the state a run goes on with. What was imported has no state."""
    of_state = manifest.run_state.get("step", manifest.step)
    if of_state != manifest.step:
        raise DamagedCheckpoint(
            f"{folder}/{FILE_NAME} is of step {manifest.step}, but the state in it is of step {of_state!r}"
        )


def _is_finished(path: Path) -> bool:
    """Others write steps called iter_0000100 as well: such a one is ours if it has our manifest, or has lost it."""
    match = STEP_NAME.fullmatch(path.name)
    if match is None or not path.is_dir():
        return False
    return match[3] is None or any(next(path.glob(name), None) for name in (FILE_NAME, "rank-*.safetensors"))


def _order(folder: Path) -> tuple[int, int]:
    """(step, how often it was saved again) of a step's folder."""
    match = STEP_NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1] or match[3]), int(match[2] or 0)
