"""Gradient norm and clipping."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pentatron.kernels.choice import triton_works

_EPSILON = 1e-6
# A CPU adds up the squares of a tensor one after the other: of millions of them a thousandth is lost in fp32. So many are added up at a time.
_ROW = 4096
_AT_ONCE = 64


def squared_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The squared L2 norm over all gradients, in fp64: squares of scaled gradients may be large. Zero where there are none."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_type.setdefault(gradient.dtype, []).append(gradient)
    # Of gradients in bf16 too the norms are fp32, which is not what torch does unless it is asked.
    exact = _exact_norms if device.type == "cpu" else _norms
    norms = [norm for some in by_type.values() for norm in exact(some)]
    return torch.linalg.vector_norm(torch.stack(norms)).double().square()


def _norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch._foreach_norm(list(tensors), 2, dtype=torch.float32)


def _exact_norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same, of large tensors row by row."""
    small = [tensor for tensor in tensors if tensor.numel() <= _ROW]
    large = [_norm_by_rows(tensor.reshape(-1)) for tensor in tensors if tensor.numel() > _ROW]
    return [*(_norms(small) if small else ()), *large]


def _norm_by_rows(flat: Tensor) -> Tensor:
    whole = flat.numel() // _ROW * _ROW
    # What is rounded is turned into fp32 for it: some rows at a time, which stay in a cache.
    some = (
        flat[:whole].view(-1, _ROW).split(_AT_ONCE if flat.dtype != torch.float32 else max(1, whole // _ROW))
    )
    rows = torch.cat([torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in some])
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)
    return torch.linalg.vector_norm(torch.cat((rows, rest[None])), dtype=torch.float64).float()


def build_norm(device: torch.device, by_one_kernel: bool) -> Callable[[Sequence[Tensor]], Tensor]:
    """`squared_norm` for a device; with `by_one_kernel` a GPU reads all gradients in one launch instead of hundreds."""
    if not (by_one_kernel and device.type == "cuda" and triton_works()):
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
    if scale == 1:
        # The same bits, with fewer launches.
        return (limit / (squared.sqrt() + _EPSILON)).clamp(max=1)
    return (limit / (squared.sqrt() / scale + _EPSILON)).clamp(max=1) / scale
