"""How linear layers multiply: fp8 and its scales, and weight gradients that are computed later.

The options of a layer are chosen before it is built and handed to it with its tensor axis.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from pentatron.kernels.fp8 import E4M3, scales_of
from pentatron.parallel.deferral import DeferredGradients
from pentatron.parallel.scaled_linear import UNKNOWN, Fp8Format, Scale


class Weighted(Protocol):
    """A layer that multiplies by its weight."""

    weight: nn.Parameter


class WeightScale:
    """The scale of one fp8 weight. Its layer reads `known` in every forward, and computes the scale itself
    while it is UNKNOWN."""

    def __init__(self) -> None:
        self.known: Scale = UNKNOWN


class WeightScales:
    """The scales of the fp8 weights of a rank, computed for all of them at once: weights change once a step,
    and there are many.

    For weights that are whole on this rank when a step or a validation begins. Where replicas share them out
    (ZeRO), they arrive layer by layer, and each layer computes its own scale. The tensors stay in place, so
    that CUDA graphs can read them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layers: list[Weighted] = []
        self._held: list[WeightScale] = []
        self._scales: list[Tensor] = []
        self._unscales: list[Tensor] = []

    def of(self, layer: Weighted) -> WeightScale:
        """The scale of a layer under construction, which `refresh` computes from now on."""
        held = WeightScale()
        self._layers.append(layer)
        self._held.append(held)
        self._scales.append(torch.ones((), device=self._device))
        self._unscales.append(torch.ones((), device=self._device))
        return held

    @torch.no_grad()
    def refresh(self) -> None:
        """To be called after weights have changed, before they are multiplied."""
        if not self._layers:
            return
        found = scales_of([layer.weight for layer in self._layers], E4M3)
        torch._foreach_copy_(self._scales, list(found.unbind()))
        torch._foreach_copy_(self._unscales, list(found.reciprocal().unbind()))
        for held, scale, unscale in zip(self._held, self._scales, self._unscales):
            held.known = (scale, unscale)

    def forget(self) -> None:
        """To be called before weights change: products outside of a step or a validation compute the scales
        they need."""
        for held in self._held:
            held.known = UNKNOWN


@dataclass(frozen=True)
class LinearOptions:
    """How the linear layers built with a tensor axis multiply.

    `deferred` keeps what weight gradients are made of until the weight half of a backward. `fp8` is the
    format of the factors, `scales` computes the scales of such weights. With `in_graph` the layers around are
    compiled, and a linear layer that cannot be keeps itself out of their graphs.
    """

    deferred: DeferredGradients | None = None
    fp8: Fp8Format | None = None
    scales: WeightScales | None = None
    in_graph: bool = False


PLAIN = LinearOptions()
