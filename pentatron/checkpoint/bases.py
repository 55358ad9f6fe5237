"""Steps a run began from, where they lie among its own: kept for good, and never taken for what the run has reached.

Without the record, a run that starts at step 0 from weights in its own folder could not tell them from its own saves.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from pentatron.config.errors import UserError
from pentatron.config.parsing import parse_json
from pentatron.data.atomic import write_file

FILE_NAME = "began-from.json"


def read_bases(folder: Path) -> frozenset[str] | None:
    """The names of the steps that were there when the run began; None: nothing was recorded."""
    path = folder / FILE_NAME
    try:
        return frozenset(map(str, parse_json(path.read_text(encoding="utf-8"))["steps"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({type(error).__name__}: {error}); write the names of the steps the run began from into it, "
            f'such as {{"steps": ["step-00000000"]}}'
        ) from None


def record_bases(folder: Path, steps: Iterable[Path], origin: Path | None) -> None:
    """Records, as the run begins, the steps that lie in its folder, and what its weights come from."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {"from": None if origin is None else str(origin), "steps": sorted(step.name for step in steps)}
    text = json.dumps(found, indent=1) + "\n"
    write_file(folder / FILE_NAME, text.encode())
