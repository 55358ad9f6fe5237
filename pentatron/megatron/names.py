"""`megatron.…` as another name of `pentatron.megatron.…`."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

from pentatron.errors import UserError

_THEIRS, _OURS = "megatron", "pentatron.megatron"
# What the distribution megatron-core brings; ours has more.
_REAL = "megatron.core"


class _SameModule(importlib.abc.Loader):
    """Gives the module that bears our name, rather than a second copy of it."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.spec = module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just put the spec of the other name there.
        module.__spec__ = self.spec


class MegatronNames(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _THEIRS and not fullname.startswith(f"{_THEIRS}."):
            return None
        name = _OURS + fullname.removeprefix(_THEIRS)
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            return None
        is_package = hasattr(module, "__path__")
        return importlib.machinery.ModuleSpec(fullname, _SameModule(module), is_package=is_package)


def as_megatron(replace: bool = True) -> bool:
    """From now on `import megatron.…` finds the modules here; whether it does is returned.

    An installed Megatron is hidden by ours, in this process, unless `replace` is False: then it stays what is found.
    """
    if any(isinstance(finder, MegatronNames) for finder in sys.meta_path):
        return True
    if not replace and installed_megatron() is not None:
        return False
    foreign = [name for name in sys.modules if name == _THEIRS or name.startswith(f"{_THEIRS}.")]
    if foreign:
        raise UserError(
            f"{foreign[0]} of the installed Megatron is imported already; call as_megatron() before anything imports it"
        )
    sys.meta_path.insert(0, MegatronNames())
    return True


def installed_megatron() -> str | None:
    """Where the real package lies, if it is installed."""
    try:
        spec = importlib.util.find_spec(_REAL)
    except ModuleNotFoundError:
        return None
    return None if spec is None else spec.origin
