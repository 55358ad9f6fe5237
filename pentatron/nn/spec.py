"""A model as a table of choices: which class stands in which slot of a layer.

A `ModuleSpec` names a class, constant arguments for it and what stands in its own slots; `build_module` makes a module
of it. The slots have types, so that a table that leaves one out or misspells it fails where it is written.
"""

import enum
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from pentatron.errors import UserError
from pentatron.layout.documents import DocumentStarts


@dataclass(frozen=True)
class ModuleSpec:
    """`module` is a class, a function, or where to import it from: `("package.module", "Name")`."""

    module: Any
    params: Mapping[str, Any] = field(default_factory=dict)
    submodules: Any = None

    def __str__(self) -> str:
        name = ".".join(map(str, self.module)) if isinstance(self.module, tuple) else _name(self.module)
        return f"ModuleSpec({name})"


# What may stand in a slot: a spec, or shortly what its `module` may be.
Slot = ModuleSpec | type | Callable[..., Any] | tuple[str, str]


class IdentityOp(nn.Module):
    """Stands in a slot that a family leaves empty."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


class AttnMaskType(enum.Enum):
    """Which tokens a token attends to. Every model here is causal; the others have Megatron's names, to be refused by."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5


@dataclass(frozen=True)
class SelfAttentionSubmodules:
    linear_qkv: Slot
    core_attention: Slot
    linear_proj: Slot
    q_layernorm: Slot = IdentityOp
    k_layernorm: Slot = IdentityOp


@dataclass(frozen=True)
class MLPSubmodules:
    linear_fc1: Slot
    linear_fc2: Slot


@dataclass(frozen=True)
class TransformerLayerSubmodules:
    """The two `bda` slots add what a part made to the stream, with dropout; empty, they are as in every family."""

    input_layernorm: Slot
    self_attention: Slot
    self_attn_bda: Slot | None = None
    pre_mlp_layernorm: Slot = IdentityOp
    mlp: Slot = IdentityOp
    mlp_bda: Slot | None = None


@dataclass(frozen=True)
class TransformerBlockSubmodules:
    """A spec for every layer of the model, whichever stages hold them, and for the norm after the last one."""

    layer_specs: Sequence[ModuleSpec]
    layer_norm: Slot | None = None


def build_module(slot: Slot, *args: Any, **kwargs: Any) -> Any:
    """The module of a spec or class; the spec's own parameters count more than those given here.

    A function is not called but handed back, with the spec's parameters filled in.
    """
    spec, made_by = _resolved(slot)
    if isinstance(made_by, FunctionType | functools.partial):
        return functools.partial(made_by, **spec.params) if spec.params else made_by
    if not isinstance(made_by, type):
        raise UserError(f"{spec}: a slot wants a class, a function or a ModuleSpec, not {_name(made_by)}")
    named = {**kwargs, **spec.params}
    if spec.submodules is not None:
        named["submodules"] = spec.submodules
    try:
        inspect.signature(made_by).bind(*args, **named)
    except TypeError as error:
        given = ", ".join([type(value).__name__ for value in args] + [f"{name}=" for name in named])
        raise UserError(
            f"{spec}: {made_by.__name__} cannot be made of ({given}), {error}; "
            "give its constructor these parameters, or **kwargs"
        ) from None
    return made_by(*args, **named)


def takes(slot: Slot, base: type | tuple[type, ...], parameter: str) -> bool:
    """Whether a slot holds a class derived from `base` whose constructor has this parameter."""
    made_by = _resolved(slot)[1]
    derived = isinstance(made_by, type) and issubclass(made_by, base)
    return derived and parameter in inspect.signature(made_by).parameters


def _resolved(slot: Slot) -> tuple[ModuleSpec, Any]:
    """A slot as a spec, and the class or function it stands for."""
    spec = slot if isinstance(slot, ModuleSpec) else ModuleSpec(slot)
    if not isinstance(spec.module, tuple):
        return spec, spec.module
    if len(spec.module) != 2:
        raise UserError(f'{spec}: an import path has two words, ("package.module", "Name")')
    return spec, import_named(spec.module[0], spec.module[1], str(spec))


def documents_for(module: nn.Module, documents: DocumentStarts | None) -> dict[str, DocumentStarts]:
    """Documents as an argument of a module that attends or holds what does; none where sequences are not divided.

    So modules of users need know of documents only where there are any, and those that do not are refused then.
    """
    if documents is None:
        return {}
    if not torch.compiler.is_compiling() and not _takes_documents(type(module).forward):
        raise UserError(
            f"--reset-attention-mask would be lost in {type(module).__name__}: its forward has no parameter documents; add "
            "documents=None there and hand it on to the attention inside, or leave the flag out"
        )
    return {"documents": documents}


@functools.cache
def _takes_documents(forward: Callable[..., Any]) -> bool:
    parameters = inspect.signature(forward).parameters
    return "documents" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def import_named(module: str, name: str, what: str) -> Any:
    """`name` of a module, which may lie in the folder of the command; `what` asks for it."""
    try:
        with importing_from_here():
            found = importlib.import_module(module)
    except Exception as error:  # whatever the user's file does wrong
        raise UserError(
            f"{what}: module {module} cannot be imported ({type(error).__name__}: {error}); "
            "is it installed, or in the folder where the command runs?"
        ) from None
    if not hasattr(found, name):
        raise UserError(f"{what}: module {module} has no {name} ({found.__file__})")
    return getattr(found, name)


@contextmanager
def importing_from_here() -> Iterator[None]:
    """An installed command does not look for modules in the current folder, but its user does."""
    here = str(Path.cwd())
    if here in sys.path:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)


def _name(thing: Any) -> str:
    return getattr(thing, "__name__", None) or repr(thing)
