"""Makes `megatron...` resolve to this package on import, unless megatron-core is installed."""

import warnings

from pentatron.megatron.names import as_megatron, installed_megatron

if not as_megatron(replace=False):
    warnings.warn(
        f"megatron-core is installed ({installed_megatron()}), so `megatron.…` stays that package; "
        "pentatron.megatron.as_megatron() puts Pentatron's names in its place",
        stacklevel=2,
    )
