"""Whether a Triton kernel can run on a tensor."""

import functools
import importlib.util

from torch import Tensor


def has_triton() -> bool:
    """Triton comes with torch for CUDA; nothing here needs it."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def triton_problem() -> str:
    """Why its kernels cannot run on this process's GPU, in a few words; nothing if they can.

    Tried once, with a small kernel: Triton also wants a C compiler and Python's headers, unless it finds in its cache what these would make.
    """
    if not has_triton():
        return "it is not installed"
    try:
        from pentatron.kernels.trial_triton import stored

        return "" if stored() else "a kernel did nothing"
    except Exception as error:  # what is missing, or breaks, tells so in many ways
        words = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {words[0][:200]}"


def triton_works() -> bool:
    """On this process's GPU. Compiled layers ask too: a compiler, which cannot look into how that is found out, is told that it stays so
    (`nn.compiled`; not here, where saying so would import the compiler)."""
    return not triton_problem()


def by_kernel(tensor: Tensor) -> bool:
    return tensor.is_cuda and triton_works()
