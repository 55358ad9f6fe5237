"""Draws the pictures of docs/ from schedules, grids, layouts and benchmark results (`make pictures`).

    python scripts/draw_pictures.py [folder]    # default: docs/images

tests/test_pages.py compares the files with this output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "scripts"))

from pictures.context import context_chunks  # noqa: E402
from pictures.experts import expert_dispatch  # noqa: E402
from pictures.ranks import rank_groups  # noqa: E402
from pictures.speed import speeds  # noqa: E402
from pictures.step import step_lanes  # noqa: E402
from pictures.zero import zero_stages  # noqa: E402

from bench.performance_page import read_results  # noqa: E402
from bench.whole_page import RESULTS  # noqa: E402
from pentatron.cli.layout import draw_svg  # noqa: E402
from pentatron.layout.check import check  # noqa: E402
from pentatron.layout.ranks import Grid  # noqa: E402
from pentatron.layout.schedules import training_schedule  # noqa: E402

# Kind, ranks, virtual stages, micro-batches.
SCHEDULES = (
    ("1f1b", 4, 1, 8),
    ("interleaved", 4, 2, 8),
    ("zero-bubble", 4, 1, 8),
    ("zbv", 4, 2, 8),
    ("dualpipev", 4, 2, 8),
)


def pictures() -> Iterator[tuple[str, str]]:
    """Yields the file name and the content of every picture."""
    yield "step.svg", step_lanes(2, 4)
    yield (
        "ranks-tp2-pp2-dp2.svg",
        rank_groups(Grid(tensor=2, data=2, pipeline=2), ("tensor", "pipeline", "data")),
    )
    grid = Grid(tensor=2, context=2, data=2, pipeline=2)
    yield "ranks-tp2-cp2-pp2-dp2.svg", rank_groups(grid, ("tensor", "context", "pipeline", "replicas"))
    for kind, ranks, virtual, micro_batches in SCHEDULES:
        schedule = training_schedule(kind, ranks, virtual, micro_batches)
        checked = check(schedule)
        title = f"{kind}: {ranks} ranks, {micro_batches} micro-batches, waiting {checked.bubble:.1%}"
        yield f"schedule-{kind}.svg", draw_svg(checked, schedule.placement, title)
    yield "zero.svg", zero_stages(4)
    yield "context.svg", context_chunks(4)
    yield "experts.svg", expert_dispatch()
    yield "speed.svg", speeds(read_results(ROOT / RESULTS))


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/images"
    for name, drawn in pictures():
        (folder / name).write_text(drawn, encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main()
