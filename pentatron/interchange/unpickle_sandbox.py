"""Reads what is pickled in Megatron-LM's checkpoints, as a program of its own that can do nothing else.

    python -I -S unpickle_sandbox.py FILE SECONDS

Prints JSON. A pickle is a program that may call what it names. Here every name is answered with a stand-in that only keeps what it
is given, so nothing of the file runs and nothing is imported for it; names outside the list end the reading. `reading.py` starts
this with an empty environment. Of `.metadata` the places of tensors are printed, of torch's zip files everything but
the numbers in them, and where those lie in the file. Memory, seconds of a core and what is printed are limited: a hundred bytes can
ask for any amount of each.
"""

import contextlib
import json
import pickle
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

# Whose names may occur. They are kept as text, whoever they belong to.
_MODULES = frozenset(
    "torch megatron argparse collections numpy pathlib enum signal datetime transformer_engine apex nemo _codecs".split()
)
_BUILTINS = frozenset(
    "set frozenset bytearray complex slice range int float str list dict tuple bool bytes object getattr".split()
)
_TENSORS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor")
_WRAPPERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_MEMORY_BYTES = 16 * 2**30
# What may be printed, in about bytes: a small file can name one list many times, and that one another.
_PRINTED = 2**28
_OF_A_VALUE = 64


class Refused(Exception):
    """The file names something that no checkpoint needs."""


class Inert:
    """Stands for whatever a file names: keeps arguments, state and items."""

    origin = ""

    def __new__(cls, *args: Any, **named: Any) -> "Inert":
        made = object.__new__(cls)
        made.args, made.state, made.items = args, None, []
        return made

    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __init__(self, *args: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))


class Reader(pickle.Unpickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.known: dict[str, Any] = {"collections.OrderedDict": OrderedDict}

    def find_class(self, module: str, name: str) -> Any:
        origin, root = f"{module}.{name}", module.partition(".")[0]
        allowed = name in _BUILTINS if module in ("builtins", "__builtin__") else root in _MODULES
        if not allowed:
            raise Refused(origin)
        if origin not in self.known:
            self.known[origin] = type("Named", (Inert,), {"origin": origin})
        return self.known[origin]

    def persistent_load(self, pid: Any) -> Any:
        made = Inert(*pid)
        made.origin = "storage"
        return made


def read_index(path: str) -> dict[str, Any]:
    """Of a `.metadata` file: type, size and pieces of every tensor, and where each piece lies."""
    with Path(path).open("rb") as file:
        found = Reader(file).load().state
    tensors: dict[str, Any] = {}
    others: list[str] = []
    for name, record in found["state_dict_metadata"].items():
        if not record.origin.endswith(".TensorStorageMetadata"):
            others.append(name)
            continue
        state = record.state
        pieces = [[_shape(p.state["offsets"]), _shape(p.state["sizes"])] for p in state["chunks"]]
        tensors[name] = {
            "dtype": _dtype(state["properties"]),
            "shape": _shape(state["size"]),
            "pieces": pieces,
        }
    places = []
    for index, place in found["storage_data"].items():
        of, at = index.state, place.state
        start = of.get("offset")
        transformed = bool(at.get("transform_descriptors"))
        places.append(
            [
                of["fqn"],
                None if start is None else _shape(start),
                at["relative_path"],
                at["offset"],
                at["length"],
                transformed,
            ]
        )
    return {"tensors": tensors, "others": others, "places": places}


def _shape(size: Any) -> list[int]:
    """Of torch.Size, which is made of a tuple, or of a list."""
    numbers = size.args[0] if isinstance(size, Inert) and size.args else getattr(size, "args", size)
    return [int(n) for n in numbers]


def _dtype(properties: Any) -> str:
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) else state["dtype"]
    return str(dtype.origin).removeprefix("torch.")


def read_archive(path: str) -> Any:
    """Of a file of torch.save: everything in it; a tensor as its type, shape, strides and first byte."""
    with zipfile.ZipFile(path) as archive, Path(path).open("rb") as raw:
        program = next(entry for entry in archive.namelist() if entry.endswith("/data.pkl"))
        with archive.open(program) as file:
            found = Reader(file).load()  # type: ignore[arg-type]
        folder = program.removesuffix("data.pkl")

        def first_byte(key: str) -> tuple[int, int]:
            """Where a storage begins in the file, and how long it is."""
            entry = archive.getinfo(f"{folder}data/{key}")
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{key} is compressed")
            raw.seek(entry.header_offset + 26)
            name, extra = (int.from_bytes(raw.read(2), "little") for _ in range(2))
            return entry.header_offset + 30 + name + extra, entry.file_size

        return _Printable(first_byte).plain(found)


class _Printable:
    """Turns what was read into what JSON can say. `first_byte`: where a storage begins."""

    def __init__(self, first_byte: Any) -> None:
        self.first_byte, self.left = first_byte, _PRINTED

    def plain(self, value: Any) -> Any:
        self.left -= _OF_A_VALUE + (len(value) if isinstance(value, str) else 0)
        if self.left < 0:
            raise ValueError("it holds more than any checkpoint")
        return _plain(value, self.plain, self.first_byte)


def _plain(value: Any, plain: Any, first_byte: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items() if not isinstance(key, Inert)}
    if isinstance(value, type) and issubclass(value, Inert):
        return {"~": value.origin}
    if not isinstance(value, Inert):
        return {"~": type(value).__name__}
    if value.origin in _TENSORS:
        return _tensor(value.args, first_byte)
    if value.origin in _WRAPPERS:
        return plain(value.args[0])
    if value.origin == "argparse.Namespace":
        return plain(value.state or {})
    if value.origin.endswith(".BytesIO") or value.origin == "storage":
        return {"~": value.origin}
    return {"~": value.origin, "of": plain(list(value.args))}


def _tensor(args: tuple[Any, ...], first_byte: Any) -> dict[str, Any]:
    storage, offset, size, strides = args[:4]
    _, kind, key, _, _ = storage.args
    begin, held = first_byte(str(key))
    dtype = kind.origin.rpartition(".")[2].removesuffix("Storage")
    return {
        "~tensor": dtype,
        "shape": _shape(size),
        "strides": _shape(strides),
        "first": begin,
        "bytes": held,
        "offset": int(offset),
    }


def limit(seconds: int) -> None:
    """The kernel ends this process when it reaches a limit. Each is set by itself: not every system has all of them."""
    with contextlib.suppress(ImportError):
        import resource

        # At the first limit of a core's seconds comes SIGXCPU, which tells the reason; at the second SIGKILL.
        limits = {"AS": 2 * (_MEMORY_BYTES,), "FSIZE": (0, 0), "CORE": (0, 0), "CPU": (seconds, seconds + 1)}
        for name, both in limits.items():
            with contextlib.suppress(ValueError, OSError, AttributeError):
                resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), both)


def main(path: str, seconds: int) -> int:
    limit(seconds)
    try:
        found = read_archive(path) if zipfile.is_zipfile(path) else read_index(path)
    except Refused as name:
        answer: dict[str, Any] = {"refused": str(name)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    else:
        answer = {"found": found}
    sys.stdout.write(json.dumps(answer, allow_nan=True))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
