"""How a model computes, beside its architecture and its layout. All of it is known before the model is built.

A layer takes its options in its constructor, with the axes it is spread over, and keeps them.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from types import TracebackType

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pentatron.nn.compiled import Compile
from pentatron.nn.kv_cache import CacheInUse
from pentatron.nn.loss import CrossEntropy
from pentatron.nn.recompute import NOTHING, Recompute, RecomputeSwitch
from pentatron.ops.fp8_linear import Fp8Format, LinearOptions, WeightScales
from pentatron.ops.linear import DeferredGradients
from pentatron.parallel.axes import (
    NO_EXPERTS_ELSEWHERE,
    WHOLE_LAYERS,
    WHOLE_SEQUENCES,
    ContextAxis,
    ExpertAxis,
    TensorAxis,
    context_axis,
    expert_axis,
    tensor_axis,
)
from pentatron.parallel.world import World
from pentatron.settings.parallel import ParallelConfig

# Which of torch's attention kernels may run.


# Megatron's names for kernels, beside torch's own. Of several, the first that takes what it is given runs.
_BACKENDS = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "fused": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
    "unfused": [SDPBackend.MATH],
    "local": [SDPBackend.MATH],
}

# On GPUs from this generation on (Hopper), cuDNN's kernel is the fastest of those that take the same.
_CUDNN_FIRST = 9
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def chosen_kernels(backend: str, device: torch.device, dropout: float = 0.0) -> list[SDPBackend] | None:
    """Which kernels may run, those to prefer first; None leaves the choice to torch, as `auto` does on most
    devices."""
    if backend != "auto":
        return _BACKENDS[backend]
    # A GPU is asked only by who computes on it: asking opens it.
    newest = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _CUDNN_FIRST
    # With dropout cuDNN's results and gradients are right (against fp64, with the mask it used); whole runs
    # that resume with it are yet to be compared.
    return (_FASTEST_FIRST[1:] if dropout else _FASTEST_FIRST) if newest else None


class AttentionKernels:
    """Around attention that is restricted to some kernels, in their order; nothing is, where none are chosen.

    To say so takes torch longer than a launch, so what is said around a whole model is not said again in each
    of its layers.
    """

    def __init__(self, chosen: list[SDPBackend] | None = None) -> None:
        self.chosen = chosen
        self._device: torch.device | None = None
        self._said: AbstractContextManager[None] | None = None
        self._inside = 0

    def choose(self, backend: str, device: torch.device, dropout: float) -> None:
        """For where a model runs now; it may have been made elsewhere."""
        if device != self._device:
            self._device, self.chosen = device, chosen_kernels(backend, device, dropout)

    def __enter__(self) -> None:
        if self.chosen is not None and not self._inside:
            self._said = sdpa_kernel(self.chosen, set_priority=True)
            self._said.__enter__()
        self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside -= 1
        if self._said is not None and not self._inside:
            said, self._said = self._said, None
            said.__exit__(kind, error, trace)

    def around(self) -> AbstractContextManager[None]:
        """Itself; a compiler, which cannot look into how it counts, is told each time, and compiles it in."""
        if not torch.compiler.is_compiling():
            return self
        return nullcontext() if self.chosen is None else sdpa_kernel(self.chosen, set_priority=True)


@dataclass(frozen=True)
class Fp8Options:
    """Which linear layers multiply in fp8, as far as their sizes allow it: those of `layers`, counted from 0,
    and the output layer.

    `scales`: computes the scales of their weights for all of them at once.
    """

    format: Fp8Format
    layers: Collection[int]
    head: bool = False
    scales: WeightScales | None = None


@dataclass(frozen=True)
class ModelOptions:
    """What the stages of a model are built with.

    `recompute`: what runs again in backward. `fuses_gates`: on a GPU, the gate of an MLP is part of a
    matrix's function. `deferred`: keeps weight gradients for the weight half of a backward. `compile`: how
    layers are compiled. None: not at all.
    """

    attention_backend: str = "auto"
    recompute: Recompute = NOTHING
    cross_entropy: CrossEntropy = field(default_factory=CrossEntropy)
    fuses_gates: bool = False
    fp8: Fp8Options | None = None
    deferred: DeferredGradients | None = None
    compile: Compile | None = None

    def linear_of_layer(self, layer: int) -> LinearOptions:
        """How the linear layers of a layer multiply."""
        return replace(
            self._linear(self.fp8 is not None and layer in self.fp8.layers), in_graph=self.compile is not None
        )

    def linear_of_head(self) -> LinearOptions:
        """How the output layer multiplies."""
        return self._linear(self.fp8 is not None and self.fp8.head)

    @property
    def linear(self) -> LinearOptions:
        """How all other matrices multiply: in the dtype of the model."""
        return self._linear(in_fp8=False)

    def _linear(self, in_fp8: bool) -> LinearOptions:
        if self.fp8 is None or not in_fp8:
            return LinearOptions(self.deferred)
        return LinearOptions(self.deferred, self.fp8.format, self.fp8.scales)


DEFAULT_OPTIONS = ModelOptions()


@dataclass(frozen=True)
class LayerOptions:
    """What the layers of one model share, from its `ModelOptions` and of its own: what is switched between
    two forwards is in `recompute`, `kernels` and `cache`."""

    recompute: RecomputeSwitch = field(default_factory=RecomputeSwitch)
    kernels: AttentionKernels = field(default_factory=AttentionKernels)
    cache: CacheInUse = field(default_factory=CacheInUse)
    fuses_gates: bool = False
    compile: Compile | None = None


# What a layer is built on: the axes it is spread over, and how it computes.


@dataclass(frozen=True)
class Axes:
    """Of one process by default. A layer hands them on to its parts; how linear layers multiply lies in
    `tensor`."""

    tensor: TensorAxis = WHOLE_LAYERS
    context: ContextAxis = WHOLE_SEQUENCES
    expert: ExpertAxis = NO_EXPERTS_ELSEWHERE
    options: LayerOptions = field(default_factory=LayerOptions)

    def with_linear(self, linear: LinearOptions) -> "Axes":
        """The same for layers that multiply in another way."""
        return replace(self, tensor=replace(self.tensor, linear=linear))

    def out_of_graphs(self) -> "Axes":
        """The same for the parts of a layer that is not compiled."""
        plain = self.with_linear(replace(self.tensor.linear, in_graph=False))
        return replace(plain, options=replace(self.options, compile=None))


ONE_PROCESS = Axes()


def axes_of(world: World, parallel: ParallelConfig) -> Axes:
    return Axes(
        tensor_axis(world, parallel.sequence_parallel),
        context_axis(world, parallel.cp_comm_type),
        expert_axis(world),
    )
