"""Divisors of a number, and the text of a list of choices."""

import pytest

from pentatron.text import divisors, join_choices


@pytest.mark.parametrize("number", [1, 2, 7, 12, 36, 97, 1024, 12288])
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ([1], "1"),
        ([1, 2], "1 or 2"),
        ([1, 2, 3, 4, 6, 12], "1, 2, 3, 4, 6 or 12"),
        (list(range(1, 13)), "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 or 12"),
        (list(range(1, 21)), "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ... or 20"),
    ],
)
def test_either(choices: list[int], words: str) -> None:
    assert join_choices(choices) == words
