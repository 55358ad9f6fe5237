"""Operations that a compiler takes as they are: it knows what their results look like, and does not look inside.

`torch.library.custom_op` does that too, with much around it for cases that are none here: gradients (these run inside functions of
autograd), kernels of devices that are switched on and off, a search for results that share memory with inputs. Its Python takes longer
than launching a kernel (`bench/launches.py`), and a layer in fp8 has two dozen such calls.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

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
