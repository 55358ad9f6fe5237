"""Specs of modules, and the modules they stand for."""

import inspect
from typing import Any

from pentatron.megatron.core.transformer.transformer_config import TransformerConfig, core_of
from pentatron.megatron.state import current, is_running
from pentatron.nn import spec
from pentatron.nn.spec import ModuleSpec, Slot, import_named


def build_module(slot: Slot, *args: Any, **kwargs: Any) -> Any:
    """The module of a spec or class. Its configuration may be Megatron's; in a run it is spread over the run's ranks."""
    converted = [core_of(value) if isinstance(value, TransformerConfig) else value for value in args]
    named = {
        name: core_of(value) if isinstance(value, TransformerConfig) else value
        for name, value in kwargs.items()
    }
    made_by = slot.module if isinstance(slot, ModuleSpec) else slot
    if isinstance(made_by, tuple) and len(made_by) == 2:
        made_by = import_named(made_by[0], made_by[1], str(slot))
    if is_running() and isinstance(made_by, type) and "axes" in inspect.signature(made_by).parameters:
        named.setdefault("axes", current().groups.axes)
    return spec.build_module(slot, *converted, **named)


__all__ = ["ModuleSpec", "build_module", "import_named"]
