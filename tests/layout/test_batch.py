"""Samples of one step = micro-batch × data-parallel ranks × accumulation."""

import pytest

from pentatron.layout.batch import accumulation_steps, batch_size_problem


@pytest.mark.parametrize(
    ("total", "micro", "ranks", "steps"), [(64, 1, 2, 32), (64, 1, 8, 8), (1536, 1, 1, 1536), (16, 2, 8, 1), (24, 2, 4, 3)]
)  # fmt: skip
def test_accumulation(total: int, micro: int, ranks: int, steps: int) -> None:
    assert accumulation_steps(total, micro, ranks) == steps
    assert micro * ranks * steps == total
    assert batch_size_problem(total, micro, ranks) is None


@pytest.mark.parametrize(
    ("total", "micro", "ranks", "sentence"),
    [
        (12, 5, 2,
         "global batch size (12) is not divisible by micro batch size (5) times data parallel size (2) = 10; "
         "use --micro-batch-size 1, 2, 3 or 6"),
        (13, 2, 4,
         "global batch size (13) is not divisible by micro batch size (2) times data parallel size (4) = 8; "
         "use --global-batch-size 16 or another number of processes"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit(total: int, micro: int, ranks: int, sentence: str) -> None:
    assert batch_size_problem(total, micro, ranks) == sentence
    with pytest.raises(ValueError) as error:
        accumulation_steps(total, micro, ranks)
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("total", "micro", "ranks"), [(12, 5, 2), (30, 4, 3), (100, 7, 4), (13, 2, 4), (7, 3, 5)]
)
def test_the_suggested_fix_is_one(total: int, micro: int, ranks: int) -> None:
    fix = str(batch_size_problem(total, micro, ranks)).split("; use ")[1]
    number = int(fix.split()[1].rstrip(","))
    if fix.startswith("--micro-batch-size"):
        assert batch_size_problem(total, number, ranks) is None
    else:
        assert batch_size_problem(number, micro, ranks) is None and number >= total
