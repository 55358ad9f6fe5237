"""Dispatch to Triton kernels, and registration of custom operators."""

import functools
import importlib.util
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor


def has_triton() -> bool:
    """Whether Triton is installed. It comes with torch for CUDA; it is optional here."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def triton_problem() -> str:
    """Returns why Triton kernels cannot run on this process's GPU, or an empty string.

    Determined once, by running a small kernel: Triton also needs a C compiler and Python's headers, unless
    the compiled kernel is in its cache.
    """
    if not has_triton():
        return "it is not installed"
    try:
        from pentatron.ops.triton_activation import stored

        return "" if stored() else "a kernel did nothing"
    except Exception as error:  # missing or broken parts raise many types of errors
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0][:200]}"


def triton_works() -> bool:
    """Whether Triton kernels can run on this process's GPU.

    Compiled layers call this too. The compiler cannot trace it, so `nn.compiled` declares the result
    constant; doing that here would import the compiler.
    """
    return not triton_problem()


def uses_triton(tensor: Tensor) -> bool:
    return tensor.is_cuda and triton_works()


# --- custom operators ---
#
# `torch.library.custom_op` registers operators, too, but supports cases that do not occur here: autograd
# (these run inside autograd functions), per-device kernels, checks for outputs that alias inputs. Its Python
# overhead exceeds a kernel launch (`bench/launches.py`), and an fp8 layer calls two dozen operators.


_P = ParamSpec("_P")
_R = TypeVar("_R")
# Operators are registered as long as this object exists.
_LIBRARY = torch.library.Library("pentatron", "FRAGMENT")


def operator(name: str, like: Callable[_P, _R]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorator: registers a pure function as an opaque operator; `like` returns its empty outputs."""

    def register(function: Callable[_P, _R]) -> Callable[_P, _R]:
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(f"{name}{schema}", tags=torch.Tag.pt2_compliant_tag)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"pentatron::{name}", like, lib=_LIBRARY)
        return cast(Callable[_P, _R], getattr(torch.ops.pentatron, name).default)

    return register
