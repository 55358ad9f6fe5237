"""Which matmuls of a run are in fp8, and whether the device has such."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn

from pentatron.config.fp8 import fp8_layers
from pentatron.config.run import RunConfig
from pentatron.errors import AgreedError
from pentatron.kernels.fp8 import E4M3, MULTIPLE, scales_of
from pentatron.models.causal_lm import CausalLM
from pentatron.nn.linear import VocabularyTable, WeightedModule
from pentatron.parallel.scaled_linear import FORMATS, UNKNOWN
from pentatron.parallel.world import World

# The first GPUs with such instructions are Ada's; Hopper and Blackwell have them too.
_LEAST_CAPABILITY = (8, 9)


def require_fp8(config: RunConfig, device: torch.device) -> None:
    """Refuses to train on a device without matmuls in fp8: emulated, they would be slower than any others."""
    wanted = config.precision.fp8_format
    if wanted is None:
        return
    lacking = _lacking(device)
    if lacking:
        raise AgreedError(
            f"--fp8 {wanted} needs a GPU with fp8 matmuls (NVIDIA's from compute capability 8.9 on: Ada, Hopper, Blackwell), and "
            f"{lacking}; leave it out"
        )


def _lacking(device: torch.device) -> str:
    if device.type != "cuda" or torch.version.hip:
        return "this run is on a CPU" if device.type == "cpu" else "this is no GPU of NVIDIA's"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= _LEAST_CAPABILITY:
        return ""
    return f"this one ({torch.cuda.get_device_name(device)}) has {major}.{minor}"


def use_fp8(config: RunConfig, stages: Iterable[CausalLM]) -> None:
    """From now on the linear layers of these stages multiply in fp8, as far as the settings want it and the sizes allow it."""
    for _, module in _wanted(config, stages):
        if _fits(module):
            assert config.precision.fp8_format is not None
            by_rows = config.precision.fp8_recipe == "rowwise"
            module.fp8 = replace(FORMATS[config.precision.fp8_format], by_rows=by_rows)


class WeightScales:
    """The scales of weights in fp8, found for all of them at once: weights change once a step, and there are many.

    For that they must be whole, and there, when a step or a validation begins. Where replicas share them out they come layer by layer,
    while others compute, and each layer finds its own.
    """

    def __init__(self, config: RunConfig, world: World, stages: Iterable[CausalLM]) -> None:
        whole = world.replicas.size == 1 or config.parallel.zero_stage == 0
        by_tensor = config.precision.fp8_recipe == "tensorwise"
        wanted = _wanted(config, stages) if whole and by_tensor else ()
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


def left_in_bf16(config: RunConfig, stages: Collection[CausalLM]) -> list[str]:
    """What the user may think to be in fp8 and is not."""
    found = []
    small = {name for name, module in _wanted(config, stages) if module.fp8 is None}
    if small:
        found.append(
            f"--fp8: matrices stay in bf16 where a side is no multiple of {MULTIPLE}: {', '.join(sorted(small))}"
        )
    layers = fp8_layers(config.precision, config.model.num_layers)
    if config.moe.num_experts is not None and len(layers):
        found.append("--fp8: the matmuls of experts stay in bf16")
    return found


def _wanted(config: RunConfig, stages: Iterable[CausalLM]) -> Iterator[tuple[str, WeightedModule]]:
    """The matrices that are to be multiplied in fp8, with their names in a layer. Those of experts are not among them."""
    layers = fp8_layers(config.precision, config.model.num_layers)
    for stage in stages:
        for number, layer in stage.layers.items():
            if int(number) in layers:
                yield from _matrices(layer)
        if (
            config.precision.fp8_format
            and config.precision.fp8_output_layer
            and (head := _head(stage)) is not None
        ):
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
