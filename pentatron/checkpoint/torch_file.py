"""Tensors in files that torch has written, opened like a safetensors file: any rectangle by a key, no more read than is asked for.

A key says where a tensor lies and which rectangle of it is meant, as `place|start|size|shape`: `shape` is what we see, the
same numbers with other axes of length one. In `.distcp` files the place is that of one tensor of torch.save, of which
nothing is unpickled but where its numbers lie; in `.pt` files it is that of the plain numbers.
"""

import io
import math
import mmap
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentatron.checkpoint.format import DamagedCheckpoint
from pentatron.checkpoint.tensor_file import DTYPES
from pentatron.parallel.shards import Shape, region

# One tensor of torch.save: where its numbers lie, without loading it.
#
# Such a file is an archive of a small pickle and of plain numbers. A pickle is a program that may call what
# it names. This one is asked for nothing but the outline of a tensor: the three names it needs for that are
# answered with stand-ins that keep their arguments, and any other name ends the reading.


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


def saved_place(offset: int, length: int) -> str:
    """Of what torch.save has written into a part of a file."""
    return f"saved:{offset}:{length}"


def plain_place(offset: int, dtype: str, shape: Shape) -> str:
    """Of numbers that lie one after the other from a byte on."""
    return f"plain:{offset}:{dtype}:{_written(shape)}"


def rectangle_key(place: str, start: Shape, size: Shape, seen_as: Shape) -> str:
    return "|".join((place, *map(_written, (start, size, seen_as))))


def _written(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _numbers(text: str) -> Shape:
    return tuple(map(int, text.split(","))) if text else ()


class TorchFile:
    """To be used in a `with`; gives slices as safetensors' files do."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: tuple[str, Tensor] | None = None

    def __enter__(self) -> "TorchFile":
        with self.path.open("rb") as file:
            # Writable for us alone, which torch wants of memory that it looks at.
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self

    def __exit__(self, *_: object) -> None:
        # Views of the memory may live on; it goes with the last of them.
        self._last = None

    def get_slice(self, key: str) -> "_Rectangle":
        try:
            return self._rectangle(*key.split("|"))
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            # Keys are written by whoever wrote the manifest.
            raise DamagedCheckpoint(f"nothing can be read by the key {key[:80]!r} ({error})") from None

    def _rectangle(self, place: str, start: str, size: str, shape: str) -> "_Rectangle":
        if self._last is None or self._last[0] != place:
            self._last = place, self._tensor(place)
        whole, at, extent = self._last[1], _numbers(start), _numbers(size)
        fits = len(at) == whole.dim() and all(i + n <= m for i, n, m in zip(at, extent, whole.shape))
        if not fits:
            raise DamagedCheckpoint(
                f"{place} is {list(whole.shape)} there, and {list(extent)} from {list(at)} on are wanted"
            )
        return _Rectangle(region(whole, at, extent).reshape(_numbers(shape)))

    def _tensor(self, place: str) -> Tensor:
        kind, offset, *rest = place.split(":")
        return self._saved(int(offset), int(rest[0])) if kind == "saved" else self._plain(int(offset), *rest)

    def _saved(self, offset: int, length: int) -> Tensor:
        if not 0 <= offset <= offset + length <= len(self._memory):
            raise DamagedCheckpoint(f"it ends before byte {offset + length}")
        try:
            begin, dtype, size, strides = saved_tensor(memoryview(self._memory)[offset : offset + length])
            count = 1 + sum((n - 1) * step for n, step in zip(size, strides)) if math.prod(size) else 0
            flat = torch.empty(0, dtype=dtype)
            if count:
                flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset + begin)
            return flat.as_strided(size, strides)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise DamagedCheckpoint(f"no tensor can be read at byte {offset}: {reason}") from None

    def _plain(self, offset: int, dtype: str, shape: str) -> Tensor:
        size, kind = _numbers(shape), DTYPES[dtype]
        count = math.prod(size)
        if not 0 <= offset <= offset + count * kind.itemsize <= len(self._memory):
            raise DamagedCheckpoint(f"it ends before byte {offset + count * kind.itemsize}")
        return torch.frombuffer(self._memory, dtype=kind, count=count, offset=offset).view(size)


class _Rectangle:
    def __init__(self, values: Tensor) -> None:
        self.values = values

    def get_shape(self) -> list[int]:
        return list(self.values.shape)

    def __getitem__(self, where: Any) -> Tensor:
        found: Tensor = self.values[where]
        return found
