"""Megatron-core's names."""

from pentatron.megatron.core import parallel_state
from pentatron.megatron.core import parallel_state as mpu

__all__ = ["mpu", "parallel_state"]
