"""Numbers on their way from a device to the host."""

from typing import Any

import torch
from torch import Tensor


class Told:
    """A copy in host memory that nobody waits for before it is needed; what the device does after it is not waited for at all."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._arrived: Any = None
        if values.is_cuda:
            # Only into page-locked memory does a copy run by itself.
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values
