"""Reading a checkpoint into memory that already exists, whatever layout wrote it and whatever layout reads it."""

import contextlib
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentatron.checkpoint.format import DamagedCheckpoint, Manifest, StoredPiece, TensorRecord
from pentatron.checkpoint.tensor_file import DTYPES, TORCH_FILES, blocks, holds
from pentatron.checkpoint.torch_file import TorchFile
from pentatron.errors import UserError
from pentatron.parallel.shards import Fragment, Shape, overlap, region

WEIGHTS = "weights/"
# Of experts' routers: what is moved by counts, not by gradients.
ROUTERS = "routers/"
# A step of many ranks has many files, a process may open so many.
_OPEN_FILES = 200


@dataclass(frozen=True)
class _Read:
    """What to fetch from one stored piece: the rectangle `start`, counted within the piece, and where it goes."""

    piece: StoredPiece
    dtype: torch.dtype
    start: Shape
    into: Tensor


def load_fragments(folder: Path, manifest: Manifest, targets: Iterable[Fragment]) -> None:
    """Overwrites every target with what is stored of its rectangle; nothing missing, nothing of another shape.

    Weights may be stored in a type of which the target's holds every value; all else must be of the target's own. Only what a
    target needs is read, a block at a time, and every file is opened once.
    """
    wanted: dict[str, list[Fragment]] = {}
    for target in targets:
        wanted.setdefault(target.tensor, []).append(target)
    _require(folder, manifest, wanted)
    reads = [read for name, of_name in wanted.items() for read in _plan(manifest.tensors[name], of_name)]
    reads.sort(key=lambda read: (read.piece.file, read.piece.key))
    for file, of_file in itertools.groupby(reads, key=attrgetter("piece.file")):
        _read_file(folder / file, list(of_file))


def load_tensor(folder: Path, manifest: Manifest, name: str) -> Tensor:
    """One whole tensor, such as the state of a random generator."""
    if name not in manifest.tensors:
        raise UserError(f"checkpoint {folder} holds no {name}; was it made by another version?")
    record = manifest.tensors[name]
    tensor = torch.empty(record.shape, dtype=DTYPES[record.dtype])
    load_fragments(folder, manifest, [Fragment(name, record.shape, (0,) * len(record.shape), tensor)])
    return tensor


