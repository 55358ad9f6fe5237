"""Which token comes next: from the logits of a model to one choice.

Draws happen on the CPU and in fp64, so that a seed gives the same text on every device and in every layout, as far as their logits agree.
The likeliest token needs no lot: it is found where the logits are, and the host is told that alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 always takes the likeliest token. `top_k` 0 and `top_p` 1 leave out nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def generator(self, number: int) -> torch.Generator:
        """Of the `number`-th prompt. Each has its own, so that a prompt's text does not depend on those beside it."""
        return torch.Generator().manual_seed(self.seed + number)


@dataclass(frozen=True)
class Choice:
    """A token, and the logarithm of the probability the model itself gave it: at temperature 1, nothing left out."""

    token: int
    logprob: float


def choices(
    logits_BV: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]
) -> list[Choice | None]:
    """One for each row, by the row's own generator; none where the logits are not all finite numbers.

    To draw, logits must be in host memory.
    """
    # What is no number is the least and the greatest of its row.
    greatest_B = logits_BV.amax(1)
    finite_B = greatest_B.isfinite() & logits_BV.amin(1).isfinite()
    if sampling.greedy:
        return _likeliest(logits_BV, greatest_B, finite_B)
    return [
        _drawn(row, sampling, each) if fine else None
        for row, each, fine in zip(logits_BV, generators, finite_B.tolist())
    ]


def _likeliest(logits_BV: Tensor, greatest_B: Tensor, finite_B: Tensor) -> list[Choice | None]:
    """All rows at once, in the precision of the logits: a whole vocabulary in fp64 takes longer than a small model's forward."""
    # Of the likeliest, the logarithm is that of the others' sum alone.
    sums_B = (logits_BV - greatest_B[:, None]).exp_().sum(1).double()
    # One copy to the host; fp64 holds any id exactly.
    found = torch.stack((logits_BV.argmax(1).double(), -sums_B.log(), finite_B.double())).tolist()
    return [Choice(int(token), logprob) if fine else None for token, logprob, fine in zip(*found)]


def _drawn(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> Choice:
    logits_V = logits_V.double()
    # Tokens stay in the order of their ids: where two are equally likely but for rounding, sorting would let the
    # rounding decide which of them the same random number means.
    reached_V = probabilities(logits_V, sampling).cumsum(0)
    drawn = torch.rand(1, dtype=torch.float64, generator=generator) * reached_V[-1]
    token = int(torch.searchsorted(reached_V, drawn, right=True))
    return Choice(token, float(logits_V.log_softmax(0)[token]))


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """Of every token, by temperature, then the `top_k` likeliest, then the fewest that reach `top_p` together."""
    # The likeliest at 0, so that no temperature is too small to divide by.
    scaled_V = (logits_V.double() - logits_V.max()) / sampling.temperature
    if 0 < sampling.top_k < len(scaled_V):
        least = scaled_V.topk(sampling.top_k).values[-1]
        scaled_V = scaled_V.masked_fill(scaled_V < least, -torch.inf)
    found_V = scaled_V.softmax(0)
    if sampling.top_p < 1:
        sorted_V, order_V = found_V.sort(descending=True, stable=True)
        # A token stays if those before it do not reach the share yet; so the first one always does.
        enough_V = sorted_V.cumsum(0) - sorted_V >= sampling.top_p
        enough_V[0] = False
        found_V[order_V[enough_V]] = 0
        found_V /= found_V.sum()
    return found_V
