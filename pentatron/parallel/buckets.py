"""Parameters and gradients as flat buffers.

Parameters become views of one buffer in the model's dtype; gradients are summed in fp32 in a second one, which is
reduced over the data-parallel ranks in pieces of bounded size. The optimizer then works on a few large tensors
instead of hundreds of small ones, and sharding it later means slicing these buffers.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pentatron.parallel.collectives import Group, all_reduce_

NamedParameter = tuple[str, nn.Parameter]


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in the flat buffers."""

    name: str
    shape: torch.Size
    start: int
    stop: int


class FlatBuffers:
    """The parameters of one weight-decay group in fp32 and in the model's dtype, and their fp32 gradients."""

    def __init__(self, parameters: list[NamedParameter], dtype: torch.dtype) -> None:
        device = parameters[0][1].device
        self.slots: list[Slot] = []
        start = 0
        for name, parameter in parameters:
            stop = start + parameter.numel()
            self.slots.append(Slot(name, parameter.shape, start, stop))
            start = stop
        self.master = torch.empty(start, dtype=torch.float32, device=device)
        for view, (_, parameter) in zip(self.views(self.master).values(), parameters):
            view.copy_(parameter.data)
        # An fp32 model needs no second copy: its weights are the master weights.
        self.weights = self.master if dtype == torch.float32 else self.master.to(dtype)
        self.gradients = torch.zeros_like(self.master)
        weights, gradients = self.views(self.weights), self.views(self.gradients)
        for name, parameter in parameters:
            parameter.data = weights[name]
            _accumulate_into(parameter, gradients[name])

    def publish_master(self) -> None:
        """Rounds the master weights into the weights the model computes with."""
        if self.weights is not self.master:
            self.weights.copy_(self.master)

    def reduce_gradients(self, group: Group, bucket_elements: int) -> None:
        """Sums the gradients over the group, a bucket at a time."""
        for start in range(0, self.gradients.numel(), bucket_elements):
            all_reduce_(self.gradients[start : start + bucket_elements], group)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """A flat tensor laid out like these buffers, as one view per parameter."""
        return {s.name: flat[s.start : s.stop].view(s.shape) for s in self.slots}


def _accumulate_into(parameter: nn.Parameter, main_gradient: Tensor) -> None:
    """Adds each new gradient of the parameter to its place in the fp32 buffer and drops it."""

    def accumulate(p: Tensor) -> None:
        assert p.grad is not None
        main_gradient.add_(p.grad)
        p.grad = None

    parameter.register_post_accumulate_grad_hook(accumulate)


def named_unique_parameters(model: nn.Module) -> Iterable[NamedParameter]:
    """Every trained parameter once; tied ones under their first name."""
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def split_by(
    parameters: Iterable[NamedParameter], chosen: Callable[[str, nn.Parameter], bool]
) -> tuple[list[NamedParameter], list[NamedParameter]]:
    yes: list[NamedParameter] = []
    no: list[NamedParameter] = []
    for name, parameter in parameters:
        (yes if chosen(name, parameter) else no).append((name, parameter))
    return yes, no
