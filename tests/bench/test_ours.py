"""Tests that the benches compute steps of the trainer as it is now."""

from contextlib import ExitStack
from pathlib import Path

from bench.ours import build
from bench.steps import Case
from tests.harness import distributed


@distributed(world=1, process_group=False)
def test_step_of_a_bench_trains(tmp_path: Path) -> None:
    with ExitStack() as cleanup:
        step = build(Case("ours", "tiny", 2, 32, device="cpu"), "", tmp_path / "run", cleanup)
        losses = [float(step()) for _ in range(3)]
    assert losses[-1] < losses[0]
