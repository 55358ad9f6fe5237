"""How two runs of the same model are compared, number by number and tensor by tensor: what one rank saw, and the verdict."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pentatron.parallel.pieces import region

STEPS = 5
NUMBERS = 1e-5
GRADIENTS = {1: 1e-5, STEPS: 1e-4}
WEIGHTS = 1e-4
# A tensor whose gradient is far below the others' is judged by this share of the whole gradient.
SMALL = 1e-3

# What a fragment becomes on its way to the process that compares: name, logical shape, start, values.
Sent = tuple[str, tuple[int, ...], tuple[int, ...], Tensor]


@dataclass
class Trajectory:
    """What one rank saw of the run: the same numbers everywhere, and its own fragments of tensors."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    # "gradients 1", "gradients 5" or of whatever step is the last, "weights": fragments that cover each logical tensor once over the world.
    fragments: dict[str, list[Sent]] = field(default_factory=dict)
    validation: float = 0.0
    # Of every weight rectangle this rank holds, owned or not: where it is, and a digest of its bytes.
    held: dict[tuple[str, tuple[int, ...], tuple[int, ...]], str] = field(default_factory=dict)


@dataclass(frozen=True)
class Gap:
    """One comparison: how far apart, in units of what is allowed; of a tensor, also its name and what of it."""

    what: str
    ratio: float
    tensor: str = ""
    kind: str = ""

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
    last = len(reference.losses)
    for step, tolerance in ((1, GRADIENTS[1]), (last, GRADIENTS[STEPS])):
        kind = f"gradients {step}"
        judged += _tensors(kind, gathered(found, kind), gathered([reference], kind), tolerance)
    weights, expected = gathered(found, "weights"), gathered([reference], "weights")
    if weights.keys() != expected.keys():
        judged.append(Gap("the set of tensors", math.inf))
    judged += [
        Gap(name, float((weights[name] - values).abs().max()) / WEIGHTS, _bare(name), "weights")
        for name, values in expected.items()
        if name in weights
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
            f"{kind} of {_bare(name)}",
            float((found[name] - g).norm()) / (tolerance * max(float(g.norm()), SMALL * everything)),
            _bare(name),
            kind,
        )
        if name in found
        else Gap(f"{kind}: {_bare(name)} is missing", math.inf, _bare(name), kind)
        for name, g in expected.items()
    ]


def disagreements(ranks: Sequence[Trajectory]) -> list[str]:
    """Rectangles of weights that several ranks hold, with different bits."""
    seen: dict[tuple[str, tuple[int, ...], tuple[int, ...]], str] = {}
    return [
        f"{place[0]} on rank {number}"
        for number, rank in enumerate(ranks)
        for place, digest in rank.held.items()
        if seen.setdefault(place, digest) != digest
    ]


def _bare(name: str) -> str:
    """The parameter's own name: fragments carry what they are in front of it."""
    return name.partition("/")[2] or name


def worst(judged: Sequence[Gap]) -> Gap:
    return max(judged, key=size)


def size(gap: Gap) -> float:
    return math.inf if math.isnan(gap.ratio) else gap.ratio


def failures(judged: Sequence[Gap]) -> list[str]:
    return [f"{gap.what}: {gap.ratio:.3g} times what is allowed" for gap in judged if gap.fails]
