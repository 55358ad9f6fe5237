"""Which matmuls of a run are in fp8, and whether the device has such."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from pentatron.config.fp8 import fp8_layers
from pentatron.config.run import RunConfig
from pentatron.errors import AgreedError
from pentatron.kernels.fp8 import MULTIPLE
from pentatron.models.causal_lm import CausalLM
from pentatron.nn.linear import VocabularyTable, WeightedModule

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


def left_in_bf16(config: RunConfig, stages: Iterable[CausalLM]) -> list[str]:
    """What the user may think to be in fp8 and is not. Matrices are named as in their layer."""
    layers = fp8_layers(config.precision, config.model.num_layers)
    small, without = set[str](), set[str]()
    for stage in stages:
        for number, layer in stage.layers.items():
            for name, module in _in_bf16(layer) if int(number) in layers else ():
                (without if module.options.fp8 is None else small).add(name)
        small |= {"head" for _, module in _in_bf16(_head(stage)) if module.options.fp8 is not None}
    found = []
    if small:
        found.append(
            f"--fp8: matrices stay in bf16 where a side is no multiple of {MULTIPLE}: {', '.join(sorted(small))}"
        )
    if without:
        found.append(
            f"--fp8: matrices of layers of your own stay in bf16 where they are built without axes: {', '.join(sorted(without))}"
        )
    if config.moe.num_experts is not None and len(layers):
        found.append("--fp8: the matmuls of experts stay in bf16")
    return found


def _in_bf16(whole: nn.Module | None) -> Iterator[tuple[str, WeightedModule]]:
    """The matrices of a module that are not in fp8. Those of experts are not among them."""
    for name, module in [] if whole is None else whole.named_modules():
        if isinstance(module, WeightedModule) and module.weight.dim() == 2 and module.fp8 is None:
            yield name, module


def _head(stage: CausalLM) -> VocabularyTable | None:
    if stage.final_norm is None or stage.head is not None:
        return stage.head
    return None if stage.embedding is None else stage.embedding.word
