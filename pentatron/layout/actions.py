"""The vocabulary of pipeline schedules: a schedule is, for every pipeline rank, a list of actions.

Stages are numbered through the whole model: stage 0 holds the embedding, the last stage the head. With virtual
stages a rank holds several; where each one sits is part of the schedule (`Placement`).
"""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    # A backward in two halves: first what the stage before waits for, the gradient of the stage's input; later, when
    # nothing else can be done, the gradients of the weights.
    INPUT = "I"
    WEIGHT = "W"
    # Messages: the activation that `stage` made, the gradient of the activation that `stage` received.
    SEND_ACTIVATION = "SF"
    RECEIVE_ACTIVATION = "RF"
    SEND_GRADIENT = "SB"
    RECEIVE_GRADIENT = "RB"
    # All backward passes of the stage are done, in one piece or in halves: its gradients may be reduced over the replicas.
    REDUCE = "R"


@dataclass(frozen=True)
class Action:
    """One thing a pipeline rank does.

    `stage` is the stage that computes; for messages it is the stage whose result travels: RECEIVE_ACTIVATION and
    SEND_ACTIVATION of stage s carry the output of s (from s to s + 1), the GRADIENT pair of stage s carries the
    gradient of the input of s (from s to s − 1). `peer` is the other pipeline rank of a message.
    """

    kind: Kind
    stage: int
    micro_batch: int = 0
    peer: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}" + ("" if self.kind is Kind.REDUCE else f".{self.micro_batch}")


@dataclass(frozen=True)
class Placement:
    """Which pipeline rank holds which stage: `rank_of[stage]`."""

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
    """What every pipeline rank does in one step, messages included."""

    placement: Placement
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
