"""Names beside those that are taken."""

from pathlib import Path


def free_name(wanted: Path) -> Path:
    """The path itself, or the first of `NAME-2`, `NAME-3`, … that does not exist."""
    number, candidate = 1, wanted
    while candidate.exists():
        number += 1
        candidate = wanted.with_name(f"{wanted.name}-{number}")
    return candidate
