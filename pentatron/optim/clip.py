"""Gradient norm and clipping."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pentatron.kernels.choice import has_triton

_EPSILON = 1e-6


def squared_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The squared L2 norm over all gradients, in fp64: squares of scaled gradients may be large. Zero where there are none."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_type.setdefault(gradient.dtype, []).append(gradient)
    # Of gradients in bf16 too the norms are fp32, which is not what torch does unless it is asked.
    norms = [norm for some in by_type.values() for norm in torch._foreach_norm(some, 2, dtype=torch.float32)]
    return torch.linalg.vector_norm(torch.stack(norms)).double().square()


def build_norm(device: torch.device, by_one_kernel: bool) -> Callable[[Sequence[Tensor]], Tensor]:
    """`squared_norm` for a device; with `by_one_kernel` a GPU reads all gradients in one launch instead of hundreds."""
    if not (by_one_kernel and device.type == "cuda" and has_triton()):
        return lambda gradients: squared_norm(gradients, device)
    from pentatron.kernels.squares_triton import Squares

    kernels: dict[torch.dtype, Squares] = {}

    def in_one_launch(gradients: Sequence[Tensor]) -> Tensor:
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            by_type.setdefault(gradient.dtype, []).append(gradient.contiguous())
        found = [kernels.setdefault(dtype, Squares())(some) for dtype, some in by_type.items()]
        return torch.stack(found).sum() if found else squared_norm((), device)

    return in_one_launch


def clipping(norm: float, limit: float, scale: float = 1.0) -> float:
    """What gradients with that norm, mended, are to be multiplied by."""
    factor = limit / (norm + _EPSILON)
    return (factor if 0 < factor < 1 else 1.0) / scale


def clipping_on_device(squared: Tensor, limit: float, scale: float) -> Tensor:
    """The same, in the same precision, of a squared norm that is still scaled and that nobody waits for."""
    if limit == 0:
        return torch.full_like(squared, 1 / scale)
    return (limit / (squared.sqrt() / scale + _EPSILON)).clamp(max=1) / scale


def clip_(gradients: Sequence[Tensor], norm: float, limit: float, scale: float = 1.0) -> None:
    """Scales the gradients down to `limit`, unless they are below it or the limit is 0.

    They are `scale` times what they should be, which is mended in the same pass; `norm` is that of the mended ones.
    """
    factor = clipping(norm, limit, scale)
    if factor != 1:
        torch._foreach_mul_(list(gradients), factor)
