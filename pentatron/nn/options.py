"""How a model computes, beside its architecture and its layout. All of it is known before the model is built.

A layer takes its options in its constructor, with the axes it is spread over, and keeps them.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from pentatron.nn.attention_kernels import AttentionKernels
from pentatron.nn.compiled import Compile
from pentatron.nn.kv_cache import CacheInUse
from pentatron.nn.loss import CrossEntropy
from pentatron.nn.recompute import NOTHING, Recompute, RecomputeSwitch
from pentatron.parallel.deferral import DeferredGradients
from pentatron.parallel.linear_options import LinearOptions, WeightScales
from pentatron.parallel.scaled_linear import Fp8Format


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
