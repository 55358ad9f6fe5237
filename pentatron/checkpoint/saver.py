"""The saves of a run, one after the other, at once or in the background."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pentatron.checkpoint.host_copy import HostCopy
from pentatron.checkpoint.parts import own_fragments
from pentatron.checkpoint.stages import Stages
from pentatron.checkpoint.store import CheckpointStore
from pentatron.parallel.collectives import Group
from pentatron.parallel.pieces import Fragment


@dataclass(frozen=True)
class Saved:
    """A step that is committed. `note`: what else should be told."""

    step: int
    folder: Path
    note: str = ""


class Saver:
    """In the background, files are written by threads while training goes on; all agreement is made by whoever calls here.

    That must be every rank, at the same points: `begin`, and `settle` between steps and at the end.
    """

    def __init__(
        self, store: CheckpointStore, group: Group, background: bool, say: Callable[[str], None]
    ) -> None:
        self.store, self.group, self.background = store, group, background
        self._say = say
        self._copy = HostCopy()
        self._under_way: tuple[int, Stages] | None = None
        self._told = False

    def begin(
        self,
        step: int,
        steady: Iterable[Fragment],
        changing: Iterable[Fragment],
        own: Mapping[str, Tensor],
        run_state: Mapping[str, Any],
        config: Mapping[str, Any],
    ) -> None:
        """Saves, or begins to: then `steady` must not change before `wait_until_copied`. An earlier save must be settled."""
        assert self._under_way is None, "one save at a time"
        held, moving = list(steady), [*changing, *own_fragments(own)]
        if self.background:
            parts = self._copy.begin(held, moving)
        else:
            together = [*held, *moving]

            def parts() -> list[Fragment]:
                return together

        try:
            stages = self.store.start(step, parts, run_state, config, self.group, self.background)
        except BaseException:
            # Nobody will copy: an update must not wait for it.
            self._copy.give_up()
            raise
        self._under_way = step, stages

    @property
    def under_way(self) -> int | None:
        """The step that is being saved."""
        return None if self._under_way is None else self._under_way[0]

    def settle(self, wait: bool) -> Saved | None:
        """The step whose save has ended since, if there is one; its failure is raised, on all ranks alike. Every rank must ask."""
        if self._under_way is None:
            return None
        step, stages = self._under_way
        verdicts = stages.advance(wait)
        if verdicts is None:
            return None
        self._under_way = None
        return Saved(step, self.store.outcome(step, verdicts), verdicts[0].note)

    def settle_before_next(self) -> Saved | None:
        """The same before another save, which has to wait: told once, as whoever saves so often should know."""
        if self._under_way is None:
            return None
        step = self._under_way[0]
        saved = self.settle(wait=False)
        if saved is None and not self._told:
            self._told = True
            self._say(
                f"note: the checkpoint of step {step} is still being written: training waits for it before the next one (a longer "
                f"--save-interval, or a faster disk, avoids that)"
            )
        return saved or self.settle(wait=True)

    def wait_until_copied(self) -> None:
        """Before anything is changed that is being saved."""
        self._copy.wait()
