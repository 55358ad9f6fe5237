"""Which steps may go, and how they go: the one rule of a run's own retention and of `pentatron checkpoint prune`."""

import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pentatron.files import hidden_name, rename

# The second is the name of a step in the format torch_dist.
_NUMBER = re.compile(r"(?:step-(\d{8,})(?:-again\d+)?|iter_(\d{7,}))")

_REPLACED = "replaced-"


@dataclass(frozen=True)
class Retention:
    """The newest `keep` steps stay (None: all), and of the others those whose number is a multiple of `every`."""

    keep: int | None = None
    every: int | None = None

    def outdated(self, steps: Sequence[Path], protected: Collection[Path] = ()) -> list[Path]:
        """Of steps, oldest first, those that may go: earlier saves of a step that was saved again, and what is not kept."""
        last = {number_of(step): step for step in steps}
        replaced = [step for step in steps if last[number_of(step)] != step]
        current = [step for step in steps if last[number_of(step)] == step]
        beyond = [] if self.keep is None else current[: max(0, len(current) - self.keep)]
        old = [step for step in beyond if not self._stays(step)]
        return [step for step in (*replaced, *old) if step not in protected]

    def _stays(self, step: Path) -> bool:
        number = number_of(step)
        return self.every is not None and number is not None and number % self.every == 0


def number_of(step: Path) -> int | None:
    """Which step a folder says it is by its name; None: it has another kind of name."""
    match = _NUMBER.fullmatch(step.name)
    return int(match[1] or match[2]) if match else None


def hidden_while_replaced(step: Path) -> Path:
    """The name of a step that makes way for another save of it."""
    return hidden_name(step.with_name(f"{_REPLACED}{step.name}"))


def restore_replaced(folder: Path) -> None:
    """A step that made way for a save that never came takes its place again."""
    for hidden in folder.glob(f".{_REPLACED}*"):
        step = folder / hidden.name.removeprefix(f".{_REPLACED}").rpartition(".")[0]
        if not step.exists():
            rename(hidden, step)


def remove_steps(folder: Path, steps: Iterable[Path]) -> None:
    """Removes steps of a folder, and what killed saves and removals have left in it."""
    restore_replaced(folder)
    for step in steps:
        # Hidden first: a deletion cut short must not leave half a step under a step's name.
        rename(step, hidden_name(step))
    for leftover in (path for kind in (".step-*", ".iter_*", f".{_REPLACED}*") for path in folder.glob(kind)):
        if leftover.is_symlink():
            leftover.unlink()
        else:
            shutil.rmtree(leftover, ignore_errors=True)
    for pointer in folder.glob(".latest.*"):
        pointer.unlink(missing_ok=True)
