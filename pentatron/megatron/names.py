"""Import finders for the modules of the table, and for `megatron...` as another name of them."""

import contextlib
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from pentatron.errors import UserError
from pentatron.megatron import module_table
from pentatron.megatron.module_table import MODULES, Module


class TableFinder(importlib.abc.MetaPathFinder):
    """Finds `pentatron.megatron.X` if the table has `megatron.X`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.removeprefix("pentatron.")
        if name == fullname or name not in MODULES:
            return None
        is_package = any(other.startswith(f"{name}.") for other in MODULES)
        # `repr(module)` shows the origin, so that it leads to the table.
        return ModuleSpec(
            fullname, _TableLoader(name, MODULES[name]), origin=module_table.__file__, is_package=is_package
        )


class _TableLoader(importlib.abc.Loader):
    """Fills a module with the names of its row."""

    def __init__(self, name: str, row: Module) -> None:
        self.name = name
        self.row = row

    def exec_module(self, module: ModuleType) -> None:
        # First, because a package may take names from its own submodules.
        module.__dict__["__getattr__"] = self._getattr_of(module)
        names: dict[str, Any] = {}
        for path, imported in self.row.imports.items():
            source = importlib.import_module(f"pentatron.{path}")
            if imported == "*":
                names |= _defined_in(source)
                continue
            for item in imported.split(", "):
                attribute, _, alias = item.partition(" as ")
                names[alias or attribute] = getattr(source, attribute)
        module.__dict__.update(names, __doc__=self.row.doc, __all__=sorted(names))

    def _getattr_of(self, module: ModuleType) -> Callable[[str], Any]:
        def module_getattr(name: str) -> Any:
            if name in self.row.unavailable:
                raise ImportError(f"{self.name}.{name} is not available: {self.row.unavailable[name]}")
            # As Megatron's packages import their submodules, programs use these without an import of their
            # own.
            if f"{self.name}.{name}" in MODULES:
                return importlib.import_module(f"{module.__name__}.{name}")
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        return module_getattr


def _defined_in(module: ModuleType) -> dict[str, Any]:
    """Public functions and classes that the module defines itself."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }


class _AliasLoader(importlib.abc.Loader):
    """Returns an imported module under a second name, without a second copy of its classes."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has replaced it by the spec of the alias.
        module.__spec__ = self.spec


class MegatronNames(importlib.abc.MetaPathFinder):
    """Finds `megatron.X` as the module `pentatron.megatron.X`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _is_megatrons(fullname):
            return None
        name = f"pentatron.{fullname}"
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            return None
        return ModuleSpec(fullname, _AliasLoader(module), is_package=hasattr(module, "__path__"))


def register_modules() -> None:
    """Makes the modules of the table importable."""
    if not any(isinstance(finder, TableFinder) for finder in sys.meta_path):
        # Before the path finder, which would take a leftover folder `core` for a namespace package.
        sys.meta_path.insert(0, TableFinder())


def as_megatron(replace: bool = True) -> bool:
    """Makes `import megatron...` resolve to `pentatron.megatron...` in this process, and returns whether it
    does.

    An installed Megatron is hidden, unless `replace` is False: then it is kept and False is returned.
    """
    if any(isinstance(finder, MegatronNames) for finder in sys.meta_path):
        return True
    if not replace and installed_megatron() is not None:
        return False
    loaded = list(filter(_is_megatrons, sys.modules))
    if loaded:
        raise UserError(
            f"{loaded[0]} of the installed Megatron is imported already; call as_megatron() before anything imports it"
        )
    sys.meta_path.insert(0, MegatronNames())
    return True


def installed_megatron() -> str | None:
    """Path of the installed megatron-core, or None."""
    spec = None
    with contextlib.suppress(ModuleNotFoundError):
        # The part of Megatron-LM that the distribution megatron-core installs.
        spec = importlib.util.find_spec("megatron.core")
    return None if spec is None else spec.origin


def _is_megatrons(name: str) -> bool:
    return name.partition(".")[0] == "megatron"
