"""Whether a Triton kernel can run on a tensor."""

import functools
import importlib.util

from torch import Tensor


@functools.cache
def has_triton() -> bool:
    """Triton comes with torch for CUDA; nothing here needs it."""
    return importlib.util.find_spec("triton") is not None


def by_kernel(tensor: Tensor) -> bool:
    return tensor.is_cuda and has_triton()
