"""What an update does, whichever its rule: to tensors that this rank keeps, wherever they come from: buckets, or shards of
parameters."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from pentatron.config.training import OptimConfig
from pentatron.optim.clip import clipping

# Of each part, as many as have come from its first element on; None where none has come, which counts as zeros.
Gradients: TypeAlias = Sequence[Tensor | None]

# Elements whose gradients are in fp32 at a time where they come in less.
_AT_ONCE = 1 << 25


@dataclass(frozen=True, eq=False)
class Part:
    """What a rule sees as one parameter: fp32 values, updated in place where they are. Gradients may be on another device.

    `weights`: the values in the precision of the model, on the same device, where there are such.
    """

    values: Tensor
    decays: bool
    weights: Tensor | None = None


class Update(ABC):
    """Clipping by a norm that all ranks know, and one fused update. `kept` names what a rule remembers of each element."""

    # Whether an update also rounds the values into the weights of the parts.
    rounds = False
    # Whether the device itself can leave an update out: `start` is there then.
    decides = False

    def __init__(self, parts: Sequence[Part], config: OptimConfig, kept: Sequence[str]) -> None:
        self.config = config
        self._parts = parts
        # Called before anything changes: who reads the values beside the computation is waited for.
        self.before: Callable[[], None] = lambda: None
        # Made now rather than at the first step, so that saving and loading see one layout at all times.
        self._moments = {id(p): {m: torch.zeros_like(p.values) for m in kept} for p in parts}

    @torch.no_grad()
    def step(
        self,
        gradients: Gradients,
        learning_rate: float,
        norm: float,
        scale: float,
        weight_decay: float | None = None,
    ) -> None:
        """Gradients are `scale` times what they should be; `norm` is that of what they should be. `weight_decay`: of this step,
        where it changes during a run."""
        self.before()
        factor = clipping(norm, self.config.clip_grad, scale)
        # Written by the device itself: a copy from the host would be waited for, portion by portion.
        device = self._parts[0].values.device if self._parts else None
        divisor = None if factor == 1 else torch.full((), 1 / factor, dtype=torch.float32, device=device)
        for decays in (True, False):
            decay = self._decay(weight_decay) if decays else 0.0
            chosen = [(p, g) for p, g in zip(self._parts, gradients, strict=True) if p.decays is decays]
            for some in _portions(chosen):
                parts = [part for part, _ in some]
                exact = [_exact(part, gradient) for part, gradient in some]
                self._update(parts, exact, learning_rate, decay, divisor)

    def start(
        self,
        gradients: Gradients,
        learning_rate: float,
        found: Tensor,
        scale: float,
        weight_decay: float | None = None,
    ) -> None:
        """An update that is made if loss and squared norm, `found` on the device in fp64, are numbers; nobody waits for them.
        The norm is that of the gradients, `scale` included; a third number is a factor of the gradients that the norm has and they
        lack. `settle` must tell later whether it was made."""
        raise NotImplementedError

    def settle(self, made: bool) -> None:
        """What became of an update that was started."""
        raise NotImplementedError

    def _decay(self, of_step: float | None) -> float:
        return self.config.weight_decay if of_step is None else of_step

    @abstractmethod
    def _update(
        self,
        parts: Sequence[Part],
        gradients: Sequence[Tensor],
        learning_rate: float,
        weight_decay: float,
        divisor: Tensor | None,
    ) -> None:
        """Changes the values of the parts, as far as they have gradients, and what is remembered of them. Gradients are divided
        first, where something is to divide them by, in the same pass."""

    def _of(self, moment: str, parts: Sequence[Part], gradients: Sequence[Tensor]) -> list[Tensor]:
        return [beside(self._moments[id(part)][moment], g) for part, g in zip(parts, gradients)]

    def state(self, part: Part) -> dict[str, Tensor]:
        """What a checkpoint keeps of a part, to be read or overwritten."""
        return {"weights": part.values, **self._moments[id(part)]}

    def moments(self) -> list[Tensor]:
        return [moment for part in self._parts for moment in self._moments[id(part)].values()]

    @abstractmethod
    def set_updates(self, updates: int) -> None:
        """How many updates the values and moments, overwritten from elsewhere, have seen."""


def beside(values: Tensor, gradient: Tensor) -> Tensor:
    """The elements that a gradient belongs to; what follows it is alignment."""
    return values if values.shape == gradient.shape else values[: gradient.numel()]


def _exact(part: Part, gradient: Tensor | None) -> Tensor:
    """A gradient in fp32, where it lies."""
    return torch.zeros_like(part.values) if gradient is None else gradient.to(torch.float32)


def _portions(
    found: Sequence[tuple[Part, Tensor | None]],
) -> Iterator[Sequence[tuple[Part, Tensor | None]]]:
    """Few at a time, so that copies in fp32 are small beside the gradients."""
    first = elements = 0
    for number, (part, _) in enumerate(found):
        if elements and elements + part.values.numel() > _AT_ONCE:
            yield found[first:number]
            first, elements = number, 0
        elements += part.values.numel()
    if found:
        yield found[first:]
