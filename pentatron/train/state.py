"""Where a run stands."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class TrainState:
    """Everything besides tensors that a resumed run must know."""

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    data_fingerprint: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
