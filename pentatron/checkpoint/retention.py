"""Which steps may go, and how they go: the one rule of a run's own retention and of `pentatron checkpoint prune`."""

import json
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pentatron.errors import UserError
from pentatron.files import free_name, hidden_name, make_folder, rename, write_file
from pentatron.text import parse_json

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


# Steps a run began from, where they lie among its own: kept for good, and never taken for what the run has
# reached.
#
# Without the record, a run that starts at step 0 from weights in its own folder could not tell them from its
# own saves.


FILE_NAME = "began-from.json"
_BEFORE = ".before"


@dataclass(frozen=True)
class Bases:
    """`steps`: the names of what lay in the folder when the run began. `origin`: what its weights come from; None: they were new."""

    steps: frozenset[str]
    origin: Path | None


def read_record(folder: Path) -> Bases | None:
    """What a run recorded when it began; None: nothing."""
    path = folder / FILE_NAME
    try:
        if path.exists() and not path.is_file():
            # To open a FIFO would wait for its writer.
            raise ValueError("it is not a regular file")
        found = parse_json(path.read_text(encoding="utf-8"))
        origin = found.get("from")
        return Bases(frozenset(map(str, found["steps"])), None if origin is None else Path(str(origin)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}: {error}); write the names of the steps the run began from into it, "
            f'such as {{"steps": ["step-00000000"]}}'
        ) from None


def read_bases(folder: Path) -> frozenset[str] | None:
    """The names of the steps that were there when the run began; None: nothing was recorded."""
    record = read_record(folder)
    return None if record is None else record.steps


def record_bases(folder: Path, steps: Iterable[Path], origin: Path | None) -> None:
    """Records, as the run begins, the steps that lie in its folder, and what its weights come from."""
    make_folder(folder)
    _write(folder, {step.name for step in steps}, None if origin is None else origin.absolute())


def _write(folder: Path, steps: Iterable[str], origin: Path | None) -> None:
    found = {"from": None if origin is None else str(origin), "steps": sorted(steps)}
    write_file(folder / FILE_NAME, (json.dumps(found, indent=1) + "\n").encode())


def keep_base(step: Path) -> Path:
    """Gives a step of an earlier run another name, as one of the same number is about to be saved; returns where it now lies."""
    kept = free_name(step.with_name(f"{step.name}{_BEFORE}"))
    rename(step, kept)
    record = read_record(step.parent)
    if record is not None and step.name in record.steps:
        origin = kept.absolute() if record.origin == step.absolute() else record.origin
        _write(step.parent, {*record.steps, kept.name} - {step.name}, origin)
    return kept


def restore_bases(folder: Path) -> None:
    """A step that made way for a save that never came takes its name again."""
    bases = read_bases(folder) or frozenset()
    for name in bases:
        kept = [p for p in sorted(folder.glob(f"{name}{_BEFORE}*")) if p.name not in bases]
        if kept and not (folder / name).exists():
            rename(kept[-1], folder / name)
