"""Names beside those that are taken."""

import itertools
import os
from pathlib import Path


def free_name(wanted: Path) -> Path:
    """The path itself, or the first of `NAME-2`, `NAME-3`, … that does not exist."""
    number, candidate = 1, wanted
    while candidate.exists():
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    return candidate


def numbered(path: Path, separator: str) -> Path:
    """The first of `NAME.1`, `NAME.2`, … that does not exist; `separator` is what stands before the number."""
    names = (path.with_name(f"{path.name}{separator}{number}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))
