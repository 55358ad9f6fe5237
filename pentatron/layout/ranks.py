"""Which rank sits where: the grid of parallel dimensions, in plain integers.

Ranks are numbered with the tensor axis fastest, then context, data and pipeline:
`rank = tp + TP·(cp + CP·(dp + DP·pp))`. Experts live inside the dense ranks of one pipeline stage
(`DP·CP·TP = EDP·EP·ETP`), so the expert size is no factor of the world size.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Coordinates:
    """Where one rank sits on every axis."""

    tensor: int
    context: int
    data: int
    pipeline: int


@dataclass(frozen=True)
class Grid:
    """The sizes of the parallel dimensions."""

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1

    @property
    def model_size(self) -> int:
        """Ranks that hold one copy of the model between them."""
        return self.tensor * self.context * self.pipeline

    @property
    def world_size(self) -> int:
        return self.model_size * self.data

    def coordinates(self, rank: int) -> Coordinates:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(tensor, context, data, pipeline)

    def rank(self, at: Coordinates) -> int:
        return at.tensor + self.tensor * (at.context + self.context * (at.data + self.data * at.pipeline))

    def data_group(self, rank: int) -> list[int]:
        """The ranks that hold the same part of the model as `rank` and see other data."""
        here = self.coordinates(rank)
        return [
            self.rank(Coordinates(here.tensor, here.context, data, here.pipeline))
            for data in range(self.data)
        ]


def world_size_problem(world_size: int, tensor: int, pipeline: int, context: int) -> str | None:
    """Why `world_size` processes cannot be arranged so, or None."""
    model = tensor * pipeline * context
    if world_size % model == 0:
        return None
    equation = f"{tensor} (tensor) × {pipeline} (pipeline) × {context} (context) = {model}"
    if world_size < model:
        return (
            f"{world_size} process{'es are' if world_size > 1 else ' is'} too few: one copy of the model needs "
            f"{equation}; start {model} processes or a multiple, or lower the parallel sizes"
        )
    down = world_size - world_size % model
    return (
        f"{world_size} processes cannot be divided into copies of the model of {equation} processes each; "
        f"use {down} or {down + model} processes, or other parallel sizes"
    )
