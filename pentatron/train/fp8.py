"""Which matmuls of a run are in fp8, and whether the device has such."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn

from pentatron.config.decided import Fp8Decision
from pentatron.config.run import RunConfig
from pentatron.errors import AgreedError
from pentatron.kernels.fp8 import E4M3, MULTIPLE, scales_of
from pentatron.models.causal_lm import CausalLM
from pentatron.nn.linear import VocabularyTable, WeightedModule
from pentatron.parallel.scaled_linear import FORMATS, UNKNOWN
from pentatron.parallel.world import World


def require_fp8(decided: Fp8Decision) -> None:
    """Refuses to train on a device without matmuls in fp8."""
    if decided.lacking:
        raise AgreedError(
            f"--fp8 {decided.format} needs a GPU with fp8 matmuls (NVIDIA's from compute capability 8.9 on: Ada, Hopper, Blackwell), and "
            f"{decided.lacking}; leave it out"
        )


def use_fp8(decided: Fp8Decision, stages: Iterable[CausalLM]) -> None:
    """From now on the linear layers of these stages multiply in fp8, as far as it was decided and the sizes allow it."""
    for _, module in _wanted(decided, stages):
        if _fits(module) and decided.format is not None:
            module.fp8 = replace(FORMATS[decided.format], by_rows=decided.by_rows)


class WeightScales:
    """The scales of weights in fp8, found for all of them at once: weights change once a step, and there are many.

    For that they must be whole, and there, when a step or a validation begins. Where replicas share them out they come layer by layer,
    while others compute, and each layer finds its own.
    """

    def __init__(
        self, config: RunConfig, decided: Fp8Decision, world: World, stages: Iterable[CausalLM]
    ) -> None:
        whole = world.replicas.size == 1 or config.parallel.zero_stage == 0
        wanted = _wanted(decided, stages) if whole and not decided.by_rows else ()
        self._modules = [module for _, module in wanted if module.fp8 is not None]
        self._scales = [torch.ones((), device=world.device) for _ in self._modules]
        self._unscales = [torch.ones((), device=world.device) for _ in self._modules]

    @torch.no_grad()
    def refresh(self) -> None:
        """To be called after weights have changed, before they are multiplied."""
        if not self._modules:
            return
        found = scales_of([module.weight for module in self._modules], E4M3)
        torch._foreach_copy_(self._scales, list(found.unbind()))
        torch._foreach_copy_(self._unscales, list(found.reciprocal().unbind()))
        # Not before: a model that nobody trains finds them itself.
        for module, scale, unscale in zip(self._modules, self._scales, self._unscales):
            module.scale = (scale, unscale)

    def forget(self) -> None:
        """To be called before weights change: whoever multiplies by them outside a step or a validation finds what fits them."""
        for module in self._modules:
            module.scale = UNKNOWN


def left_in_bf16(decided: Fp8Decision, stages: Collection[CausalLM]) -> list[str]:
    """What the user may think to be in fp8 and is not."""
    found = []
    small = {name for name, module in _wanted(decided, stages) if module.fp8 is None}
    if small:
        found.append(
            f"--fp8: matrices stay in bf16 where a side is no multiple of {MULTIPLE}: {', '.join(sorted(small))}"
        )
    if decided.experts_left:
        found.append("--fp8: the matmuls of experts stay in bf16")
    return found


def _wanted(decided: Fp8Decision, stages: Iterable[CausalLM]) -> Iterator[tuple[str, WeightedModule]]:
    """The matrices that are to be multiplied in fp8, with their names in a layer. Those of experts are not among them."""
    for stage in stages:
        for number, layer in stage.layers.items():
            if int(number) in decided.layers:
                yield from _matrices(layer)
        if decided.head and (head := _head(stage)) is not None:
            yield "head", head


def _matrices(layer: nn.Module) -> Iterator[tuple[str, WeightedModule]]:
    for name, module in layer.named_modules():
        if isinstance(module, WeightedModule) and module.weight.dim() == 2:
            yield name, module


def _head(stage: CausalLM) -> VocabularyTable | None:
    if stage.final_norm is None or stage.head is not None:
        return stage.head
    return None if stage.embedding is None else stage.embedding.word


def _fits(module: WeightedModule) -> bool:
    return all(side % MULTIPLE == 0 for side in module.weight.shape)
