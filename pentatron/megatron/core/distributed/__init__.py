"""Gradients over data-parallel ranks: flat buckets and ZeRO (pentatron.optim, pentatron.parallel)."""

from pentatron.optim.build import build_optimizer

__all__ = ["build_optimizer"]
