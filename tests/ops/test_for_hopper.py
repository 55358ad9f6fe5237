"""Compiles kernels for Hopper without a GPU, because Triton's interpreter accepts more."""

import importlib.util
import os
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton, which must not interpret",
)


def compiled(kernel: Any, given: str, constants: dict[str, Any]) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict(word.split(":") for word in given.split()) | dict.fromkeys(constants, "constexpr")
    made = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
    return str(made.asm["ptx"])


def test_the_update() -> None:
    import triton.language as tl

    from pentatron.ops.triton_update import _update

    tables = "row_of:*i32 first_of:*i32 fixed:*i64 gradients:*i64 control:*fp32"
    numbers = "step_size decay beta1 rest1 beta2 rest2 correction epsilon".split()
    given = f"{tables} {' '.join(f'{name}:fp32' for name in numbers)}"
    made = compiled(_update, given, {"GRADIENT": tl.bfloat16, "ROUNDED": tl.bfloat16, "BLOCK": 8192})
    assert "ld.global.v4" in made, "whole blocks are read in vectors"


def test_gates_and_the_trial() -> None:
    from pentatron.ops import triton_activation
    from pentatron.ops.triton_activation import _store

    width = {"BLOCK": triton_activation._SWIGLU_BLOCK}
    compiled(triton_activation._swiglu_forward, "inner:*bf16 output:*bf16 width:i32", width)
    tensors = "gradient:*bf16 inner:*bf16 of_inner:*bf16 output:*bf16 width:i32"
    compiled(triton_activation._swiglu_backward, tensors, width)
    compiled(_store, "place:*fp32", {})
