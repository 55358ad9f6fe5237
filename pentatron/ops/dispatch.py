"""Whether a Triton kernel can run on a tensor."""

import functools
import importlib.util
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch
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
        from pentatron.ops.triton_activation import stored

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


# Operations that a compiler takes as they are: it knows what their results look like, and does not look
# inside.
#
# `torch.library.custom_op` does that too, with much around it for cases that are none here: gradients (these
# run inside functions of autograd), kernels of devices that are switched on and off, a search for results
# that share memory with inputs. Its Python takes longer than launching a kernel (`bench/launches.py`), and a
# layer in fp8 has two dozen such calls.


_P = ParamSpec("_P")
_R = TypeVar("_R")
# What is defined in it is there as long as it is.
_LIBRARY = torch.library.Library("pentatron", "FRAGMENT")


def operator(name: str, like: Callable[_P, _R]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a function an operation of torch's, which changes none of its arguments; `like` makes empty results."""

    def defined(function: Callable[_P, _R]) -> Callable[_P, _R]:
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(f"{name}{schema}", tags=torch.Tag.pt2_compliant_tag)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"pentatron::{name}", like, lib=_LIBRARY)
        return cast(Callable[_P, _R], getattr(torch.ops.pentatron, name).default)

    return defined
