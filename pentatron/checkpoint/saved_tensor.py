"""One tensor of torch.save: where its numbers lie, without loading it.

Such a file is an archive of a small pickle and of plain numbers. A pickle is a program that may call what it names. This one is
asked for nothing but the outline of a tensor: the three names it needs for that are answered with stand-ins that keep their
arguments, and any other name ends the reading.
"""

import io
import pickle
import zipfile
from collections import OrderedDict
from typing import Any

import torch

from pentatron.parallel.pieces import Shape

# Types of elements, by the names of the classes that torch pickles for their memory.
STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
# The pickle of one tensor has some hundred bytes.
_LONGEST_PROGRAM = 1 << 16


class _Outline(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _arguments
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in STORAGES:
            return name
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no tensor needs")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _arguments(*given: Any) -> tuple[str, tuple[Any, ...]]:
    return "tensor", given


def saved_tensor(data: memoryview) -> tuple[int, torch.dtype, Shape, Shape]:
    """First byte, type, shape and strides of the tensor in an archive; raises whatever is wrong with it."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        program = next(entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
        if program.file_size > _LONGEST_PROGRAM or program.compress_type != zipfile.ZIP_STORED:
            raise ValueError("what describes the tensor is too long")
        found = _Outline(io.BytesIO(archive.read(program))).load()
        if not (isinstance(found, tuple) and found[:1] == ("tensor",)):
            raise ValueError(f"a {type(found).__name__} lies there, and no tensor")
        (kind, storage, key, _, _), first, size, strides = found[1][:4]
        if kind != "storage" or storage not in STORAGES:
            raise ValueError("its numbers are not stored as such")
        dtype, shape, steps = STORAGES[storage], _whole(size), _whole(strides)
        entry = archive.getinfo(program.filename.removesuffix("data.pkl") + f"data/{key}")
    if entry.compress_type != zipfile.ZIP_STORED or len(shape) != len(steps):
        raise ValueError("its numbers are packed")
    header = entry.header_offset
    named, extra = (int.from_bytes(data[header + at : header + at + 2], "little") for at in (26, 28))
    begin = header + 30 + named + extra
    (skipped,) = _whole((first,))
    elements = skipped + (1 + sum((n - 1) * step for n, step in zip(shape, steps)) if all(shape) else 0)
    if begin + entry.file_size > len(data) or elements * dtype.itemsize > entry.file_size:
        raise ValueError("its numbers reach beyond their place")
    return begin + skipped * dtype.itemsize, dtype, shape, steps


def _whole(numbers: Any) -> Shape:
    found = tuple(numbers)
    if not all(type(n) is int and n >= 0 for n in found):
        raise ValueError(f"{found} are no sizes")
    return found
