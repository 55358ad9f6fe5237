"""Verdicts on compared runs: failed comparisons, the largest gap, and replicas that differ."""

from collections.abc import Sequence

from pentatron.compare.trial import Gap, Trajectory, gap_size


def disagreements(ranks: Sequence[Trajectory]) -> list[str]:
    """Lists regions of weights that differ between the ranks that hold them."""
    digests: dict[tuple[str, tuple[int, ...], tuple[int, ...]], str] = {}
    return [
        f"{region[0]} on rank {number}"
        for number, rank in enumerate(ranks)
        for region, digest in rank.weight_digests.items()
        if digests.setdefault(region, digest) != digest
    ]


def largest_gap(judged: Sequence[Gap]) -> Gap:
    return max(judged, key=gap_size)


def failures(judged: Sequence[Gap]) -> list[str]:
    return [f"{gap.what}: {gap.ratio:.3g} times what is allowed" for gap in judged if gap.fails]
