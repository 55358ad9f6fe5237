"""Compilation of layers with `torch.compile`: each layer, or several layers together, is one graph.

Layers of a kind share their compiled code. Each layer is compiled when it is built. Parts with collectives,
data-dependent control flow or data-dependent shapes break the graph of their layer and run eagerly; the parts
around them are compiled.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pentatron.layout.documents import DocumentStarts
from pentatron.ops.dispatch import triton_works

# torch.compile's default limit is too low for all kinds of layers, train and eval mode, and shapes of one
# function.
_MOST_VERSIONS = 64

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
Forward = Callable[..., Tensor]


@dataclass(frozen=True)
class CompileOptions:
    """How the layers of a model are compiled.

    `backend` and `options` are those of `torch.compile`. `layers_per_graph` counts consecutive layers.
    `documents`: sequences are divided into documents, which are passed through graphs as an opaque object.
    """

    backend: Any = "inductor"
    options: dict[str, Any] | None = None
    layers_per_graph: int = 1
    documents: bool = False

    def compiled(self, forward: Forward) -> Forward:
        """Compiles a forward at its first call. Hooks of its module stay outside the graph."""
        from torch import _dynamo as dynamo

        dynamo.assume_constant_result(triton_works)
        dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, _MOST_VERSIONS)
        # FSDP skips guards on module attributes: a layer with a window would run the graph of one without.
        dynamo.config.skip_fsdp_guards = False
        return torch.compile(forward, backend=self.backend, options=self.options)

    def layer(self, forward: Forward) -> Forward:
        """Compiles the forward of a layer, which passes documents through as an opaque object."""
        compiled = self.compiled(forward)

        def call(*inputs: Any, documents: DocumentStarts | None = None) -> Tensor:
            return compiled(*inputs, documents=None if documents is None else _OpaqueDocuments(documents))

        return call if self.documents else compiled

    def eager(self, forward: Forward) -> Forward:
        """Returns a part of a layer that breaks the graph and runs eagerly."""

        def call(*inputs: Any, **named: Any) -> Tensor:
            if isinstance(opaque := named.get("documents"), _OpaqueDocuments):
                named["documents"] = opaque.documents
            return forward(*inputs, **named)

        return torch.compiler.disable(call if self.documents else forward)

    def run_eagerly(self, owner: nn.Module, name: str) -> Forward:
        """Returns a function that calls the submodule `name` of `owner` eagerly, whatever its class."""
        return self.eager(lambda *inputs, **named: getattr(owner, name)(*inputs, **named))


class CompiledLayers:
    """Runs consecutive layers as one compiled function.

    Entering a compiled function (guards and autograd) costs as much host time as many kernel launches, which
    dominates for small layers.
    """

    def __init__(self, compile: CompileOptions) -> None:
        self.count = compile.layers_per_graph
        self._compiled = compile.compiled(_in_turn)

    def __call__(
        self, x_BSD: Tensor, layers: Sequence[nn.Module], *inputs: Any
    ) -> tuple[Tensor, Sequence[nn.Module]]:
        """Runs the layers in groups; returns the hidden states and the layers left over.

        Layers are left over if they are too few for a group or have hooks.
        """
        while len(group := tuple(layers[: self.count])) == self.count:
            if any(getattr(layer, hooks) for layer in group for hooks in _HOOKS):
                break
            x_BSD, layers = self._compiled(group, x_BSD, *inputs), layers[self.count :]
        return x_BSD, layers


def compiled_layers(compile: CompileOptions | None, layers: Iterable[nn.Module]) -> CompiledLayers | None:
    """Returns None unless graphs of several layers are configured and every layer is compiled whole."""
    if (
        compile is None
        or compile.layers_per_graph == 1
        or compile.documents
        or compilation_report(layers).graph_breaks
    ):
        return None
    return CompiledLayers(compile)


def _in_turn(layers: Sequence[nn.Module], x_BSD: Tensor, *inputs: Any) -> Tensor:
    for layer in layers:
        # The class's forward, because the instance's is compiled already.
        x_BSD = type(layer).forward(layer, x_BSD, *inputs)
    return x_BSD


@dataclass(frozen=True)
class _OpaqueDocuments:
    """Wraps documents inside a compiled layer, so that no guard depends on their number or starts."""

    documents: DocumentStarts


@dataclass(frozen=True)
class CompileReport:
    """How many layers are compiled, and which parts are not, with the reason."""

    layers: int
    graph_breaks: tuple[str, ...]


def compilation_report(layers: Iterable[nn.Module]) -> CompileReport:
    """Reports what is compiled of layers that were built with `CompileOptions`."""
    count, reasons = 0, dict[str, None]()
    for layer in layers:
        if not getattr(layer, "runs_whole", False):
            reasons[f"{type(layer).__name__}, a custom layer"] = None
            continue
        reasons |= dict.fromkeys(_reasons(layer))
        count += 1
    return CompileReport(count, tuple(reasons))


def _reasons(module: nn.Module) -> Iterator[str]:
    """Yields why parts of a module are not compiled, outermost parts first.

    A part states its reason itself, or the module that calls it does.
    """
    graph_breaks: dict[str, str] = getattr(module, "graph_breaks", {})
    yield from graph_breaks.values()
    for name, child in module.named_children():
        if name in graph_breaks:
            continue
        if reason := getattr(child, "graph_break_reason", ""):
            yield reason
        else:
            yield from _reasons(child)
