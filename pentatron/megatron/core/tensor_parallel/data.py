"""Data for the ranks that share a layer."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pentatron.megatron.state import current


def broadcast_data(
    keys: Sequence[str], data: Mapping[str, Tensor], datatype: torch.dtype
) -> dict[str, Tensor]:
    """The named tensors on this rank's device. Every rank reads them itself here, so nothing is sent."""
    device = current().world.device
    return {key: data[key].to(device=device, dtype=datatype) for key in keys}
