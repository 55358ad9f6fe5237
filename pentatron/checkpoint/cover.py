"""Whether some rectangles make up a tensor exactly."""

import itertools
from collections.abc import Iterable

from pentatron.parallel.pieces import Shape


def cover_problem(whole: Shape, parts: Iterable[tuple[Shape, Shape]]) -> str | None:
    """Why the parts, each (start, size), do not hold every element of `whole` exactly once, or None.

    How often an element is held is a function that changes at the corners of the parts alone: their sum is the
    whole if, and only if, all corners but those of the whole cancel. That takes one pass, however many parts
    there are and however they lie.
    """
    signs = [-1 if sum(ends) % 2 else 1 for ends in itertools.product((0, 1), repeat=len(whole))]
    surplus: dict[Shape, int] = {}

    def add(start: Shape, stop: Shape, times: int) -> None:
        for sign, corner in zip(signs, itertools.product(*zip(start, stop, strict=True)), strict=True):
            left = surplus.pop(corner, 0) + sign * times
            if left:
                surplus[corner] = left

    for start, size in parts:
        if not len(start) == len(size) == len(whole):
            return f"a part of {list(size)} elements at {list(start)} has not the dimensions of {list(whole)}"
        stop = tuple(i + n for i, n in zip(start, size, strict=True))
        if not all(0 <= i <= j <= n for i, j, n in zip(start, stop, whole, strict=True)):
            return f"a part of {list(size)} elements at {list(start)} lies outside {list(whole)}"
        add(start, stop, 1)
    add((0,) * len(whole), whole, -1)
    if not surplus:
        return None
    # No corner lies before the first one that is left, so what is left there is what is wrong with that element.
    first = min(surplus)
    times = surplus[first] + 1
    return f"element {list(first)} of {list(whole)} is " + (f"there {times} times" if times else "missing")
