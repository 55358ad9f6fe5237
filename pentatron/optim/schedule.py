"""The learning rate as a function of the samples consumed so far.

Counting samples rather than steps keeps the curve exact when the batch size changes during a run.
"""

import math
from dataclasses import dataclass

from pentatron.config.training import OptimConfig


@dataclass(frozen=True)
class LearningRate:
    style: str
    peak: float
    floor: float
    warmup_samples: float
    decay_samples: float

    def __call__(self, samples: float) -> float:
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.peak * samples / self.warmup_samples
        if self.style == "constant":
            return self.peak
        if samples > self.decay_samples:
            return self.floor
        if self.style == "inverse-square-root":
            warmup = max(self.warmup_samples, 1.0)
            return max(self.floor, self.peak * math.sqrt(warmup) / math.sqrt(max(samples, 1.0)))
        progress = (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        share = 1.0 - progress if self.style == "linear" else 0.5 * (math.cos(math.pi * progress) + 1.0)
        return self.floor + share * (self.peak - self.floor)


def learning_rate(config: OptimConfig, global_batch_size: int) -> LearningRate:
    assert config.lr_decay_iters is not None
    return LearningRate(
        style=config.lr_decay_style,
        peak=config.lr,
        floor=config.min_lr,
        warmup_samples=config.lr_warmup_iters * global_batch_size,
        decay_samples=config.lr_decay_iters * global_batch_size,
    )