class StepReader:
    """Any rectangle of any tensor of a step, one after the other; files stay open until the end of a `with`."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._closing = contextlib.ExitStack()
        self._files: dict[Path, Any] = {}
        self._found: tuple[str, _Overlaps] | None = None

    def read(self, name: str, start: Shape, size: Shape) -> Tensor:
        """The values in the type they are stored in; where one piece holds them all, a view of the file."""
        record = self.manifest.tensors[name]
        dtype = DTYPES[record.dtype]
        if self._found is None or self._found[0] != name:
            self._found = name, _Overlaps(record.pieces)
        found = list(self._found[1].find(start, size))
        if len(found) == 1 and found[0][1] == (start, size):
            piece = found[0][0]
            return self._rectangle(piece, dtype, tuple(i - j for i, j in zip(start, piece.start)), size)
        values = torch.empty(size, dtype=dtype)
        for read in _reads(self._found[1], dtype, Fragment(name, record.shape, start, values)):
            read.into.copy_(self._rectangle(read.piece, dtype, read.start, tuple(read.into.shape)))
        return values

    def _rectangle(self, piece: StoredPiece, dtype: torch.dtype, start: Shape, size: Shape) -> Tensor:
        path = self.folder / piece.file
        with _told_if_damaged(path, "name another step"):
            stored = self._open(path).get_slice(piece.key)
            _check_shape(stored, piece)
            return _slice(stored, piece, dtype, start, size)

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            if len(self._files) >= _OPEN_FILES:
                self._closing.close()
                self._files.clear()
            self._files[path] = self._closing.enter_context(_opened(path))
        return self._files[path]

    def __enter__(self) -> "StepReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()


def _require(folder: Path, manifest: Manifest, wanted: dict[str, list[Fragment]]) -> None:
    missing = [name for name in wanted if name not in manifest.tensors]
    if missing:
        raise UserError(
            f"checkpoint {folder} lacks {len(missing)} tensors of this model, the first being {missing[0]}; check the parameters it was "
            f"converted or trained with: the architecture must be the same, tensor and pipeline sizes need not"
        )
    for target in itertools.chain.from_iterable(wanted.values()):
        name, record = target.tensor, manifest.tensors[target.tensor]
        if tuple(target.shape) != record.shape:
            raise UserError(
                f"checkpoint {folder} holds {name} as {list(record.shape)}, this model wants {list(target.shape)}; "
                f"check the parameters it was converted or trained with: the architecture must be the same, tensor and pipeline sizes need not"
            )
        kept, is_weight = target.values.dtype, name.startswith(WEIGHTS)
        if kept != DTYPES[record.dtype] and not (is_weight and holds(kept, DTYPES[record.dtype])):
            advice = "; import the model again with --dtype fp32 --allow-narrowing" if is_weight else ""
            raise UserError(
                f"checkpoint {folder} holds {name} as {record.dtype}, this run keeps it as {str(kept).removeprefix('torch.')}{advice}"
            )


def _plan(record: TensorRecord, targets: Sequence[Fragment]) -> Iterator[_Read]:
    """What the targets, all of one tensor, need from which stored piece."""
    stored = _Overlaps(record.pieces)
    for target in targets:
        yield from _reads(stored, DTYPES[record.dtype], target)


def _reads(stored: "_Overlaps", dtype: torch.dtype, target: Fragment) -> Iterator[_Read]:
    size, found = tuple(target.values.shape), 0
    for piece, (start, common) in stored.find(target.start, size):
        inside = tuple(i - j for i, j in zip(start, target.start, strict=True))
        into = region(target.values.detach(), inside, common)
        yield _Read(piece, dtype, tuple(i - j for i, j in zip(start, piece.start, strict=True)), into)
        found += math.prod(common)
    assert found == math.prod(size), f"{target.tensor}: {found} elements are stored of {size}"


class _Overlaps:
    """Finds the pieces that overlap a rectangle, without asking every one of them."""

    def __init__(self, pieces: Sequence[StoredPiece]) -> None:
        dimensions = len(pieces[0].start) if pieces else 0
        # Along the dimension in which most of them differ; a number has no dimension, and one piece.
        self._along = max(range(dimensions), key=lambda d: len({p.start[d] for p in pieces}), default=None)
        self._pieces = sorted(pieces, key=lambda piece: self._first(piece.start))
        self._firsts = [self._first(piece.start) for piece in self._pieces]
        # How far the pieces reach up to here only grows, so that it can be searched too.
        ends = (self._end(piece.start, piece.shape) for piece in self._pieces)
        self._reach = list(itertools.accumulate(ends, max))

    def _first(self, start: Shape) -> int:
        return 0 if self._along is None else start[self._along]

    def _end(self, start: Shape, size: Shape) -> int:
        return 1 if self._along is None else start[self._along] + size[self._along]

    def find(self, start: Shape, size: Shape) -> Iterator[tuple[StoredPiece, tuple[Shape, Shape]]]:
        """Each such piece with the (start, size) of what it shares with the rectangle."""
        first = bisect_right(self._reach, self._first(start))
        last = bisect_left(self._firsts, self._end(start, size))
        for piece in self._pieces[first:last]:
            common = overlap(start, size, piece.start, piece.shape)
            if common is not None:
                yield piece, common


def _read_file(path: Path, reads: Sequence[_Read]) -> None:
    advice = "resume with --verify-checkpoint to fall back to an older step"
    with _told_if_damaged(path, advice), _opened(path) as file, torch.no_grad():
        for piece, of_piece in itertools.groupby(reads, key=attrgetter("piece")):
            _read_piece(file.get_slice(piece.key), piece, of_piece)


def _opened(path: Path) -> Any:
    """A file of tensors, ours or one that torch has written."""
    return TorchFile(path) if path.suffix in TORCH_FILES else _library().safe_open(path, framework="pt")


def _library() -> Any:
    try:
        import safetensors
    except ImportError:
        raise UserError(
            "loading a checkpoint needs the safetensors library: pip install safetensors"
        ) from None
    return safetensors


@contextlib.contextmanager
def _told_if_damaged(path: Path, advice: str) -> Iterator[None]:
    try:
        yield
    except (_library().SafetensorError, FileNotFoundError, DamagedCheckpoint) as error:
        raise UserError(f"{path} is damaged ({error}); {advice}") from None


def _read_piece(stored: Any, piece: StoredPiece, reads: Iterable[_Read]) -> None:
    """`stored` gives any rectangle of the piece as a view of the file, of which no more is read."""
    _check_shape(stored, piece)
    for read in reads:
        for start, size in blocks(tuple(read.into.shape), read.into.element_size()):
            at = tuple(i + j for i, j in zip(read.start, start, strict=True))
            region(read.into, start, size).copy_(_slice(stored, piece, read.dtype, at, size))


def _check_shape(stored: Any, piece: StoredPiece) -> None:
    if tuple(stored.get_shape()) != piece.shape:
        raise DamagedCheckpoint(f"{piece.key} is {stored.get_shape()} there, not {list(piece.shape)}")


def _slice(stored: Any, piece: StoredPiece, dtype: torch.dtype, start: Shape, size: Shape) -> Tensor:
    values: Tensor = stored[tuple(slice(i, i + n) for i, n in zip(start, size, strict=True))]
    if values.dtype != dtype:
        raise DamagedCheckpoint(f"{piece.key} is {values.dtype} there, not {dtype}")
    return values
