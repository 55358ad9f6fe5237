"""Loss scaling for fp16: multiplies the loss before backward, so that small gradients do not underflow.

Gradients carry the scale until the update divides by it. With fp16 the scale is dynamic: an overflow skips
the step and reduces the scale, a long run of steps without overflow increases it. With other dtypes, or an
explicit scale, it is constant.
"""

import math
from collections.abc import Mapping

import torch

from pentatron.settings.parallel import PrecisionConfig

# After this many consecutive overflows at a scale of 1 or the minimum, the scale is not the cause.
_MOST_USELESS_SKIPS = 20


class LossScaler:
    """Megatron's dynamic loss scaler; with a hysteresis of 1 it equals torch's GradScaler."""

    def __init__(self, config: PrecisionConfig, saved: Mapping[str, float] | None = None) -> None:
        """`saved` is the result of `state` in a checkpoint, to resume."""
        self.config = config
        self.is_dynamic = config.fp16 and not config.loss_scale
        self.scale = _to_fp32(config.initial_loss_scale if self.is_dynamic else config.loss_scale or 1.0)
        self._counts = {"made_in_a_row": 0, "useless_in_a_row": 0, "overflows_left": config.hysteresis}
        if self.is_dynamic and saved:
            self.scale = saved["scale"]
            self._counts = {name: int(saved[name]) for name in self._counts}

    def update(self, updated: bool) -> None:
        """Must be called after every step; `updated` is False if an overflow has skipped the update."""
        if not self.is_dynamic:
            return
        counts = self._counts
        if updated:
            counts["useless_in_a_row"] = 0
            counts["made_in_a_row"] += 1
            if counts["made_in_a_row"] == self.config.loss_scale_window:
                counts |= {"made_in_a_row": 0, "overflows_left": self.config.hysteresis}
                larger = _to_fp32(self.scale * _to_fp32(self.config.loss_scale_growth_factor))
                self.scale = larger if math.isfinite(larger) else self.scale
            return
        counts["made_in_a_row"] = 0
        counts["useless_in_a_row"] += self.scale <= max(1.0, self.config.min_loss_scale)
        counts["overflows_left"] -= 1
        if counts["overflows_left"] <= 0:
            smaller = _to_fp32(self.scale * _to_fp32(self.config.loss_scale_backoff_factor))
            # A scale of zero would silently zero every gradient.
            self.scale = max(smaller, self.config.min_loss_scale) or self.scale

    @property
    def cannot_recover(self) -> bool:
        """Whether overflows persist although the scale cannot become smaller."""
        return self._counts["useless_in_a_row"] >= _MOST_USELESS_SKIPS

    def state(self) -> dict[str, float]:
        """Returns the state for a checkpoint; empty if the scale is constant."""
        return {"scale": self.scale, **self._counts} if self.is_dynamic else {}


def _to_fp32(number: float) -> float:
    """Rounds to fp32: gradients must be divided by exactly what the loss was multiplied by."""
    return torch.tensor(number, dtype=torch.float32).item()
