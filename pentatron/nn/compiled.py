"""How layers are compiled: each becomes one graph, or some of them together, and all layers of a kind share
what is made for the first.

Each layer takes its compiled form when it is built. A part that talks to other ranks, decides while it runs
or depends on the tokens keeps itself out: it interrupts the graph of its layer, and the parts around it are
compiled.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pentatron.layout.documents import DocumentStarts
from pentatron.ops.dispatch import triton_works

# Kinds of layers, times training and evaluation, times shapes: all of one function, for which torch allows few by default.
_MOST_VERSIONS = 64

Forward = Callable[..., Tensor]


@dataclass(frozen=True)
class Compile:
    """How the layers of a model are compiled.

    `backend` and `options` are those of `torch.compile`. `together`: so many layers are one graph, where
    nothing comes between them. `documents`: sequences are divided into documents, which no graph looks at.
    """

    backend: Any = "inductor"
    options: dict[str, Any] | None = None
    together: int = 1
    documents: bool = False

    def whole(self, forward: Forward) -> Forward:
        """A forward that is compiled when it first runs. Hooks of its module stay outside."""
        from torch import _dynamo as dynamo

        dynamo.assume_constant_result(triton_works)
        dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, _MOST_VERSIONS)
        # Shards hide what else a layer is: without these guards one with a window would run the graph of one
        # without.
        dynamo.config.skip_fsdp_guards = False
        made: Forward = torch.compile(forward, backend=self.backend, options=self.options)
        return made

    def layer(self, forward: Forward) -> Forward:
        """The same for a layer, which hands documents on unseen."""
        return _sealed(self.whole(forward)) if self.documents else self.whole(forward)

    def apart(self, forward: Forward) -> Forward:
        """A part of a layer that interrupts its graph and runs as it is written."""
        made: Forward = torch.compiler.disable(_opened(forward) if self.documents else forward)
        return made

    def called_apart(self, owner: nn.Module, name: str) -> Forward:
        """Calls a part of `owner` so, whatever its class: what its owner knows to interrupt the graph."""

        def call(*inputs: Any, **named: Any) -> Tensor:
            made: Tensor = getattr(owner, name)(*inputs, **named)
            return made

        return self.apart(call)


class Together:
    """Some layers that follow each other as one compiled function. To enter one, its guards and its way into autograd, takes the host as long as
    many launches: a model of small layers waits for that."""

    def __init__(self, compile: Compile) -> None:
        self.count = compile.together
        self._compiled = compile.whole(_in_turn)

    def __call__(
        self, x_BSD: Tensor, layers: Sequence[nn.Module], *inputs: Any
    ) -> tuple[Tensor, Sequence[nn.Module]]:
        """What the first ones make, and the layers that are left: too few, or something is to be called around one of them."""
        while len(some := tuple(layers[: self.count])) == self.count and not any(map(_has_hooks, some)):
            x_BSD, layers = self._compiled(some, x_BSD, *inputs), layers[self.count :]
        return x_BSD, layers


def together_of(compile: Compile | None, layers: Iterable[nn.Module]) -> Together | None:
    """Several layers as one function, if that is wanted and all of them are compiled whole."""
    if compile is None or compile.together == 1 or compile.documents or compiled_of(layers).left_out:
        return None
    return Together(compile)


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


def _sealed(forward: Forward) -> Forward:
    def call(*inputs: Any, documents: DocumentStarts | None = None) -> Tensor:
        return forward(*inputs, documents=None if documents is None else _Sealed(documents))

    return call


def _opened(forward: Forward) -> Forward:
    def call(*inputs: Any, **named: Any) -> Tensor:
        if isinstance(sealed := named.get("documents"), _Sealed):
            named["documents"] = sealed.documents
        return forward(*inputs, **named)

    return call


@dataclass(frozen=True)
class Compiled:
    """How many layers are compiled, and what was left out, with the reason."""

    layers: int
    left_out: tuple[str, ...]


def compiled_of(layers: Iterable[nn.Module]) -> Compiled:
    """What is compiled of layers that were built to be."""
    count, left_out = 0, dict[str, None]()
    for layer in layers:
        if not getattr(layer, "runs_whole", False):
            left_out[f"{type(layer).__name__}, a layer of your own"] = None
            continue
        left_out |= dict.fromkeys(_reasons(layer))
        count += 1
    return Compiled(count, tuple(left_out))


def _reasons(module: nn.Module) -> Iterator[str]:
    """Why the largest parts of a module that are not compiled are not. A part may say so itself, or the
    module that calls it."""
    called_apart: dict[str, str] = getattr(module, "called_apart", {})
    yield from called_apart.values()
    for name, child in module.named_children():
        if name in called_apart:
            continue
        if reason := getattr(child, "left_out", ""):
            yield reason
        else:
            yield from _reasons(child)
