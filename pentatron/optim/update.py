"""What an update does, whichever its rule: to tensors that this rank keeps, wherever they come from: buckets, or shards of
parameters."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pentatron.config.training import OptimConfig
from pentatron.optim.clip import clip_


@dataclass(frozen=True)
class Part:
    """What a rule sees as one parameter: fp32 values, updated in place where they are, and their gradients, which may be
    on another device."""

    values: nn.Parameter
    gradients: Tensor
    decays: bool


class Update(ABC):
    """Clipping by a norm that all ranks know, and one fused update. `kept` names what a rule remembers of each element."""

    def __init__(self, parts: Sequence[Part], config: OptimConfig, kept: Sequence[str]) -> None:
        self.config = config
        self._parts = parts
        # Made now rather than at the first step, so that saving and loading see one layout at all times.
        # Called before anything changes: who reads the values beside the computation is waited for.
        self.before: Callable[[], None] = lambda: None
        self._moments = {id(p): {m: torch.zeros_like(p.values.data) for m in kept} for p in parts}

    @torch.no_grad()
    def step(
        self, learning_rate: float, norm: float, scale: float, weight_decay: float | None = None
    ) -> None:
        """Gradients are `scale` times what they should be; `norm` is that of what they should be. `weight_decay`: of this step,
        where it changes during a run."""
        self.before()
        decay = self.config.weight_decay if weight_decay is None else weight_decay
        clip_([part.gradients for part in self._parts], norm, self.config.clip_grad, scale)
        for decays in (True, False):
            parts = [part for part in self._parts if part.decays is decays]
            if parts:
                self._update(parts, learning_rate, decay if decays else 0.0)

    @abstractmethod
    def _update(self, parts: Sequence[Part], learning_rate: float, weight_decay: float) -> None:
        """Changes the values of the parts and what is remembered of them."""

    def _of(self, moment: str, parts: Sequence[Part]) -> list[Tensor]:
        return [self._moments[id(part)][moment] for part in parts]

    def state(self, part: Part) -> dict[str, Tensor]:
        """What a checkpoint keeps of a part, to be read or overwritten."""
        return {"weights": part.values.detach(), **self._moments[id(part)]}

    def moments(self) -> list[Tensor]:
        return [moment for part in self._parts for moment in self._moments[id(part)].values()]

    @abstractmethod
    def set_updates(self, updates: int) -> None:
        """How many updates the values and moments, overwritten from elsewhere, have seen."""
