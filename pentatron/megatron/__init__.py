"""Megatron-LM's public names over Pentatron.

The modules `pentatron.megatron.core...` and `pentatron.megatron.training...` have no files: importing this
package makes them from the table in `module_table.py`. `as_megatron()` (or `import
pentatron.megatron.install`) makes `megatron.core...` and `megatron.training...` resolve to the same modules,
so that programs written for Megatron-LM run unchanged.
"""

from pentatron.megatron.names import as_megatron, register_modules

__all__ = ["as_megatron"]

register_modules()
