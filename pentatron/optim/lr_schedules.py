"""Learning rate and weight decay schedules as functions of the samples consumed so far.

Counting samples rather than steps keeps the curves exact if the batch size changes during a run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pentatron.settings.run_config import RunConfig

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR


@dataclass(frozen=True)
class LearningRate:
    style: str
    peak: float
    floor: float
    warmup_samples: float
    decay_samples: float
    init: float = 0.0
    # For the style WSD: the shape of the decay over the last `wsd_samples`.
    wsd_style: str = "exponential"
    wsd_samples: float = 0.0

    def __call__(self, samples: float) -> float:
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.init + (self.peak - self.init) * samples / self.warmup_samples
        if self.style == "constant":
            return self.peak
        if samples > self.decay_samples:
            return self.floor
        if self.style == "inverse-square-root":
            warmup = max(self.warmup_samples, 1.0)
            return max(self.floor, self.peak * math.sqrt(warmup) / math.sqrt(max(samples, 1.0)))
        return self.floor + self._fraction(samples) * (self.peak - self.floor)

    def _fraction(self, samples: float) -> float:
        """Returns the position between floor (0) and peak (1)."""
        if self.style == "WSD":
            stable = self.decay_samples - self.wsd_samples
            if samples <= stable:
                return 1.0
            return _DECAYS[self.wsd_style]((samples - stable) / self.wsd_samples)
        progress = (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        return _DECAYS[self.style](progress)


# The shapes of a decay, from 1 at its beginning (progress 0) to 0 at its end.
_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "exponential": lambda progress: 2.0 * 0.5**progress - 1.0,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (math.cos(math.pi * progress) + 1.0),
}


@dataclass(frozen=True)
class WeightDecay:
    style: str
    start: float
    end: float
    samples: float

    def __call__(self, samples: float) -> float:
        if self.style == "constant" or samples > self.samples:
            return self.end
        progress = samples / self.samples
        fraction = progress if self.style == "linear" else 1.0 - _DECAYS["cosine"](progress)
        return self.start + fraction * (self.end - self.start)


def learning_rate(config: RunConfig) -> LearningRate:
    optim, lengths = config.optim, config.schedule_lengths
    return LearningRate(
        style=optim.lr_decay_style,
        peak=optim.lr,
        floor=optim.min_lr,
        warmup_samples=lengths.warmup,
        decay_samples=lengths.decay,
        init=optim.lr_warmup_init,
        wsd_style=optim.lr_wsd_decay_style,
        wsd_samples=lengths.wsd,
    )


def weight_decay(config: RunConfig) -> WeightDecay:
    optim, style = config.optim, config.optim.weight_decay_incr_style
    bounds = (optim.start_weight_decay, optim.end_weight_decay)
    if style == "constant":
        bounds = (optim.weight_decay, optim.weight_decay)
    return WeightDecay(style, *bounds, config.schedule_lengths.total)


def get_cosine_schedule_with_warmup(
    optimizer: "Optimizer", num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
) -> "LambdaLR":
    """Warm-up and cosine decay for any torch optimizer, with the name and the arguments of Hugging Face's
    function.

    Increases from 0 to the optimizer's learning rate in `num_warmup_steps`, then follows half a cosine to 0
    at `num_training_steps`, where it stays.
    """
    # Torch's schedulers import its compiler, which takes seconds.
    from torch.optim.lr_scheduler import LambdaLR

    factor = LearningRate(
        "cosine", peak=1.0, floor=0.0, warmup_samples=num_warmup_steps, decay_samples=num_training_steps
    )
    return LambdaLR(optimizer, factor, last_epoch)
