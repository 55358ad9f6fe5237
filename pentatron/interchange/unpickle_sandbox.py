"""Unpickles files of Megatron-LM's checkpoints in a sandboxed process, without executing anything of them.

    python -I -S unpickle_sandbox.py FILE SECONDS

Prints JSON. Unpickling may call any function the pickle names. Here every name is replaced by a stand-in that
only records its arguments, so nothing of the file runs and nothing is imported for it; names that are not
allowed are refused. `torch_dist.py` starts this program with an empty environment. Prints the positions of
tensors of a `.metadata` file, and everything but the tensor data of a torch zip file. Memory, CPU time and
output are limited: a hundred bytes can request any amount of each.
"""

import contextlib
import functools
import json
import pickle
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

# Modules whose names are allowed. Names are recorded as text and never imported.
_MODULES = frozenset(
    "torch megatron argparse collections numpy pathlib enum signal datetime transformer_engine apex nemo _codecs".split()
)
_BUILTINS = frozenset(
    "set frozenset bytearray complex slice range int float str list dict tuple bool bytes object getattr".split()
)
_TENSORS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor")
_WRAPPERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_MEMORY_BYTES = 16 * 2**30
# Approximate limit of the output in bytes: nested references in a small file can expand exponentially.
_MAX_OUTPUT_BYTES = 2**28
_BYTES_PER_VALUE = 64


class ForbiddenName(Exception):
    """The file names something that no checkpoint needs."""


class StandIn:
    """Stand-in for any object of the file: records arguments, state and items."""

    origin = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> "StandIn":
        instance = object.__new__(cls)
        instance.args, instance.state, instance.items = args, None, []
        return instance

    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))


@functools.cache
def _stand_in(origin: str) -> type[StandIn]:
    return type("Named", (StandIn,), {"origin": origin})


class SandboxUnpickler(pickle.Unpickler):
    """Unpickler that replaces all names by stand-ins."""

    def find_class(self, module: str, name: str) -> Any:
        origin, root = f"{module}.{name}", module.partition(".")[0]
        allowed = name in _BUILTINS if module in ("builtins", "__builtin__") else root in _MODULES
        if not allowed:
            raise ForbiddenName(origin)
        return OrderedDict if origin == "collections.OrderedDict" else _stand_in(origin)

    def persistent_load(self, pid: Any) -> Any:
        storage = StandIn(*pid)
        storage.origin = "storage"
        return storage


def read_index(path: str) -> dict[str, Any]:
    """Returns dtype, shape and positions of the pieces of every tensor of a `.metadata` file."""
    with Path(path).open("rb") as file:
        metadata = SandboxUnpickler(file).load().state
    tensors: dict[str, Any] = {}
    others: list[str] = []
    for name, record in metadata["state_dict_metadata"].items():
        if not record.origin.endswith(".TensorStorageMetadata"):
            others.append(name)
            continue
        state = record.state
        pieces = [[_shape(p.state["offsets"]), _shape(p.state["sizes"])] for p in state["chunks"]]
        properties = state["properties"].state
        dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
        dtype_name = str(dtype.origin).removeprefix("torch.")
        tensors[name] = {"dtype": dtype_name, "shape": _shape(state["size"]), "pieces": pieces}
    places = []
    for index, place in metadata["storage_data"].items():
        key, position = index.state, place.state
        start = None if key.get("offset") is None else _shape(key["offset"])
        where = [position[name] for name in ("relative_path", "offset", "length")]
        places.append([key["fqn"], start, *where, bool(position.get("transform_descriptors"))])
    return {"tensors": tensors, "others": others, "places": places}


def _shape(size: Any) -> list[int]:
    """Returns a torch.Size, which is pickled as a tuple, or a list."""
    numbers = size.args[0] if isinstance(size, StandIn) and size.args else getattr(size, "args", size)
    return [int(n) for n in numbers]


def read_archive(path: str) -> Any:
    """Returns the content of a file of torch.save; tensors as dtype, shape, strides and position."""
    with zipfile.ZipFile(path) as archive, Path(path).open("rb") as raw:
        program = next(entry for entry in archive.namelist() if entry.endswith("/data.pkl"))
        with archive.open(program) as file:
            loaded = SandboxUnpickler(file).load()
        folder = program.removesuffix("data.pkl")

        def first_byte(key: str) -> tuple[int, int]:
            """Where a storage begins in the file, and how long it is."""
            entry = archive.getinfo(f"{folder}data/{key}")
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{key} is compressed")
            raw.seek(entry.header_offset + 26)
            name, extra = (int.from_bytes(raw.read(2), "little") for _ in range(2))
            return entry.header_offset + 30 + name + extra, entry.file_size

        return _Printable(first_byte).plain(loaded)


class _Printable:
    """Converts loaded objects to JSON types. `first_byte` returns the position and size of a storage."""

    def __init__(self, first_byte: Any) -> None:
        self.first_byte, self.left = first_byte, _MAX_OUTPUT_BYTES

    def plain(self, value: Any) -> Any:
        self.left -= _BYTES_PER_VALUE + (len(value) if isinstance(value, str) else 0)
        if self.left < 0:
            raise ValueError("its content is larger than that of any checkpoint")
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (list, tuple, set, frozenset)):
            return [self.plain(item) for item in value]
        if isinstance(value, dict):
            return {str(key): self.plain(item) for key, item in value.items() if not isinstance(key, StandIn)}
        if isinstance(value, type) and issubclass(value, StandIn):
            return {"~": value.origin}
        if not isinstance(value, StandIn):
            return {"~": type(value).__name__}
        if value.origin in _TENSORS:
            return _tensor(value.args, self.first_byte)
        if value.origin in _WRAPPERS:
            return self.plain(value.args[0])
        if value.origin == "argparse.Namespace":
            return self.plain(value.state or {})
        if value.origin.endswith(".BytesIO") or value.origin == "storage":
            return {"~": value.origin}
        return {"~": value.origin, "of": self.plain(list(value.args))}


def _tensor(args: tuple[Any, ...], first_byte: Any) -> dict[str, Any]:
    """Returns the metadata of a tensor."""
    storage, offset, size, strides = args[:4]
    _, kind, key, _, _ = storage.args
    begin, storage_bytes = first_byte(str(key))
    dtype = kind.origin.rpartition(".")[2].removesuffix("Storage")
    layout = {"shape": _shape(size), "strides": _shape(strides), "offset": int(offset)}
    return {"~tensor": dtype, **layout, "first": begin, "bytes": storage_bytes}


def limit(seconds: int) -> None:
    """Sets resource limits of this process. Each is set on its own, as some systems lack some of them."""
    with contextlib.suppress(ImportError):
        import resource

        # The soft CPU limit sends SIGXCPU, by which the parent recognises it; the hard one sends SIGKILL.
        limits = {"AS": 2 * (_MEMORY_BYTES,), "FSIZE": (0, 0), "CORE": (0, 0), "CPU": (seconds, seconds + 1)}
        for name, soft_and_hard in limits.items():
            with contextlib.suppress(ValueError, OSError, AttributeError):
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), soft_and_hard)


def main(path: str, seconds: int) -> int:
    """Prints the content of the file as JSON: `found`, `refused` or `error`."""
    limit(seconds)
    try:
        answer = {"found": read_archive(path) if zipfile.is_zipfile(path) else read_index(path)}
    except ForbiddenName as name:
        answer = {"refused": str(name)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(answer, allow_nan=True))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
