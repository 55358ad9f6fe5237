"""How parity is judged."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pentatron.parallel.pieces import region
from tests.parity.cases import STEPS
from tests.parity.trajectory import Sent, Trajectory

NUMBERS = 1e-5
GRADIENTS = {1: 1e-5, STEPS: 1e-4}
WEIGHTS = 1e-4
# A tensor whose gradient is far below the others' is judged by this share of the whole gradient.
SMALL = 1e-3


@dataclass(frozen=True)
class Gap:
    """One comparison: how far apart, in units of what is allowed."""

    what: str
    ratio: float

    @property
    def fails(self) -> bool:
        return not self.ratio <= 1.0


def assemble(fragments: Iterable[Sent]) -> dict[str, Tensor]:
    """The logical tensors, from every rank's fragments; each element must be there exactly once."""
    whole: dict[str, Tensor] = {}
    covered: dict[str, Tensor] = {}
    for name, shape, start, values in fragments:
        if name not in whole:
            whole[name], covered[name] = torch.zeros(shape), torch.zeros(shape, dtype=torch.int32)
        region(whole[name], start, tuple(values.shape)).copy_(values)
        region(covered[name], start, tuple(values.shape)).add_(1)
    for name, count in covered.items():
        assert count.eq(1).all(), f"{name}: some elements are there {count.min()} to {count.max()} times"
    return whole


def gathered(ranks: Sequence[Trajectory], kind: str) -> dict[str, Tensor]:
    return assemble(fragment for rank in ranks for fragment in rank.fragments[kind])


def gaps(found: Sequence[Trajectory], reference: Trajectory) -> list[Gap]:
    """Every comparison of a run on several ranks with the run on one."""
    judged = []
    for rank, seen in enumerate(found):
        if seen.tokens != reference.tokens:
            judged.append(Gap(f"tokens on rank {rank}", math.inf))
        judged += _numbers(f"loss on rank {rank}", seen.losses, reference.losses)
        judged += _numbers(f"gradient norm on rank {rank}", seen.norms, reference.norms)
        judged += _numbers(f"validation on rank {rank}", [seen.validation], [reference.validation])
    for step, tolerance in GRADIENTS.items():
        kind = f"gradients {step}"
        judged += _tensors(kind, gathered(found, kind), gathered([reference], kind), tolerance)
    weights, expected = gathered(found, "weights"), gathered([reference], "weights")
    if weights.keys() != expected.keys():
        judged.append(Gap("the set of tensors", math.inf))
    judged += [
        Gap(name, float((weights[name] - expected[name]).abs().max()) / WEIGHTS)
        for name in weights.keys() & expected.keys()
    ]
    return judged


def _numbers(what: str, found: Sequence[float], expected: Sequence[float]) -> list[Gap]:
    return [
        Gap(f"{what}, step {step}", abs(f - e) / (NUMBERS * abs(e)))
        for step, (f, e) in enumerate(zip(found, expected, strict=True), 1)
    ]


def _tensors(kind: str, found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> list[Gap]:
    everything = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    return [
        Gap(
            f"{kind} of {name.partition('/')[2]}",
            float((found[name] - g).norm()) / (tolerance * max(float(g.norm()), SMALL * everything)),
        )
        if name in found
        else Gap(f"{kind}: {name.partition('/')[2]} is missing", math.inf)
        for name, g in expected.items()
    ]


def worst(judged: Sequence[Gap]) -> Gap:
    return max(judged, key=lambda gap: math.inf if math.isnan(gap.ratio) else gap.ratio)


def failures(judged: Sequence[Gap]) -> list[str]:
    return [f"{gap.what}: {gap.ratio:.3g} times what is allowed" for gap in judged if gap.fails]
