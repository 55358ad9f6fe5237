"""Whether a Triton kernel can run on a tensor."""

import importlib.util

from torch import Tensor

# Looked for once: compiled layers ask too, and a compiler cannot look into how modules are found.
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def has_triton() -> bool:
    """Triton comes with torch for CUDA; nothing here needs it."""
    return _HAS_TRITON


def by_kernel(tensor: Tensor) -> bool:
    return tensor.is_cuda and has_triton()
