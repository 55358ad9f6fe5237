"""Saves in the background: there are none."""

from pentatron.megatron.training.checkpointing import maybe_finalize_async_save

__all__ = ["maybe_finalize_async_save"]
