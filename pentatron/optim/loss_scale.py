"""What the loss is multiplied by before backward, so that small gradients do not vanish in fp16.

Gradients carry the factor until the update divides by it. In fp16 the factor is looked for while training: a step whose
gradients overflow is not made and leads to a smaller one, a long run of steps that are made to a larger one. With other
types, or where a number is given, it stays as it is.
"""

import math
from collections.abc import Mapping

import torch

from pentatron.settings.parallel import PrecisionConfig

# So many overflows in a row with a scale that is no larger than 1, or cannot become smaller: it is not the scale.
_HOPELESS = 20


class LossScaler:
    """Megatron's rule; with a hysteresis of 1 it is that of torch's GradScaler."""

    def __init__(self, config: PrecisionConfig, saved: Mapping[str, float] | None = None) -> None:
        """`saved`: what `state` gave; nothing, to start anew."""
        self.config = config
        self.is_dynamic = config.fp16 and not config.loss_scale
        self.scale = _single(config.initial_loss_scale if self.is_dynamic else config.loss_scale or 1.0)
        self._made_in_a_row = 0
        self._useless_in_a_row = 0
        self._overflows_left = config.hysteresis
        if self.is_dynamic and saved:
            self.scale = saved["scale"]
            self._made_in_a_row = int(saved["made_in_a_row"])
            self._useless_in_a_row = int(saved["useless_in_a_row"])
            self._overflows_left = int(saved["overflows_left"])

    def settle(self, made: bool) -> None:
        """To be told of every step whether its update was made, or left out because of an overflow."""
        if not self.is_dynamic:
            return
        if made:
            self._useless_in_a_row = 0
            self._made_in_a_row += 1
            if self._made_in_a_row == self.config.loss_scale_window:
                self._made_in_a_row = 0
                self._overflows_left = self.config.hysteresis
                larger = _single(self.scale * _single(self.config.loss_scale_growth_factor))
                self.scale = larger if math.isfinite(larger) else self.scale
            return
        self._made_in_a_row = 0
        self._useless_in_a_row += self.scale <= max(1.0, self.config.min_loss_scale)
        self._overflows_left -= 1
        if self._overflows_left <= 0:
            smaller = _single(self.scale * _single(self.config.loss_scale_backoff_factor))
            # A scale of zero would make every gradient zero, which nobody would notice.
            self.scale = max(smaller, self.config.min_loss_scale) or self.scale

    @property
    def is_hopeless(self) -> bool:
        """Whether a smaller scale would not help."""
        return self._useless_in_a_row >= _HOPELESS

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps; nothing where the scale is fixed."""
        if not self.is_dynamic:
            return {}
        return {
            "scale": self.scale,
            "made_in_a_row": self._made_in_a_row,
            "useless_in_a_row": self._useless_in_a_row,
            "overflows_left": self._overflows_left,
        }


def _single(number: float) -> float:
    """As fp32 has it: what gradients are multiplied by is what they are divided by."""
    return torch.tensor(number, dtype=torch.float32).item()
