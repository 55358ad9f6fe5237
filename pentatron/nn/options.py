"""Options of a model besides its architecture and layout: attention kernels, recompute, fp8, compilation.

They are known before the model is built. A layer takes them in its constructor, together with its parallel
axes.
"""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pentatron.nn.compiled import CompileOptions
from pentatron.nn.kv_cache import ActiveCache
from pentatron.nn.loss import CrossEntropy
from pentatron.nn.recompute import NO_RECOMPUTE, Recompute, RecomputeSwitch
from pentatron.ops.fp8_linear import Fp8Format, LinearOptions, WeightScales
from pentatron.ops.linear import DeferredGradients
from pentatron.parallel import axes
from pentatron.parallel.world import World
from pentatron.settings.parallel import ParallelConfig

# Megatron's and torch's names. With several kernels, the first one that supports the inputs runs.
_BACKENDS = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
    "fused": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    **{name: [SDPBackend.MATH] for name in ("math", "unfused", "local")},
}

# From Hopper on, cuDNN's kernel is the fastest of those that support the same inputs.
_HOPPER = 9
_FASTEST_FIRST = [*_BACKENDS["fused"], SDPBackend.MATH]


def allowed_kernels(backend: str, device: torch.device, dropout: float = 0.0) -> list[SDPBackend] | None:
    """Returns the allowed attention kernels in order of preference; None leaves the choice to torch."""
    if backend != "auto":
        return _BACKENDS[backend]
    # Query the GPU only from a process that computes on it: the query creates a CUDA context.
    prefers_cudnn = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= _HOPPER
    # cuDNN with dropout: results and gradients are verified against fp64, resumed runs are not, so it is not
    # chosen.
    return (_FASTEST_FIRST[1:] if dropout else _FASTEST_FIRST) if prefers_cudnn else None


class AttentionKernels:
    """Restricts attention to some kernels, in order of preference, or not at all if none are chosen."""

    def __init__(self, chosen: list[SDPBackend] | None = None) -> None:
        self.chosen = chosen
        self._device: torch.device | None = None
        self._is_entered = False

    def choose(self, backend: str, device: torch.device, dropout: float) -> None:
        """Chooses the kernels for the device of the input, which may differ from that of construction."""
        if device != self._device:
            self._device, self.chosen = device, allowed_kernels(backend, device, dropout)

    def context(self) -> AbstractContextManager[None]:
        """Returns a context manager.

        Entering `sdpa_kernel` takes longer than a kernel launch, so nested uses inside a model do not enter
        it a second time. While compiling they do, because the compiler cannot trace the flag.
        """
        if self.chosen is None:
            return nullcontext()
        if torch.compiler.is_compiling():
            return sdpa_kernel(self.chosen, set_priority=True)
        return nullcontext() if self._is_entered else self._entered(self.chosen)

    @contextmanager
    def _entered(self, chosen: list[SDPBackend]) -> Iterator[None]:
        self._is_entered = True
        try:
            with sdpa_kernel(chosen, set_priority=True):
                yield
        finally:
            self._is_entered = False


@dataclass(frozen=True)
class Fp8Options:
    """Which linear layers multiply in fp8 if their sizes allow it: those of `layers`, counted from 0, and the
    output layer.

    `scales` computes the scales of all their weights at once.
    """

    format: Fp8Format
    layers: Collection[int]
    head: bool = False
    scales: WeightScales | None = None


@dataclass(frozen=True)
class ModelOptions:
    """Options of the stages of a model.

    `recompute`: parts recomputed in backward. `fuses_gates`: on a GPU, fuses the gate of an MLP into a matrix
    product. `deferred` keeps weight gradients for the weight half of a backward. `compile`: how layers are
    compiled, None for not at all.
    """

    attention_backend: str = "auto"
    recompute: Recompute = NO_RECOMPUTE
    cross_entropy: CrossEntropy = field(default_factory=CrossEntropy)
    fuses_gates: bool = False
    fp8: Fp8Options | None = None
    deferred: DeferredGradients | None = None
    compile: CompileOptions | None = None

    def linear_of_layer(self, layer: int) -> LinearOptions:
        """Options of the linear layers of a layer."""
        in_fp8 = self.fp8 is not None and layer in self.fp8.layers
        return replace(self.linear(in_fp8), in_graph=self.compile is not None)

    def linear_of_head(self) -> LinearOptions:
        """Options of the output layer."""
        return self.linear(self.fp8 is not None and self.fp8.head)

    def linear(self, in_fp8: bool = False) -> LinearOptions:
        """Options of all other matrices, which multiply in the model's dtype."""
        if self.fp8 is None or not in_fp8:
            return LinearOptions(self.deferred)
        return LinearOptions(self.deferred, self.fp8.format, self.fp8.scales)


DEFAULT_OPTIONS = ModelOptions()


@dataclass(frozen=True)
class LayerOptions:
    """Options shared by the layers of one model.

    `recompute`, `kernels` and `cache` can change between two forwards.
    """

    recompute: RecomputeSwitch = field(default_factory=RecomputeSwitch)
    kernels: AttentionKernels = field(default_factory=AttentionKernels)
    cache: ActiveCache = field(default_factory=ActiveCache)
    fuses_gates: bool = False
    compile: CompileOptions | None = None


@dataclass(frozen=True)
class Axes:
    """The parallel axes and options that a layer is built with; by default those of one process.

    `tensor` has the options of linear layers.
    """

    tensor: axes.TensorAxis = axes.NO_TENSOR_PARALLELISM
    context: axes.ContextAxis = axes.NO_CONTEXT_PARALLELISM
    expert: axes.ExpertAxis = axes.NO_EXPERT_PARALLELISM
    options: LayerOptions = field(default_factory=LayerOptions)

    def with_linear(self, linear: LinearOptions) -> "Axes":
        """Returns a copy with other options of linear layers."""
        return replace(self, tensor=replace(self.tensor, linear=linear))

    def uncompiled(self) -> "Axes":
        """Returns a copy for the parts of a layer that are not compiled."""
        plain = self.with_linear(replace(self.tensor.linear, in_graph=False))
        return replace(plain, options=replace(self.options, compile=None))


ONE_PROCESS = Axes()


def axes_of(world: World, parallel: ParallelConfig) -> Axes:
    tensor = axes.tensor_axis(world, parallel.sequence_parallel)
    context = axes.context_axis(world, parallel.cp_comm_type)
    return Axes(tensor, context, axes.expert_axis(world))
