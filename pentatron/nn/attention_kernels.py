"""Which of torch's attention kernels may run."""

from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# Megatron's names for kernels, beside torch's own. Of several, the first that takes what it is given runs.
_BACKENDS = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "fused": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
    "unfused": [SDPBackend.MATH],
    "local": [SDPBackend.MATH],
}

# On GPUs from this generation on (Hopper), cuDNN's kernel is the fastest of those that take the same.
_CUDNN_FIRST = 9
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def chosen_kernels(backend: str, device: torch.device, dropout: float = 0.0) -> list[SDPBackend] | None:
    """Which kernels may run, those to prefer first; None leaves the choice to torch, as `auto` does on most
    devices."""
    if backend != "auto":
        return _BACKENDS[backend]
    # A GPU is asked only by who computes on it: asking opens it.
    newest = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _CUDNN_FIRST
    # With dropout cuDNN's results and gradients are right (against fp64, with the mask it used); whole runs
    # that resume with it are yet to be compared.
    return (_FASTEST_FIRST[1:] if dropout else _FASTEST_FIRST) if newest else None


class AttentionKernels:
    """Around attention that is restricted to some kernels, in their order; nothing is, where none are chosen.

    To say so takes torch longer than a launch, so what is said around a whole model is not said again in each
    of its layers.
    """

    def __init__(self, chosen: list[SDPBackend] | None = None) -> None:
        self.chosen = chosen
        self._device: torch.device | None = None
        self._said: AbstractContextManager[None] | None = None
        self._inside = 0

    def choose(self, backend: str, device: torch.device, dropout: float) -> None:
        """For where a model runs now; it may have been made elsewhere."""
        if device != self._device:
            self._device, self.chosen = device, chosen_kernels(backend, device, dropout)

    def __enter__(self) -> None:
        if self.chosen is not None and not self._inside:
            self._said = sdpa_kernel(self.chosen, set_priority=True)
            self._said.__enter__()
        self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside -= 1
        if self._said is not None and not self._inside:
            said, self._said = self._said, None
            said.__exit__(kind, error, trace)

    def around(self) -> AbstractContextManager[None]:
        """Itself; a compiler, which cannot look into how it counts, is told each time, and compiles it in."""
        if not torch.compiler.is_compiling():
            return self
        return nullcontext() if self.chosen is None else sdpa_kernel(self.chosen, set_priority=True)
