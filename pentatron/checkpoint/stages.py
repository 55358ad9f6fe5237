"""A save as work that all ranks do in stages, in the background if wished: what every rank's stage gave is known to all before the next one.

Only the caller's thread ever talks to other ranks. A collective of a second thread would meet those of training in another
order on each rank, and hang or mix them up.
"""

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentatron.checkpoint.manifest import DamagedCheckpoint, read_manifest
from pentatron.checkpoint.parts import Verdict, Written
from pentatron.checkpoint.verifying import Obstacle, problem_of_share
from pentatron.errors import FolderLost, UserError
from pentatron.files import sync_folder
from pentatron.parallel.collectives import Group, gather_objects, largest
from pentatron.parallel.pieces import Fragment

if TYPE_CHECKING:
    from pentatron.checkpoint.store import CheckpointStore

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
