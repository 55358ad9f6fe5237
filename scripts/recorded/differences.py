"""Compares two recordings and prints every kind of difference once, with the files that have it."""

import difflib
import re
from collections import defaultdict
from pathlib import Path

SHOWN_LINES, SHOWN_KINDS = 30, 40
# A row of `pentatron config`: name, value and source, without the reason of a derived value.
_ROW = re.compile(r"  (\w+)\s{2,}(\S.*?)\s{2,}([a-z]+)\b")
_VALUE = re.compile(r"(?<![\w.-])--[a-z][\w-]*|\d[\d,.]*\d|\d")


def values_of(lines: list[str]) -> list[str]:
    """Reduces an output to the rows of settings, and to the sorted flags and numbers of the other lines."""
    rows = [match.expand(r"\1 \2 \3") for line in lines if (match := _ROW.match(line))]
    others = [value for line in lines if not _ROW.match(line) for value in _VALUE.findall(line)]
    return [*rows, *sorted(others)]


def compare(first: Path, second: Path, values_only: bool = False) -> int:
    """Prints the differences; returns 1 if there are any. `values_only` ignores the words of sentences."""
    files = [
        {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
        for root in (first, second)
    ]
    for root, names in ((first, files[0] - files[1]), (second, files[1] - files[0])):
        for name in sorted(names)[:SHOWN_KINDS]:
            print(f"only in {root}: {name}")
        if len(names) > SHOWN_KINDS:
            print(f"only in {root}: {len(names) - SHOWN_KINDS} more")
    kinds: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in sorted(files[0] & files[1]):
        before, after = ((root / name).read_text(encoding="utf-8").splitlines() for root in (first, second))
        if values_only:
            before, after = values_of(before), values_of(after)
        if before != after:
            lines = [*difflib.unified_diff(before, after, lineterm="", n=0)][2:]
            kinds[tuple(line for line in lines if not line.startswith("@@"))].append(name)
    ordered = sorted(kinds.items(), key=lambda kind: -len(kind[1]))
    for lines, names in ordered[:SHOWN_KINDS]:
        also = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print(f"\n{names[0]}{also}")
        print("\n".join(f"  {line}" for line in lines[:SHOWN_LINES]))
        if len(lines) > SHOWN_LINES:
            print(f"  ... {len(lines) - SHOWN_LINES} more lines")
    if len(ordered) > SHOWN_KINDS:
        print(f"\n... and {len(ordered) - SHOWN_KINDS} more kinds of differences; diff -r shows all")
    differing = sum(map(len, kinds.values()))
    alone = len(files[0] ^ files[1])
    print(
        f"\n{len(files[0] & files[1])} outputs in both, {differing} differ ({len(kinds)} kinds), {alone} in one only"
    )
    return int(differing + alone > 0)
