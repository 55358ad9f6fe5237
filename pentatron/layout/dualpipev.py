"""DualPipeV: a folded pipeline in which the forward of one micro-batch runs beside the backward of another.

The schedule is DeepSeek's, in the variant that keeps each stage on one rank. Most backwards stay whole, so that a forward and
a backward can be computed together; only where the pipeline fills and drains are they cut in two.
"""

import itertools
from collections import deque
from collections.abc import Iterator

from pentatron.layout.actions import Kind
from pentatron.layout.zero_bubble import Computation, v_placement


def fewest_micro_batches(ranks: int) -> int:
    """With fewer the forwards are used up before the pipeline is full."""
    return 2 * ranks


def dualpipev_orders(ranks: int, micro_batches: int) -> list[list[Computation]]:
    return [list(_Order(ranks, micro_batches, rank).run()) for rank in range(ranks)]


class _Order:
    """The order of one rank: `down` is its stage on the way down the ranks, `back` the one on the way back."""

    def __init__(self, ranks: int, micro_batches: int, rank: int) -> None:
        self.down, self.back = v_placement(ranks).stages_of(rank)
        # How many ranks lie above this one with it, and how many below.
        self.above, self.below = rank + 1, ranks - rank - 1
        self.paired = micro_batches - 2 * ranks + self.above
        self._numbers = {
            (kind, stage): itertools.count()
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for stage in (self.down, self.back)
        }
        self._waiting: deque[tuple[int, int]] = deque()

    def run(self) -> Iterator[Computation]:
        # Fill: until the first micro-batch has been to the last rank and back, new ones can follow it.
        for _ in range(2 * self.below):
            yield self._forward(self.down)
        for _ in range(self.above):
            yield self._forward(self.down)
            yield self._forward(self.back)
        # The first gradients come back: weight gradients fill the gaps between them.
        for _ in range(self.below):
            yield self._input(self.back)
            yield self._weight()
            yield self._forward(self.back)
        # Full: each forward stands beside a backward of the other stage.
        for _ in range(self.paired):
            yield self._forward(self.down)
            yield self._backward(self.back)
            yield self._forward(self.back)
            yield self._backward(self.down)
        # Drain: no new micro-batches, then no forwards at all.
        for _ in range(self.below):
            yield self._backward(self.back)
            yield self._forward(self.back)
            yield self._backward(self.down)
        yield from self._last_backwards()
        for _ in range(self.below):
            yield self._weight()
            yield self._input(self.down)
        while self._waiting:
            yield self._weight()

    def _last_backwards(self) -> Iterator[Computation]:
        """Backwards of both stages in turn; the second half of them hurries and leaves the weights for later."""
        stages = (self.back, self.down) * self.above
        for place, stage in enumerate(stages):
            yield self._input(stage) if place >= self.above else self._backward(stage)

    def _forward(self, stage: int) -> Computation:
        return Kind.FORWARD, stage, next(self._numbers[Kind.FORWARD, stage])

    def _backward(self, stage: int) -> Computation:
        return Kind.BACKWARD, stage, next(self._numbers[Kind.BACKWARD, stage])

    def _input(self, stage: int) -> Computation:
        cell = stage, next(self._numbers[Kind.BACKWARD, stage])
        self._waiting.append(cell)
        return Kind.INPUT, *cell

    def _weight(self) -> Computation:
        return Kind.WEIGHT, *self._waiting.popleft()
