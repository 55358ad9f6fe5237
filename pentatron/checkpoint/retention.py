"""Which checkpoint steps are kept and how others are removed, for runs and for `pentatron checkpoint prune`.

Records base steps.
"""

import json
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pentatron.errors import UserError
from pentatron.files import free_name, hidden_name, make_folder, rename, write_file
from pentatron.parallel.serialization import sendable
from pentatron.text import parse_json

# Names of steps in our format and in the format torch_dist.
STEP_NAME = re.compile(r"step-(\d{8,})(?:-again(\d+))?|iter_(\d{7,})")

_REPLACED = "replaced-"


@dataclass(frozen=True)
class Retention:
    """Retains the newest `keep` steps (None: all), and steps whose number is a multiple of `every`."""

    keep: int | None = None
    every: int | None = None

    def outdated(self, steps: Sequence[Path], protected: Collection[Path] = ()) -> list[Path]:
        """Returns the steps to remove: replaced saves of the same step, and those not retained.

        `steps` is oldest first.
        """
        last = {step_number(step): step for step in steps}
        replaced = [step for step in steps if last[step_number(step)] != step]
        current = [step for step in steps if last[step_number(step)] == step]
        beyond = [] if self.keep is None else current[: max(0, len(current) - self.keep)]
        if self.every is not None:
            beyond = [step for step in beyond if (step_number(step) or 0) % self.every]
        return [step for step in (*replaced, *beyond) if step not in protected]


def step_number(step: Path) -> int | None:
    """Returns the step number in a folder's name, or None."""
    match = STEP_NAME.fullmatch(step.name)
    return int(match[1] or match[3]) if match else None


def replaced_name(step: Path) -> Path:
    """Temporary name of a step while another save of it is committed."""
    return hidden_name(step.with_name(f"{_REPLACED}{step.name}"))


def restore_replaced(folder: Path) -> None:
    """Restores steps that were renamed for a save that was never committed."""
    for hidden in folder.glob(f".{_REPLACED}*"):
        step = folder / hidden.name.removeprefix(f".{_REPLACED}").rpartition(".")[0]
        if not step.exists():
            rename(hidden, step)


def remove_steps(folder: Path, steps: Iterable[Path]) -> None:
    """Removes steps of a folder, and leftovers of interrupted saves and removals."""
    restore_replaced(folder)
    for step in steps:
        # Renamed first: an interrupted deletion must not leave a partial step under a step's name.
        rename(step, hidden_name(step))
    for leftover in (path for kind in (".step-*", ".iter_*", f".{_REPLACED}*") for path in folder.glob(kind)):
        if leftover.is_symlink():
            leftover.unlink()
        else:
            shutil.rmtree(leftover, ignore_errors=True)
    for pointer in folder.glob(".latest.*"):
        pointer.unlink(missing_ok=True)


# --- base steps: steps that were in the folder when the run began ---
#
# They are never removed or counted as progress of the run. Without the record, a run that starts at step 0
# from weights in its own folder could not distinguish them from its own saves.


BASE_STEPS_FILE = "began-from.json"
_BEFORE = ".before"


@sendable
@dataclass(frozen=True)
class BaseSteps:
    """`steps`: names of the steps in the folder when the run began.

    `origin`: source of its weights; None: initialised. `is_recorded`: whether the run recorded any of this.
    """

    steps: frozenset[str] = frozenset()
    origin: Path | None = None
    is_recorded: bool = True


def read_base_steps(folder: Path) -> BaseSteps:
    """Returns what the run recorded when it began."""
    path = folder / BASE_STEPS_FILE
    try:
        if path.exists() and not path.is_file():
            # Opening a FIFO would block.
            raise ValueError("it is not a regular file")
        record = parse_json(path.read_text(encoding="utf-8"))
        origin = record.get("from")
        return BaseSteps(frozenset(map(str, record["steps"])), None if origin is None else Path(str(origin)))
    except FileNotFoundError:
        return BaseSteps(is_recorded=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}: {error}); write the names of the steps the run began from into it, "
            f'such as {{"steps": ["step-00000000"]}}'
        ) from None


def write_base_record(folder: Path, steps: Iterable[Path], origin: Path | None) -> None:
    """Records the steps in the folder as the run begins, and the source of its weights."""
    make_folder(folder)
    _write_record(folder, {step.name for step in steps}, None if origin is None else origin.absolute())


def _write_record(folder: Path, steps: Iterable[str], origin: Path | None) -> None:
    record = {"from": None if origin is None else str(origin), "steps": sorted(steps)}
    write_file(folder / BASE_STEPS_FILE, (json.dumps(record, indent=1) + "\n").encode())


def rename_base(step: Path) -> Path:
    """Renames a base step whose number is about to be saved by this run. Returns its new path."""
    renamed = free_name(step.with_name(f"{step.name}{_BEFORE}"))
    rename(step, renamed)
    record = read_base_steps(step.parent)
    if step.name in record.steps:
        origin = renamed.absolute() if record.origin == step.absolute() else record.origin
        _write_record(step.parent, {*record.steps, renamed.name} - {step.name}, origin)
    return renamed


def restore_bases(folder: Path) -> None:
    """Restores the names of base steps that were renamed for a save that was never committed."""
    bases = read_base_steps(folder).steps
    for name in bases:
        renamed = [p for p in sorted(folder.glob(f"{name}{_BEFORE}*")) if p.name not in bases]
        if renamed and not (folder / name).exists():
            rename(renamed[-1], folder / name)
