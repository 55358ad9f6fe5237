"""Tests that rectangles cover a tensor exactly once, and that any other cover is named."""

import itertools
import math
import random
import time

import pytest

from pentatron.checkpoint.format import cover_problem
from pentatron.parallel.sharding import Shape

Part = tuple[Shape, Shape]


def cut(rng: random.Random, start: Shape, size: Shape, depth: int) -> list[Part]:
    """Returns a random tiling: cuts the rectangle in two, then each part in the same way."""
    possible = [d for d, n in enumerate(size) if n > 1]
    if depth == 0 or not possible:
        return [(start, size)]
    d = rng.choice(possible)
    n = rng.randrange(1, size[d])
    low = (*size[:d], n, *size[d + 1 :])
    high = (*size[:d], size[d] - n, *size[d + 1 :])
    middle = (*start[:d], start[d] + n, *start[d + 1 :])
    return cut(rng, start, low, depth - 1) + cut(rng, middle, high, depth - 1)


def counted(whole: Shape, parts: list[Part]) -> dict[Shape, int]:
    """Counts by brute force how often each element is covered."""
    counts = dict.fromkeys(itertools.product(*map(range, whole)), 0)
    for start, size in parts:
        for at in itertools.product(*(range(i, i + n) for i, n in zip(start, size, strict=True))):
            counts[at] += 1
    return counts


@pytest.mark.parametrize("whole", [(7,), (5, 6), (3, 4, 5), (2, 3, 2, 3)])
def test_tilings_pass_and_gaps_and_overlaps_are_named(whole: Shape) -> None:
    rng = random.Random(str(whole))
    wrong = 0
    for _ in range(60):
        parts = cut(rng, (0,) * len(whole), whole, depth=4)
        rng.shuffle(parts)
        assert cover_problem(whole, parts) is None
        _, size = parts[0]
        moved = tuple(rng.randrange(n - m + 1) for n, m in zip(whole, size, strict=True))
        for changed in (parts[1:], [*parts, parts[-1]], [(moved, size), *parts[1:]], [parts[-1], *parts[1:]]):
            bad = [at for at, n in counted(whole, changed).items() if n != 1]
            problem = cover_problem(whole, changed)
            assert (problem is None) == (not bad)
            if problem is not None:
                times = counted(whole, changed)[min(bad)]
                expected = f"covered {times} times" if times else "missing"
                assert problem == f"element {list(min(bad))} of {list(whole)} is {expected}"
                wrong += 1
    assert wrong > 60


def test_numbers_and_empty_tensors() -> None:
    assert cover_problem((), [((), ())]) is None
    assert cover_problem((), []) == "element [] of [] is missing"
    assert cover_problem((), [((), ())] * 2) == "element [] of [] is covered 2 times"
    assert cover_problem((0, 7), []) is None
    assert cover_problem((0, 7), [((0, 0), (0, 7))] * 2) is None
    assert cover_problem((4,), [((0,), (4,)), ((2,), (0,))]) is None


@pytest.mark.parametrize("part", [((0,), (5,)), ((-1,), (4,)), ((4,), (1,)), ((3,), (-1,)), ((0, 0), (4, 1))])
def test_part_outside_the_tensor_is_refused(part: Part) -> None:
    assert cover_problem((4,), [part]) is not None


def test_very_many_parts_are_checked_quickly() -> None:
    whole = (400, 300)
    parts = [((2 * i, 3 * j), (2, 3)) for i in range(200) for j in range(100)]
    random.Random(0).shuffle(parts)
    assert sum(math.prod(size) for _, size in parts) == math.prod(whole)
    began = time.perf_counter()
    assert cover_problem(whole, parts) is None
    parts[777] = parts[778]
    assert cover_problem(whole, parts) is not None
    assert time.perf_counter() - began < 5, "comparing every pair would take minutes"
