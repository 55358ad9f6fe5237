"""Reads tensors in files written by torch, with the interface of a safetensors file: slices by key.

A key is `place|start|size|shape`: the position of a tensor in the file, a rectangle of it, and the shape to
view it as (with other axes of length one). In `.distcp` files the place is that of one tensor of torch.save,
of which only the metadata is unpickled; in `.pt` files it is that of the raw data. Only the requested
rectangle is read.
"""

import io
import math
import mmap
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentatron.checkpoint.format import DamagedCheckpoint
from pentatron.checkpoint.tensor_file import DTYPES, STORAGES
from pentatron.parallel.sharding import Shape, region

# --- metadata of one tensor of torch.save ---
#
# The file is a zip archive of a small pickle and of raw data. Unpickling may call any function the pickle
# names, so the three names that a tensor needs are replaced by stand-ins that record their arguments, and
# others are refused.


# The pickle of one tensor has a few hundred bytes.
_MAX_PICKLE_BYTES = 1 << 16


class _TensorUnpickler(pickle.Unpickler):
    """Unpickles the metadata of one tensor without calling anything the pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *arguments: ("tensor", arguments)
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in STORAGES:
            return name
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no tensor needs")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def read_tensor_metadata(data: memoryview) -> tuple[int, torch.dtype, Shape, Shape]:
    """Returns (first byte, dtype, shape, strides) of the tensor in an archive.

    Raises any exception if it is invalid.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        pickled = next(entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
        if pickled.file_size > _MAX_PICKLE_BYTES or pickled.compress_type != zipfile.ZIP_STORED:
            raise ValueError("the pickle of the tensor is too long")
        loaded = _TensorUnpickler(io.BytesIO(archive.read(pickled))).load()
        if not (isinstance(loaded, tuple) and loaded[:1] == ("tensor",)):
            raise ValueError(f"it contains a {type(loaded).__name__} instead of a tensor")
        (tag, storage, key, _, _), storage_offset, size, strides = loaded[1][:4]
        if tag != "storage" or storage not in STORAGES:
            raise ValueError("its storage has an unknown type")
        dtype, shape, stride = STORAGES[storage], _sizes(size), _sizes(strides)
        entry = archive.getinfo(pickled.filename.removesuffix("data.pkl") + f"data/{key}")
    if entry.compress_type != zipfile.ZIP_STORED or len(shape) != len(stride):
        raise ValueError("its data is compressed or its strides do not fit its shape")
    # The local header of a zip entry has 30 bytes, a name and an extra field, whose lengths are at bytes 26
    # and 28.
    header = entry.header_offset
    begin = header + 30 + sum(struct.unpack_from("<HH", data, header + 26))
    (skipped_elements,) = _sizes((storage_offset,))
    elements = skipped_elements + _extent(shape, stride)
    if begin + entry.file_size > len(data) or elements * dtype.itemsize > entry.file_size:
        raise ValueError("its elements reach beyond its storage")
    return begin + skipped_elements * dtype.itemsize, dtype, shape, stride


def _extent(shape: Shape, strides: Shape) -> int:
    """Number of elements from the first to the last of a strided tensor."""
    return 1 + sum((n - 1) * step for n, step in zip(shape, strides)) if all(shape) else 0


def _sizes(numbers: Any) -> Shape:
    """Returns sizes or strides as a tuple; raises ValueError unless all are non-negative integers."""
    sizes = tuple(numbers)
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise ValueError(f"{sizes} are not sizes")
    return sizes


def torch_save_position(offset: int, length: int) -> str:
    """Returns the place of a tensor of torch.save in a byte range of a file."""
    return f"saved:{offset}:{length}"


def raw_data_position(offset: int, dtype: str, shape: Shape) -> str:
    """Returns the place of contiguous raw data at a byte offset."""
    return f"plain:{offset}:{dtype}:{_format_shape(shape)}"


def rectangle_key(place: str, start: Shape, size: Shape, seen_as: Shape) -> str:
    return "|".join((place, *map(_format_shape, (start, size, seen_as))))


def _format_shape(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _parse_shape(text: str) -> Shape:
    return tuple(map(int, text.split(","))) if text else ()


class TorchFile:
    """Context manager that returns slices by key, as safetensors files do. The file is memory-mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: tuple[str, Tensor] | None = None

    def __enter__(self) -> "TorchFile":
        with self.path.open("rb") as file:
            # Copy-on-write: torch requires writable memory, and the file must not change.
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self

    def __exit__(self, *_: object) -> None:
        # Views keep the mapping alive; it is freed with the last of them.
        self._last = None

    def get_slice(self, key: str) -> "_Slice":
        try:
            return self._slice(*key.split("|"))
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            # Untrusted: keys come from the manifest.
            raise DamagedCheckpoint(f"the key {key[:80]!r} is invalid ({error})") from None

    def _slice(self, place: str, start: str, size: str, shape: str) -> "_Slice":
        if self._last is None or self._last[0] != place:
            self._last = place, self._tensor(place)
        whole, at, extent = self._last[1], _parse_shape(start), _parse_shape(size)
        if len(at) != whole.dim() or any(i + n > m for i, n, m in zip(at, extent, whole.shape)):
            raise DamagedCheckpoint(
                f"{place} is stored as {list(whole.shape)}, which does not contain {list(extent)} at {list(at)}"
            )
        return _Slice(region(whole, at, extent).reshape(_parse_shape(shape)))

    def _tensor(self, place: str) -> Tensor:
        kind, offset, *rest = place.split(":")
        if kind == "saved":
            return self._torch_save_tensor(int(offset), int(rest[0]))
        return self._raw_tensor(int(offset), *rest)

    def _torch_save_tensor(self, offset: int, length: int) -> Tensor:
        """Returns the tensor that torch.save wrote into a byte range, as a view of the file."""
        if not 0 <= offset <= offset + length <= len(self._memory):
            raise DamagedCheckpoint(f"the file ends before byte {offset + length}")
        try:
            archive = memoryview(self._memory)[offset : offset + length]
            begin, dtype, size, strides = read_tensor_metadata(archive)
            flat = torch.empty(0, dtype=dtype)
            if count := _extent(size, strides):
                flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset + begin)
            return flat.as_strided(size, strides)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise DamagedCheckpoint(f"no tensor can be read at byte {offset}: {reason}") from None

    def _raw_tensor(self, offset: int, dtype: str, shape: str) -> Tensor:
        """Returns contiguous raw data as a view of the file."""
        size, kind = _parse_shape(shape), DTYPES[dtype]
        count = math.prod(size)
        if not 0 <= offset <= offset + count * kind.itemsize <= len(self._memory):
            raise DamagedCheckpoint(f"the file ends before byte {offset + count * kind.itemsize}")
        return torch.frombuffer(self._memory, dtype=kind, count=count, offset=offset).view(size)


class _Slice:
    """Tensor with the interface of a safetensors slice."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def get_shape(self) -> list[int]:
        return list(self.values.shape)

    def __getitem__(self, index: Any) -> Tensor:
        values: Tensor = self.values[index]
        return values
