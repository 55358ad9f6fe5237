"""What every rank of a run was busy with in a step: whose turn it was to be slow, and who holds how much."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RankReport:
    """Seconds, bytes and percentages of one step, in the order of the ranks.

    `collectives` and `messages` are the seconds a rank stood still for others; what is left of the step it was busy.
    They are empty where that cannot be measured, as are the percentages. `unheard`: how many sentences a rank has to say.
    """

    seconds: Sequence[float]
    collectives: Sequence[float]
    messages: Sequence[float]
    memory_bytes: Sequence[int]
    utilisation: Sequence[float]
    unheard: Sequence[int] = ()

    def as_metrics(self) -> dict[str, Any]:
        rows = zip(self.seconds, self.collectives, self.messages)
        found: dict[str, Any] = {
            "busy_seconds": [round(max(0.0, step - c - m), 6) for step, c, m in rows],
            "collective_seconds": [round(s, 6) for s in self.collectives],
            "message_seconds": [round(s, 6) for s in self.messages],
            "memory_bytes": list(self.memory_bytes),
            "gpu_utilisation": list(self.utilisation),
        }
        return {"ranks": {name: numbers for name, numbers in found.items() if numbers}}


def gpu_utilisation(device: "torch.device") -> float | None:
    """Percent of the last moments in which the GPU computed, as its driver says; None where nobody can be asked."""
    if device.type != "cuda":
        return None
    # Whoever only reads reports need not wait for torch.
    import torch

    try:
        return float(torch.cuda.utilization(device))
    except Exception:
        # The library that asks the driver is missing, or the driver does not answer: every version fails in its way.
        return None
