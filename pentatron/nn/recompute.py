"""Activation recompute: parts of a stage save only their input for backward and run forward a second time
there.

Collectives inside such a part run a second time too. All ranks of a tensor group recompute the same parts in
the same order, so their collectives match. Hidden dropout derives its mask from keys; attention dropout draws
from torch's generator, whose state is saved and restored for the second run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pentatron.layout.stages import recompute_groups
from pentatron.settings.parallel import MemoryConfig

Item = TypeVar("Item")

# The part that full recompute covers: whole layers. The other parts have Megatron's names.
LAYERS = "layers"
_WITH_ATTENTION = (LAYERS, "core_attn")


@dataclass(frozen=True)
class Recompute:
    """The parts that are recomputed: modules by Megatron's names, or whole layers, `chunk` layers at a time,
    of the `first` layers of a stage or of all.
    """

    parts: frozenset[str] = frozenset()
    chunk: int = 1
    first: int | None = None


NO_RECOMPUTE = Recompute()
EVERY_LAYER = Recompute(frozenset({LAYERS}))


@dataclass(eq=False)
class RecomputeSwitch:
    """Runs parts of one model, with activation checkpointing for those in `wanted`.

    All layers of a model share one switch, so recompute can be turned on and off without touching the layers.
    `draws`: attention dropout draws from torch's generator. `kernels` restricts attention to the kernels of
    the first run.
    """

    wanted: Recompute = NO_RECOMPUTE
    draws: bool = False
    kernels: Callable[[], AbstractContextManager[None]] = nullcontext

    def __call__(self, part: str, function: Callable[..., Tensor], *inputs: object) -> Tensor:
        """Returns `function(*inputs)`; saves only the inputs if the part is recomputed."""
        if part not in self.wanted.parts or not torch.is_grad_enabled():
            return function(*inputs)

        if torch.compiler.is_compiling():
            # The compiled graph contains the kernels and handles the state of the generator.
            return checkpoint(function, *inputs, use_reentrant=False)

        def with_kernels(*inputs: object) -> Tensor:
            with self.kernels():
                return function(*inputs)

        preserve = self.draws and part in _WITH_ATTENTION
        return checkpoint(with_kernels, *inputs, use_reentrant=False, preserve_rng_state=preserve)

    @contextmanager
    def recomputing_output(self, part: str, output: Tensor, again: Callable[[], Tensor]) -> Iterator[None]:
        """Context in which operations do not save `output` for backward if the part is recomputed.

        `again` computes it in backward.
        """
        if part not in self.wanted.parts or not torch.is_grad_enabled():
            yield
            return
        address = output.data_ptr()

        def pack(tensor: Tensor) -> Tensor | None:
            return None if tensor.data_ptr() == address and tensor.shape == output.shape else tensor

        def unpack(packed: Tensor | None) -> Tensor:
            with torch.no_grad():
                return again() if packed is None else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def chunks(self, layers: Sequence[Item]) -> Iterator[tuple[str, Sequence[Item]]]:
        """Yields the layers of a stage in recomputed chunks, then the others, each with the name of their
        part.
        """
        wanted = self.wanted
        chunks, rest = recompute_groups(layers, wanted.chunk, wanted.first if LAYERS in wanted.parts else 0)
        yield from ((LAYERS, chunk) for chunk in chunks)
        if rest:
            yield "", rest


def recompute_of(memory: MemoryConfig) -> Recompute:
    """Returns what the settings ask to recompute."""
    if memory.recompute_granularity is None:
        return NO_RECOMPUTE
    if memory.recompute_granularity == "selective":
        return Recompute(frozenset(memory.recompute_modules))
    if memory.recompute_method == "block":
        return Recompute(frozenset({LAYERS}), first=memory.recompute_num_layers)
    return Recompute(frozenset({LAYERS}), chunk=memory.recompute_num_layers)
