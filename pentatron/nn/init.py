"""Initial weights from a generator seeded by (seed, parameter name).

Whoever needs a parameter, or a slice of it, draws the same logical tensor: the result does not depend on how many
ranks there are, which of them asks, or in which order the model was built.
"""

import hashlib

import torch
from torch import Tensor


def named_generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    # 63 bits: manual_seed takes signed 64-bit integers.
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def normal_(tensor: Tensor, seed: int, name: str, std: float) -> None:
    """Fills a tensor from its name's generator. Drawn on the CPU in fp32, so that every device gets the same bits."""
    drawn = torch.empty(tensor.shape, dtype=torch.float32)
    drawn.normal_(0.0, std, generator=named_generator(seed, name))
    with torch.no_grad():
        tensor.copy_(drawn)


def residual_scale(num_layers: int) -> float:
    """Layers write to the residual stream twice each; this keeps its variance from growing with depth."""
    return (2 * num_layers) ** -0.5
