"""Which matmuls of a run are in fp8, and whether the device has such."""

from collections.abc import Iterable, Iterator

from torch import nn

from pentatron.config.decided import Fp8Decision
from pentatron.devices import FP8_MULTIPLE
from pentatron.errors import AgreedError
from pentatron.models.causal_lm import CausalLM
from pentatron.nn.linear import VocabularyTable, WeightedModule


def require_fp8(decided: Fp8Decision) -> None:
    """Refuses to train on a device without matmuls in fp8."""
    if decided.lacking:
        raise AgreedError(
            f"--fp8 {decided.format} needs a GPU with fp8 matmuls (NVIDIA's from compute capability 8.9 on: Ada, Hopper, Blackwell), and "
            f"{decided.lacking}; leave it out"
        )


def left_in_bf16(decided: Fp8Decision, stages: Iterable[CausalLM]) -> list[str]:
    """Notices about matrices that stay in bf16 although fp8 is on. They are named as in their layer."""
    small, without = set[str](), set[str]()
    for stage in stages:
        for number, layer in stage.layers.items():
            for name, module in _in_bf16(layer) if int(number) in decided.layers else ():
                (without if module.options.fp8 is None else small).add(name)
        small |= {"head" for _, module in _in_bf16(_head(stage)) if module.options.fp8 is not None}
    found = []
    if small:
        found.append(
            f"--fp8: matrices stay in bf16 where a side is no multiple of {FP8_MULTIPLE}: {', '.join(sorted(small))}"
        )
    if without:
        found.append(
            f"--fp8: matrices of layers of your own stay in bf16 where they are built without axes: {', '.join(sorted(without))}"
        )
    if decided.experts_left:
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
