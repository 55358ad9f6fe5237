"""Module specs: a layer as a table of classes for its slots.

A `ModuleSpec` names a class, constant arguments for it and the contents of its own slots; `build_module`
builds it. The slots are typed dataclasses, so that a missing or misspelled slot fails where the spec is
written.
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
    """`module` is a class, a function, or an import path `("package.module", "Name")`."""

    module: Any
    params: Mapping[str, Any] = field(default_factory=dict)
    submodules: Any = None

    def __str__(self) -> str:
        name = ".".join(map(str, self.module)) if isinstance(self.module, tuple) else _name(self.module)
        return f"ModuleSpec({name})"


# The contents of a slot: a spec, or directly what its `module` may be.
Slot = ModuleSpec | type | Callable[..., Any] | tuple[str, str]


class IdentityOp(nn.Module):
    """The identity, for slots that a family leaves empty."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


# Attention masks with Megatron's names. Only `causal` is available.
AttnMaskType = enum.Enum("AttnMaskType", "padding causal no_mask padding_causal arbitrary")


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
    """The slots of a layer. The `bda` slots (bias, dropout, add) add a block's output to the residual."""

    input_layernorm: Slot
    self_attention: Slot
    self_attn_bda: Slot | None = None
    pre_mlp_layernorm: Slot = IdentityOp
    mlp: Slot = IdentityOp
    mlp_bda: Slot | None = None


@dataclass(frozen=True)
class TransformerBlockSubmodules:
    """A spec for every layer of the model, on whichever stage it is, and for the final norm."""

    layer_specs: Sequence[ModuleSpec]
    layer_norm: Slot | None = None


def build_module(slot: Slot, *args: Any, **kwargs: Any) -> Any:
    """Builds the module of a spec or class. The spec's parameters take precedence over the arguments.

    A function is returned, not called, with the spec's parameters bound.
    """
    spec, factory = _resolved(slot)
    if isinstance(factory, FunctionType | functools.partial):
        return functools.partial(factory, **spec.params) if spec.params else factory
    if not isinstance(factory, type):
        raise UserError(f"{spec}: a slot must be a class, a function or a ModuleSpec, not {_name(factory)}")
    named = {**kwargs, **spec.params}
    if spec.submodules is not None:
        named["submodules"] = spec.submodules
    try:
        inspect.signature(factory).bind(*args, **named)
    except TypeError as error:
        arguments = ", ".join([type(value).__name__ for value in args] + [f"{name}=" for name in named])
        raise UserError(
            f"{spec}: {factory.__name__} cannot be built from ({arguments}), {error}; "
            "give its constructor these parameters, or **kwargs"
        ) from None
    return factory(*args, **named)


def takes(slot: Slot, parameter: str, base: type | tuple[type, ...] = object) -> bool:
    """Whether a slot holds a subclass of `base` whose constructor has this parameter."""
    factory = _resolved(slot)[1]
    is_subclass = isinstance(factory, type) and issubclass(factory, base)
    return is_subclass and parameter in inspect.signature(factory).parameters


def _resolved(slot: Slot) -> tuple[ModuleSpec, Any]:
    """Returns a slot as a spec, and its class or function."""
    spec = slot if isinstance(slot, ModuleSpec) else ModuleSpec(slot)
    if not isinstance(spec.module, tuple):
        return spec, spec.module
    if len(spec.module) != 2:
        raise UserError(f'{spec}: an import path has two strings, ("package.module", "Name")')
    return spec, import_named(spec.module[0], spec.module[1], str(spec))


def document_kwargs(module: nn.Module, documents: DocumentStarts | None) -> dict[str, DocumentStarts]:
    """Returns documents as a keyword argument for the forward of `module`, or nothing if sequences are not
    divided.

    Users' modules therefore need no `documents` parameter unless documents are used; then a module without it
    is an error.
    """
    if documents is None:
        return {}
    if not torch.compiler.is_compiling() and not accepts(type(module).forward, "documents"):
        raise UserError(
            f"--reset-attention-mask would be lost in {type(module).__name__}: its forward has no parameter documents; add "
            "documents=None there and pass it to the attention inside, or leave the flag out"
        )
    return {"documents": documents}


@functools.cache
def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether a function accepts an argument of this name."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def import_named(module: str, name: str, what: str) -> Any:
    """Imports `name` from a module, which may be in the current folder.

    `what` is the option that asks for it, for errors.
    """
    try:
        with current_folder_on_path():
            imported = importlib.import_module(module)
    except Exception as error:  # whatever the user's file does wrong
        raise UserError(
            f"{what}: module {module} cannot be imported ({type(error).__name__}: {error}); "
            "install it, or put it in the folder where the command runs"
        ) from None
    if not hasattr(imported, name):
        raise UserError(f"{what}: module {module} has no {name} ({imported.__file__})")
    return getattr(imported, name)


@contextmanager
def current_folder_on_path() -> Iterator[None]:
    """Adds the current folder to `sys.path`, where users of an installed command expect it."""
    added = {str(Path.cwd())} - set(sys.path)
    sys.path.extend(added)
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)


def _name(thing: Any) -> str:
    return getattr(thing, "__name__", None) or repr(thing)
