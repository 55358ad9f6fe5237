"""Grid of parallel dimensions: the mapping from ranks to coordinates and process groups, in plain integers.

Ranks are numbered with the tensor axis fastest, then context, data and pipeline:
`rank = tp + TP·(cp + CP·(dp + DP·pp))`. Experts live inside the dense ranks of one pipeline stage
(`DP·CP·TP = EDP·EP·ETP`, expert-tensor fastest), so the expert size is no factor of the world size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pentatron.text import plural

Dense = Literal["tensor", "context", "data", "pipeline"]
# Sparse axes, which partition the same ranks of a stage for experts.
Sparse = Literal["expert_tensor", "expert", "expert_data"]
# Replicas may partition parameters (ZeRO) in several groups, each with a full copy: `shards` are the ranks of
# one group, `instances` those with the same shard in different groups. The same for experts.
Sharding = Literal["shards", "instances", "expert_shards", "expert_instances"]
Axis = Literal[
    Dense,
    Sparse,
    # Ranks with the same weights and other tokens (data × context).
    "replicas",
    # Neighbours on the tensor axis that hold the same key/value head.
    "kv",
    # The first and the last stage, which share a tied embedding.
    "embedding",
    # Ranks that share the tokens of a micro-batch (tensor × context).
    "sequence",
    # Ranks that together hold all experts of a layer (expert × expert tensor).
    "experts",
    Sharding,
]


_DENSE: tuple[Axis, ...] = get_args(Dense)
_SPARSE: tuple[Axis, ...] = (*get_args(Sparse), "pipeline")
_COMBINED: dict[Axis, tuple[Axis, ...]] = {
    "replicas": ("data", "context"),
    "sequence": ("tensor", "context"),
    "experts": ("expert", "expert_tensor"),
}


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of one rank on every axis."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int = 0
    expert: int = 0
    expert_data: int = 0


@dataclass(frozen=True)
class Grid:
    """Sizes of the parallel dimensions. `kv_copies` consecutive tensor ranks hold the same key/value head.

    Replicas partition parameters (ZeRO) in `instances` separate groups of neighbours.
    """

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    kv_copies: int = 1
    instances: int = 1

    @property
    def model_size(self) -> int:
        """Number of ranks that hold one copy of the model."""
        return self.tensor * self.context * self.pipeline

    @property
    def world_size(self) -> int:
        return self.model_size * self.data

    @property
    def stage_size(self) -> int:
        """Number of ranks of one pipeline stage, which the dense and the sparse axes both partition."""
        return self.tensor * self.context * self.data

    @property
    def expert_data(self) -> int:
        return self.stage_size // (self.expert * self.expert_tensor)

    def coordinates(self, rank: int) -> Coordinates:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        rest, expert_tensor = divmod(rank % self.stage_size, self.expert_tensor)
        expert_data, expert = divmod(rest, self.expert)
        return Coordinates(tensor, context, data, pipeline, expert_tensor, expert, expert_data)

    def rank(self, at: Coordinates) -> int:
        return at.tensor + self.tensor * (at.context + self.context * (at.data + self.data * at.pipeline))

    def groups(self, axis: Axis) -> list[tuple[int, ...]]:
        """Partitions all ranks into groups that differ along `axis` only, each in the order of that axis."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            groups.setdefault(self._group_key(axis, rank), []).append(rank)
        return [tuple(members) for members in groups.values()]

    def _group_key(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Returns the coordinates that all members of a rank's group share."""
        at = self.coordinates(rank)
        if axis == "kv":
            return (at.tensor // self.kv_copies, at.context, at.data, at.pipeline)
        if axis == "embedding":
            ends = at.pipeline in (0, self.pipeline - 1)
            return (at.tensor, at.context, at.data, -1 if ends else at.pipeline)
        if axis in ("shards", "instances"):
            number, each = at.data * self.context + at.context, self.data * self.context // self.instances
            return at.tensor, at.pipeline, divmod(number, each)[axis == "instances"]
        if axis in ("expert_shards", "expert_instances"):
            part = divmod(at.expert_data, self.expert_data // self.instances)[axis == "expert_instances"]
            return at.expert_tensor, at.expert, at.pipeline, part
        varying = _COMBINED.get(axis, (axis,))
        axes = _DENSE if varying[0] in _DENSE else _SPARSE
        return tuple(getattr(at, name) for name in axes if name not in varying)


def expert_size_problem(data: int, context: int, tensor: int, expert: int, expert_tensor: int) -> str | None:
    """Returns why the sparse axes cannot partition the ranks of a stage (DP·CP·TP = EDP·EP·ETP), or None."""
    stage, experts = data * context * tensor, expert * expert_tensor
    if stage % experts == 0:
        return None
    ranks = f"{data} (data) × {context} (context) × {tensor} (tensor) = {stage} ranks of a stage"
    product = f"{expert} (expert) × {expert_tensor} (expert tensor) = {experts}"
    return f"{ranks} are no multiple of {product}; use sizes of which the second divides the first"


def world_size_problem(world_size: int, tensor: int, pipeline: int, context: int) -> str | None:
    """Returns why `world_size` processes do not fit the parallel sizes, or None."""
    model = tensor * pipeline * context
    if world_size % model == 0:
        return None
    equation = f"{tensor} (tensor) × {pipeline} (pipeline) × {context} (context) = {model}"
    if world_size < model:
        few = f"{world_size} process{'es are' if world_size > 1 else ' is'} too few"
        fix = f"start {model} processes or a multiple, or lower the parallel sizes"
        return f"{few}: one copy of the model needs {equation}; {fix}"
    down = world_size - world_size % model
    copies = f"copies of the model of {equation} processes each"
    fix = f"use {down} or {down + model} processes, or other parallel sizes"
    return f"{world_size} processes cannot be divided into {copies}; {fix}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    if len(ranks) > 6:
        return f"{len(ranks)} ranks ({ranks[0]} to {ranks[-1]})"
    return f"{plural(len(ranks), 'rank')} {', '.join(map(str, ranks))}"
