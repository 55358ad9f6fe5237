"""Activation recompute: parts of a stage keep their input alone for backward, and run once more there.

Collectives inside such a part run once more too. The ranks of a tensor group hold the same parts and come to them in the
same order, so they meet again. Hidden dropout finds its mask again by itself; attention dropout draws from torch's
generator, whose state is kept and set back for the second run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pentatron.layout.stages import recomputed_runs
from pentatron.settings.parallel import MemoryConfig

Item = TypeVar("Item")

# Whole layers: what full recompute covers. The other parts have Megatron's names.
LAYERS = "layers"
_WITH_ATTENTION = (LAYERS, "core_attn")


@dataclass(frozen=True)
class Recompute:
    """Which parts run again: whole layers (`chunk` of them at a time, of a stage's `first` ones or of all) or
    modules."""

    parts: frozenset[str] = frozenset()
    chunk: int = 1
    first: int | None = None


NOTHING = Recompute()
EVERY_LAYER = Recompute(frozenset({LAYERS}))


class RecomputeSwitch:
    """Runs the parts of one model, and runs those again in backward that `wanted` names.

    All layers of a model share one, so that the model switches recompute on and off without touching them.
    `draws`: attention draws from torch's generator. `kernels` restricts attention to the kernels of the first
    run.
    """

    def __init__(
        self,
        wanted: Recompute = NOTHING,
        draws: bool = False,
        kernels: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.wanted = wanted
        self.draws = draws
        self.kernels = kernels

    def __call__(self, part: str, function: Callable[..., Tensor], *inputs: object) -> Tensor:
        """`function(*inputs)`, of which nothing but the inputs is kept if the part is to run again."""
        if part not in self.wanted.parts or not torch.is_grad_enabled():
            return function(*inputs)

        if torch.compiler.is_compiling():
            # Kernels are compiled in, and the generator's state is the compiler's matter.
            compiled: Tensor = checkpoint(function, *inputs, use_reentrant=False)
            return compiled

        def with_kernels(*again: object) -> Tensor:
            with self.kernels():
                return function(*again)

        preserve = self.draws and part in _WITH_ATTENTION
        made: Tensor = checkpoint(with_kernels, *inputs, use_reentrant=False, preserve_rng_state=preserve)
        return made

    @contextmanager
    def made_again(self, part: str, made: Tensor, again: Callable[[], Tensor]) -> Iterator[None]:
        """What runs inside does not keep `made` for its backward, if the part is to run again; `again` makes it there."""
        if part not in self.wanted.parts or not torch.is_grad_enabled():
            yield
            return
        place = made.data_ptr()

        def keep(tensor: Tensor) -> Tensor | None:
            return None if tensor.data_ptr() == place and tensor.shape == made.shape else tensor

        def fetch(kept: Tensor | None) -> Tensor:
            with torch.no_grad():
                return again() if kept is None else kept

        with torch.autograd.graph.saved_tensors_hooks(keep, fetch):
            yield

    def chunks(self, layers: Sequence[Item]) -> Iterator[tuple[str, Sequence[Item]]]:
        """The layers of a stage in the runs that are done at a time, each with the part it belongs to."""
        wanted = self.wanted
        runs, rest = recomputed_runs(layers, wanted.chunk, wanted.first if LAYERS in wanted.parts else 0)
        yield from ((LAYERS, run) for run in runs)
        if rest:
            yield "", rest


def recompute_of(memory: MemoryConfig) -> Recompute:
    """What the settings ask for."""
    if memory.recompute_granularity is None:
        return NOTHING
    if memory.recompute_granularity == "selective":
        return Recompute(frozenset(memory.recompute_modules))
    if memory.recompute_method == "block":
        return Recompute(frozenset({LAYERS}), first=memory.recompute_num_layers)
    return Recompute(frozenset({LAYERS}), chunk=memory.recompute_num_layers)
