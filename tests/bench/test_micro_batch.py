"""Tests the search for the largest micro-batch, with trials whose memory is known."""

import pytest

from pentatron.bench.candidates import Trial, find_largest, largest_fitting, trial_table
from pentatron.text import divisors

ALL = range(1, 4097)


def attempt_within(room: float, held: float, each: float, tried: list[int]):  # type: ignore[no-untyped-def]
    def attempt(size: int) -> Trial:
        tried.append(size)
        needed = held + each * size
        return Trial(size, True, needed, 1000.0) if needed <= room else Trial(size, False)

    return attempt


@pytest.mark.parametrize("first", [1, 7, 40, 4096])
@pytest.mark.parametrize("fitting", [1, 2, 3, 11, 37, 1000, 4096])
@pytest.mark.parametrize("misleading", [1.0, 1.3, 0.8])
def test_the_largest_that_fits_is_found(fitting: int, first: int, misleading: float) -> None:
    """Finds the largest size from any start, also with a limit that is 30 % too high or 20 % too low."""
    tried: list[int] = []
    room = 40.0 + 5.0 * (fitting + 0.5)
    trials = find_largest(ALL, first, misleading * room, attempt_within(room, 40.0, 5.0, tried))
    found = largest_fitting(trials)
    assert found is not None and found.size == fitting
    assert len(tried) == len(set(tried)) <= 24


@pytest.mark.parametrize("first", [11, 12, 13, 14])
def test_a_good_estimate_takes_few_trials(first: int) -> None:
    tried: list[int] = []
    trials = find_largest(ALL, first, 98.0, attempt_within(98.0, 40.0, 4.6, tried))
    found = largest_fitting(trials)
    assert found is not None and found.size == 12 and len(tried) <= 4


def test_only_sizes_that_divide_the_batch() -> None:
    tried: list[int] = []
    trials = find_largest(divisors(24), 5, None, attempt_within(10.5, 0.0, 1.0, tried))
    found = largest_fitting(trials)
    assert found is not None and found.size == 8 and set(tried) <= {1, 2, 3, 4, 6, 8, 12, 24}


def test_nothing_fits() -> None:
    trials = find_largest(ALL, 16, 1.0, attempt_within(1.0, 40.0, 5.0, []))
    assert largest_fitting(trials) is None and trials[-1].size == 1


def test_the_table_is_by_size() -> None:
    shown = trial_table(
        [Trial(8, True, 3 * 2**30, 1234.0), Trial(16, False, reason="out of memory"), Trial(4, True)]
    )
    assert [line.split()[0] for line in shown[1:]] == ["4", "8", "16"]
    assert shown[2].split() == ["8", "3.00", "GiB", "1,234"] and shown[3].endswith("out of memory")
