"""Tests that every family trains like `transformers`, in one process and in layouts (`make families`)."""

import pytest

from tests.hf.families import CASES, Case
from tests.hf.layouts import SPREADS, Spread
from tests.hf.oracle import STEPS, compare, run

FEW = 3


def _in_turn() -> list[tuple[Case, Spread]]:
    """Returns every case in one layout, and every layout with some case."""
    spreads = [spread for spread in SPREADS if spread.ranks > 1]
    found = []
    for number, case in enumerate(CASES):
        suiting = [spread for spread in spreads if spread.suits(case)]
        # Mixtures of experts take layouts with expert parallelism first.
        suiting.sort(key=lambda spread: not (case.has_experts and spread.experts_only))
        found.append((case, suiting[number % (2 if case.has_experts else len(suiting))]))
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_process(case: Case) -> None:
    assert compare(case, run(case, "--micro-batch-size 4", 1, STEPS)).failures == []


@pytest.mark.parametrize(("case", "spread"), _in_turn(), ids=lambda value: value.name)
def test_in_a_layout(case: Case, spread: Spread) -> None:
    gaps = compare(case, run(case, spread.command, spread.ranks, FEW))
    # The reference weights are those after all steps: a short run compares only losses and gradients.
    assert [failure for failure in gaps.failures if not failure.startswith("weights")] == []


def test_every_layout_has_its_turn() -> None:
    assert {spread.name for _, spread in _in_turn()} == {s.name for s in SPREADS if s.ranks > 1}


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ("--rotary-base 9000", {"logits", "gradients", "losses", "weights"}),
        ("--layernorm-epsilon 1e-4", {"logits", "gradients", "losses", "weights"}),
        ("--adam-eps 1e-3", {"losses", "weights"}),
        ("--weight-decay 0.0", {"weights"}),
    ],
)
def test_a_difference_is_seen(words: str, seen: set[str]) -> None:
    """A changed setting shows in the values it affects; one of the optimizer leaves logits unchanged."""
    case = next(case for case in CASES if case.name == "llama2")
    gaps = compare(case, run(case, f"--micro-batch-size 4 {words}", 1))
    assert seen <= {failure.partition(":")[0] for failure in gaps.failures}
    assert ("logits" in seen) == ("logits" in {failure.partition(":")[0] for failure in gaps.failures})
