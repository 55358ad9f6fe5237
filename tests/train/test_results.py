"""What is told at the end of a run."""

import pytest

from pentatron.train.results import _fall


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([4.0], "loss 4.000"),
        ([4.0, 3.0], "loss 4.000 → 3.000 (down 25 %)"),
        ([4.0] * 6 + [2.0, 2.0], "loss 4.000 → 2.000 (down 50 %)"),
        ([4.0, *[3.0] * 30, *[1.0] * 10], "loss 4.000 → 1.000 (down 75 %)"),
        ([0.0, 1.0], "loss 1.000"),
        ([1.0, 2.0], "loss 1.000 → 2.000 (up 100 %)"),
    ],
)
def test_a_short_run_is_not_averaged_with_its_beginning(losses: list[float], said: str) -> None:
    assert _fall(losses) == said
