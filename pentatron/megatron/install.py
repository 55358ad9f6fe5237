"""`import pentatron.megatron.install`: `megatron.…` is found here, unless the real package is installed."""

import warnings

from pentatron.megatron.names import as_megatron, installed_megatron

if not as_megatron(replace=False):
    warnings.warn(
        f"megatron-core is installed ({installed_megatron()}), so `megatron.…` stays that package; "
        "pentatron.megatron.as_megatron() puts Pentatron's names in its place",
        stacklevel=2,
    )
