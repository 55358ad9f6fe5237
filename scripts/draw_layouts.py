"""Updates the outputs of `pentatron layout` that the documents show.

A line `...` after the command leaves out what comes before the schedule's memory.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "docs/use/layouts.md",
    "docs/zh/use/layouts.md",
    "docs/how-it-works/parallelism.md",
    "docs/zh/how-it-works/parallelism.md",
)
BLOCK = re.compile(r"^\$ pentatron (layout [^\n]*)\n(\.\.\.\n)?.*?(?=^```$)", re.MULTILINE | re.DOTALL)


def drawn(block: re.Match[str]) -> str:
    words, cut = block[1], block[2] or ""
    shown = subprocess.run(
        [sys.executable, "-m", "pentatron", *words.split()],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "110"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if cut:
        lines = shown.splitlines(keepends=True)
        shown = "".join(lines[next(i for i, line in enumerate(lines) if "kept for backward" in line) :])
    return f"$ pentatron {words}\n{cut}{shown}"


def main() -> None:
    for page in PAGES:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        path.write_text(BLOCK.sub(drawn, text), encoding="utf-8")


if __name__ == "__main__":
    main()
