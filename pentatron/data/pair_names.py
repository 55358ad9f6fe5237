"""The names of `.bin/.idx` pairs, and what was meant by a name that no pair has."""

import glob
from collections.abc import Sequence
from pathlib import Path

from pentatron.text import plural


def pair_paths(prefix: Path | str) -> tuple[Path, Path]:
    """The `.bin` and `.idx` of a prefix; a prefix may itself contain dots."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def missing_pairs(prefixes: Sequence[Path | str]) -> str:
    """What to say of prefixes without their two files; empty if all are there."""
    gone = {prefix: path for prefix in prefixes if (path := _missing(prefix)) is not None}
    if not gone:
        return ""
    files = ", ".join(str(path) for path in gone.values())
    return f"no {plural(len(gone), 'data file')} {files}; {_meant(Path(next(iter(gone))))}"


def _missing(prefix: Path | str) -> Path | None:
    binary, index = pair_paths(prefix)
    return next((path for path in (index, binary) if not path.is_file()), None)


def _meant(prefix: Path) -> str:
    whole = prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") else None
    if whole is not None and _missing(whole) is None:
        return f"give {whole}, without the ending"
    # The name that `prepare` was told is the beginning of those of its files.
    begun = prefix.parent.glob(f"{glob.escape(prefix.name)}*.idx") if prefix.name else iter(())
    inside = prefix.glob("*.idx") if prefix.is_dir() else iter(())
    pairs = [path.with_suffix("") for found in (inside, begun) for path in sorted(found)]
    near = next((pair for pair in pairs if _missing(pair) is None), None)
    if near is not None:
        return f"did you mean {near}?"
    return "give the prefix of a prepared .bin/.idx pair without its ending"
