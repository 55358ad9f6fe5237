"""Megatron-LM's public names over Pentatron.

`as_megatron()` (or `import pentatron.megatron.install`) makes `megatron.core...` and `megatron.training...` resolve to the
modules here, so that programs written for Megatron-LM run as they are.
"""

from pentatron.megatron.names import as_megatron

__all__ = ["as_megatron"]
