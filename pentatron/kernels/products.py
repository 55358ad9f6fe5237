"""Products of matrices in half precision on processors that have no instructions for it.

There every number is turned into fp32 inside the product, again and again. Turning both matrices into fp32 at once and rounding the result, once,
computes the same (numbers are multiplied and added in fp32 either way, in another order) in less time.
"""

import platform

import torch
from torch import Tensor
from torch.nn import functional as F

_HALVES = (torch.bfloat16, torch.float16)
# With fewer rows than this, reading a matrix takes longer than multiplying with it.
_FEW_ROWS = 16


def _has_instructions() -> bool:
    """Whether the processor multiplies bf16 itself. Others than x86, and torch where it does not say, are left to torch."""
    asked = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")]
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return not is_x86 or any(ask is None or bool(ask()) for ask in asked)


# Asked once: it is asked for every product.
_HAS_INSTRUCTIONS = _has_instructions()


def through_fp32(rows: Tensor) -> bool:
    """Whether products of these rows are quicker in fp32. A compiler would keep the copies for backward."""
    return (
        not _HAS_INSTRUCTIONS
        and not torch.compiler.is_compiling()
        and rows.dtype in _HALVES
        and rows.device.type == "cpu"
        and rows.numel() >= _FEW_ROWS * rows.shape[-1]
    )


def rows_times(rows: Tensor, matrix_OI: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x Wᵀ + b`."""
    if not through_fp32(rows):
        return F.linear(rows, matrix_OI, bias)
    exact_bias = None if bias is None else bias.float()
    return F.linear(rows.float(), matrix_OI.float(), exact_bias).to(rows.dtype)


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`."""
    return (left.float() @ right.float()).to(left.dtype) if through_fp32(left) else left @ right


def outer_products(left_NO: Tensor, right_NI: Tensor) -> Tensor:
    """The sum of the outer products of their rows: [O, I]."""
    if not through_fp32(left_NO):
        return left_NO.t() @ right_NI
    return (left_NO.float().t() @ right_NI.float()).to(left_NO.dtype)
