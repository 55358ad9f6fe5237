"""Pipeline schedules as data: for every pipeline rank, a list of actions.

Stages are numbered through the whole model: stage 0 holds the embedding, the last stage the head. With
virtual stages a rank holds several; `Placement` maps each stage to its rank.
"""

from dataclasses import dataclass
from enum import StrEnum

# Stage and micro-batch.
Cell = tuple[int, int]


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    # A backward in two halves: INPUT computes the gradient of the stage's input, which the previous stage
    # waits for; WEIGHT computes the gradients of the weights later, in what would otherwise be bubbles.
    INPUT = "I"
    WEIGHT = "W"
    # Messages: the activation that `stage` computed, the gradient of the activation that `stage` received.
    SEND_ACTIVATION = "SF"
    RECEIVE_ACTIVATION = "RF"
    SEND_GRADIENT = "SB"
    RECEIVE_GRADIENT = "RB"
    # Reduces the gradients of the stage over the replicas, after all of its backward passes.
    REDUCE = "R"


SENDS = {Kind.SEND_ACTIVATION: Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT: Kind.RECEIVE_GRADIENT}
RECEIVES = {receive: send for send, receive in SENDS.items()}


@dataclass(frozen=True)
class Action:
    """One action of a pipeline rank: a computation, one end of a message, or a gradient reduction.

    `stage` is the stage that computes; for messages it is the stage whose result is sent: RECEIVE_ACTIVATION
    and SEND_ACTIVATION of stage s carry the output of s (from s to s + 1), the GRADIENT pair of stage s
    carries the gradient of the input of s (from s to s − 1). `peer` is the other pipeline rank of a message.
    """

    kind: Kind
    stage: int
    micro_batch: int = 0
    peer: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}" + ("" if self.kind is Kind.REDUCE else f".{self.micro_batch}")


@dataclass(frozen=True)
class Placement:
    """Assignment of stages to pipeline ranks: `rank_of[stage]`."""

    rank_of: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @property
    def ranks(self) -> int:
        return max(self.rank_of) + 1

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(s for s, r in enumerate(self.rank_of) if r == rank)


@dataclass(frozen=True)
class Schedule:
    """The actions of every pipeline rank in one step, messages included."""

    placement: Placement
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
