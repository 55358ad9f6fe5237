"""Makes the modules of the table, and `megatron...` as another name of them."""

import contextlib
import importlib
import importlib.util
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from pentatron.errors import UserError
from pentatron.megatron import module_table
from pentatron.megatron.module_table import MODULES, UNAVAILABLE


def register_modules() -> None:
    """Makes the modules of the table importable. A module takes its names when the first one is used."""
    for row, imports in MODULES.items():
        name = f"pentatron.megatron.{row}"
        doc = f"Names of megatron.{row}, from {', '.join(imports) or 'nothing'}."
        module = sys.modules[name] = ModuleType(name, doc)
        # `repr(module)` shows the origin, so that it leads to the table.
        module.__spec__ = ModuleSpec(name, None, origin=module_table.__file__, is_package=True)
        used = partial(_use, module, row)
        vars(module).update(__path__=[], __getattr__=used, __dir__=partial(used, "__all__"))
        parent, _, child = name.rpartition(".")
        vars(sys.modules[parent])[child] = module


def _use(module: ModuleType, row: str, wanted: str) -> Any:
    """Returns a name of the module, which takes all names of its row at the first call."""
    if wanted in UNAVAILABLE.get(row, {}):
        raise ImportError(f"megatron.{row}.{wanted} is not available: {UNAVAILABLE[row][wanted]}")
    # Tools look for other special names in every module, which should import nothing.
    if "__all__" not in vars(module) and (wanted == "__all__" or not wanted.startswith("__")):
        names: dict[str, Any] = {}
        for path, imported in MODULES[row].items():
            source = importlib.import_module(f"pentatron.{path}")
            for item in _defined_in(source) if imported == "*" else imported.split(", "):
                attribute, _, alias = item.partition(" as ")
                names[alias or attribute] = getattr(source, attribute)
        vars(module).update(names, __all__=sorted(names))
    if wanted not in vars(module):
        raise AttributeError(f"module {module.__name__!r} has no attribute {wanted!r}")
    return vars(module)[wanted]


def _defined_in(module: ModuleType) -> list[str]:
    """Names of the public functions and classes that the module defines itself."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return [name for name, value in public.items() if getattr(value, "__module__", None) == module.__name__]


def as_megatron(replace: bool = True) -> bool:
    """Makes `import megatron...` resolve to `pentatron.megatron...` in this process, and returns whether it
    does.

    An installed Megatron is hidden, unless `replace` is False: then it is kept and False is returned.
    """
    ours = sys.modules["pentatron.megatron"]
    if sys.modules.get("megatron") is ours:
        return True
    if not replace and installed_megatron() is not None:
        return False
    if loaded := [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        raise UserError(
            f"{loaded[0]} of the installed Megatron is imported already; call as_megatron() before anything imports it"
        )
    for name in ("megatron", *(f"megatron.{row}" for row in MODULES)):
        sys.modules[name] = sys.modules[f"pentatron.{name}"]
    return True


def installed_megatron() -> str | None:
    """Path of the installed megatron-core, or None."""
    spec = None
    with contextlib.suppress(ModuleNotFoundError):
        # The part of Megatron-LM that the distribution megatron-core installs.
        spec = importlib.util.find_spec("megatron.core")
    return None if spec is None else spec.origin
