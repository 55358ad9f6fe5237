"""Where a run stands."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class TrainState:
    """Everything besides tensors that a resumed run must know."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    data_fingerprint: str = ""
    # Of each file that the fingerprint is made of, with the checksum of its tokens where that is known.
    data_files: list[dict[str, Any]] = field(default_factory=list)
    # How many samples the order was built for, first and each time the run was made longer: it grows, and never changes.
    ordered_for: list[int] = field(default_factory=list)
    # How many samples came from each dataset.
    drawn: dict[str, int] = field(default_factory=dict)
    # Floating-point operations of the run, by the formula that throughput is computed with.
    flops: float = 0.0
    # The step at which the optimizer's state was new: Adam counts its updates from there.
    optimizer_since: int = 0

    @property
    def updates(self) -> int:
        """What the optimizer's state has seen."""
        return self.step - self.optimizer_since

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "TrainState":
        known = {f.name for f in fields(cls)}
        return cls(**{name: value for name, value in saved.items() if name in known})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
