"""Layers that are compiled, one by one or some together: each becomes one graph, and all layers of a kind share what is made for the first.

What talks to other ranks, what decides while it runs, and what depends on the tokens stays as it is: it interrupts the graph of its layer, and
the parts around it are compiled.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pentatron.kernels.choice import triton_works
from pentatron.layout.documents import DocumentStarts
from pentatron.nn.attention import SelfAttention
from pentatron.nn.linear import ColumnParallelLinear, RowParallelLinear, WeightedModule
from pentatron.nn.moe import MoE
from pentatron.nn.norm import LayerNorm, RMSNorm
from pentatron.nn.spec import documents_for
from pentatron.nn.transformer_layer import TransformerLayer

# Kinds of layers, times training and evaluation, times shapes: all of one function, for which torch allows few by default.
_MOST_VERSIONS = 64


@dataclass(frozen=True)
class Compiled:
    """How many layers are compiled, and what was left out, with the reason."""

    layers: int
    left_out: tuple[str, ...]


def compile_layers(
    stages: Iterable[nn.Module],
    documents: bool,
    backend: Any = "inductor",
    options: dict[str, Any] | None = None,
    together: int = 1,
) -> Compiled:
    """Compiles the layers of these stages, and their last norm, when they first run.

    `documents`: sequences are divided by what their tokens are. `together`: so many layers are one graph, where nothing comes
    between them. The forward of a module is replaced, so that hooks (those that gather shards, say) stay outside. Must be called when the stages are whole: with weight gradients deferred, if they are.
    """
    from torch import _dynamo as dynamo

    dynamo.assume_constant_result(triton_works)
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, _MOST_VERSIONS)
    # Shards hide what else a layer is: without these guards one with a window would run the graph of one without.
    dynamo.config.skip_fsdp_guards = False
    count, left_out = 0, dict[str, None]()
    for stage in stages:
        whole = not documents
        for layer in stage.get_submodule("layers").children():
            # A layer of a user's own may look at documents, which are out of sight inside.
            if not isinstance(layer, TransformerLayer) or (documents and type(layer) is not TransformerLayer):
                left_out[f"{type(layer).__name__}, a layer of your own"] = None
                whole = False
                continue
            for module, reason in _apart(layer, documents):
                whole = False
                left_out[reason] = None
                forward = _opened(module.forward) if documents else module.forward
                module.forward = torch.compiler.disable(forward)
            _compile(layer, backend, options)
            if documents:
                layer.forward = _sealed(layer.forward)  # type: ignore[method-assign]
            count += 1
        if together > 1 and whole:
            stage.together = Together(together, backend, options)  # type: ignore[assignment]
        norm = getattr(stage, "final_norm", None)
        if isinstance(norm, RMSNorm | LayerNorm):
            _compile(norm, backend, options)
    return Compiled(count, tuple(left_out))


def _compile(module: nn.Module, backend: Any, options: dict[str, Any] | None) -> None:
    module.forward = torch.compile(module.forward, backend=backend, options=options)
    module.runs_whole = True  # type: ignore[assignment]


class Together:
    """Some layers that follow each other as one compiled function. To enter one, its guards and its way into autograd, takes the host as long as
    many launches: a model of small layers waits for that."""

    def __init__(self, count: int, backend: Any, options: dict[str, Any] | None) -> None:
        self.count = count
        self._compiled = torch.compile(_in_turn, backend=backend, options=options)

    def __call__(
        self, x_BSD: Tensor, layers: Sequence[nn.Module], *inputs: Any
    ) -> tuple[Tensor, Sequence[nn.Module]]:
        """What the first ones make, and the layers that are left: too few, or something is to be called around one of them."""
        while len(some := tuple(layers[: self.count])) == self.count and not any(map(_has_hooks, some)):
            x_BSD, layers = self._compiled(some, x_BSD, *inputs), layers[self.count :]
        return x_BSD, layers


def _in_turn(layers: Sequence[nn.Module], x_BSD: Tensor, *inputs: Any) -> Tensor:
    for layer in layers:
        # As its class has it: the one of the layer itself is compiled already.
        x_BSD = type(layer).forward(layer, x_BSD, *inputs)
    return x_BSD


def _has_hooks(layer: nn.Module) -> bool:
    found = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    return any(found)


@dataclass(frozen=True)
class _Sealed:
    """Documents on their way through a compiled layer, which looks neither at how many there are nor where they begin."""

    documents: DocumentStarts


def _sealed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*inputs: Any, documents: DocumentStarts | None = None) -> Tensor:
        return forward(*inputs, documents=None if documents is None else _Sealed(documents))

    return call


def _opened(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*inputs: Any, **named: Any) -> Tensor:
        if isinstance(sealed := named.get("documents"), _Sealed):
            named["documents"] = sealed.documents
        return forward(*inputs, **named)

    return call


def _apart(module: nn.Module, documents: bool) -> Iterator[tuple[nn.Module, str]]:
    """The largest parts of a module that are not compiled."""
    for child in module.children():
        reason = _reason(child)
        if documents and child is getattr(module, "attention", None) and type(child) is not SelfAttention:
            documents_for(child, ())
            reason = f"{type(child).__name__}, which is told of documents"
        if reason:
            yield child, reason
            continue
        if isinstance(child, SelfAttention) and (reason := _reason_of_attention(child, documents)):
            if documents:
                documents_for(child.core_attention, ())
            yield child.core_attention, reason
        yield from _apart(child, documents)


def _reason(module: nn.Module) -> str:
    if isinstance(module, MoE):
        return "experts, whose sizes follow from their tokens"
    if isinstance(module, WeightedModule) and module.deferred is not None:
        return "matrix products, whose weight gradients wait for another part of the schedule"
    if isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.axis.size > 1:
        return "matrix products that talk to other tensor ranks"
    return ""


def _reason_of_attention(attention: SelfAttention, documents: bool) -> str:
    context = getattr(attention.core_attention, "context", None)
    if getattr(context, "size", 1) > 1:
        return "attention that talks to other context ranks"
    return "attention within documents, which begin elsewhere in every batch" if documents else ""
