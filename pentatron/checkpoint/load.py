"""Loads a checkpoint into existing tensors, resharding from the layout that saved it to the current one."""

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

from pentatron.checkpoint.format import DamagedCheckpoint, Manifest, StoredPiece
from pentatron.checkpoint.tensor_file import DTYPES, TORCH_FILES, blocks, represents_exactly
from pentatron.checkpoint.torch_file import TorchFile
from pentatron.errors import UserError
from pentatron.parallel.sharding import Fragment, Shape, overlap, region

WEIGHTS = "weights/"
# Expert biases of routers, which are updated from token counts, not by gradients.
ROUTERS = "routers/"
# Limit of files open at the same time; steps of many ranks have more.
_MAX_OPEN_FILES = 200


@dataclass(frozen=True)
class _Read:
    """A read of one stored piece, copied to `into`.

    `start` is relative to the piece.
    """

    piece: StoredPiece
    dtype: torch.dtype
    start: Shape
    into: Tensor


def load_fragments(folder: Path, manifest: Manifest, targets: Iterable[Fragment]) -> None:
    """Overwrites every target with its stored rectangle.

    Raises UserError if a tensor is missing or has another shape or dtype. Weights may be stored in a dtype
    whose values the target's dtype represents exactly; other tensors must have the same dtype. Reads only
    what the targets need, one block at a time, and opens every file once.
    """
    by_name: dict[str, list[Fragment]] = {}
    for target in targets:
        by_name.setdefault(target.tensor, []).append(target)
    _check_targets(folder, manifest, by_name)
    reads: list[_Read] = []
    for name, fragments in by_name.items():
        record = manifest.tensors[name]
        stored = _Overlaps(record.pieces)
        for target in fragments:
            reads += _reads(stored, DTYPES[record.dtype], target)
    reads.sort(key=lambda read: (read.piece.file, read.piece.key))
    for file, file_reads in itertools.groupby(reads, key=attrgetter("piece.file")):
        _read_file(folder / file, list(file_reads))


def load_tensor(folder: Path, manifest: Manifest, name: str) -> Tensor:
    """Loads one whole tensor, such as the state of a random generator."""
    if name not in manifest.tensors:
        raise UserError(f"checkpoint {folder} has no {name}; was it saved by another version?")
    record = manifest.tensors[name]
    tensor = torch.empty(record.shape, dtype=DTYPES[record.dtype])
    load_fragments(folder, manifest, [Fragment(name, record.shape, (0,) * len(record.shape), tensor)])
    return tensor


class StepReader(contextlib.ExitStack):
    """Context manager that reads rectangles of the tensors of a step.

    Files stay open until the block ends.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__()
        self.folder, self.manifest = folder, manifest
        self._files: dict[Path, Any] = {}
        self._overlaps: tuple[str, _Overlaps] | None = None

    def read(self, name: str, start: Shape, size: Shape) -> Tensor:
        """Returns the values in their stored dtype.

        A view of the file if one piece contains the whole rectangle.
        """
        record = self.manifest.tensors[name]
        dtype = DTYPES[record.dtype]
        if self._overlaps is None or self._overlaps[0] != name:
            self._overlaps = name, _Overlaps(record.pieces)
        pieces = list(self._overlaps[1].find(start, size))
        if len(pieces) == 1 and pieces[0][1] == (start, size):
            piece = pieces[0][0]
            return self._rectangle(piece, dtype, tuple(i - j for i, j in zip(start, piece.start)), size)
        values = torch.empty(size, dtype=dtype)
        for read in _reads(self._overlaps[1], dtype, Fragment(name, record.shape, start, values)):
            read.into.copy_(self._rectangle(read.piece, dtype, read.start, tuple(read.into.shape)))
        return values

    def _rectangle(self, piece: StoredPiece, dtype: torch.dtype, start: Shape, size: Shape) -> Tensor:
        path = self.folder / piece.file
        with _damage_as_user_error(path, "name another step"):
            stored = self._open(path).get_slice(piece.key)
            _check_shape(stored, piece)
            return _slice(stored, piece, dtype, start, size)

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            if len(self._files) >= _MAX_OPEN_FILES:
                self.close()
                self._files.clear()
            self._files[path] = self.enter_context(_open_file(path))
        return self._files[path]


def _check_targets(folder: Path, manifest: Manifest, by_name: dict[str, list[Fragment]]) -> None:
    """Checks that every target is stored with its shape and an allowed dtype."""
    missing = [name for name in by_name if name not in manifest.tensors]
    if missing:
        raise UserError(
            f"checkpoint {folder} lacks {len(missing)} tensors of this model, the first being {missing[0]}; check the parameters it was "
            f"converted or trained with: the architecture must be the same, tensor and pipeline sizes need not"
        )
    for target in itertools.chain.from_iterable(by_name.values()):
        name, record = target.tensor, manifest.tensors[target.tensor]
        if tuple(target.shape) != record.shape:
            raise UserError(
                f"checkpoint {folder} holds {name} as {list(record.shape)}, this model wants {list(target.shape)}; "
                f"check the parameters it was converted or trained with: the architecture must be the same, tensor and pipeline sizes need not"
            )
        dtype, is_weight = target.values.dtype, name.startswith(WEIGHTS)
        if dtype != DTYPES[record.dtype] and not (
            is_weight and represents_exactly(dtype, DTYPES[record.dtype])
        ):
            advice = "; import the model again with --dtype fp32 --allow-narrowing" if is_weight else ""
            raise UserError(
                f"checkpoint {folder} holds {name} as {record.dtype}, this run keeps it as {str(dtype).removeprefix('torch.')}{advice}"
            )


def _reads(stored: "_Overlaps", dtype: torch.dtype, target: Fragment) -> Iterator[_Read]:
    """Yields the reads that fill a target from the stored pieces."""
    size, elements = tuple(target.values.shape), 0
    for piece, (start, common) in stored.find(target.start, size):
        inside = tuple(i - j for i, j in zip(start, target.start, strict=True))
        into = region(target.values.detach(), inside, common)
        yield _Read(piece, dtype, tuple(i - j for i, j in zip(start, piece.start, strict=True)), into)
        elements += math.prod(common)
    assert elements == math.prod(size), f"{target.tensor}: only {elements} elements of {size} are stored"


class _Overlaps:
    """Finds the pieces that overlap a rectangle by binary search along one dimension.

    Tensors of many ranks have many pieces, so testing each for every rectangle would be quadratic.
    """

    def __init__(self, pieces: Sequence[StoredPiece]) -> None:
        dimensions = len(pieces[0].start) if pieces else 0
        # The dimension with the most distinct starts. A scalar has no dimension, and one piece.
        self._dimension = max(
            range(dimensions), key=lambda d: len({p.start[d] for p in pieces}), default=None
        )
        self._pieces = sorted(pieces, key=lambda piece: self._start(piece.start))
        self._starts = [self._start(piece.start) for piece in self._pieces]
        # Running maximum of the ends: monotonic, so that it can be searched too.
        ends = (self._end(piece.start, piece.shape) for piece in self._pieces)
        self._ends = list(itertools.accumulate(ends, max))

    def _start(self, start: Shape) -> int:
        return 0 if self._dimension is None else start[self._dimension]

    def _end(self, start: Shape, size: Shape) -> int:
        return 1 if self._dimension is None else start[self._dimension] + size[self._dimension]

    def find(self, start: Shape, size: Shape) -> Iterator[tuple[StoredPiece, tuple[Shape, Shape]]]:
        """Yields each overlapping piece with the (start, size) of the intersection."""
        first = bisect_right(self._ends, self._start(start))
        last = bisect_left(self._starts, self._end(start, size))
        for piece in self._pieces[first:last]:
            common = overlap(start, size, piece.start, piece.shape)
            if common is not None:
                yield piece, common


def _read_file(path: Path, reads: Sequence[_Read]) -> None:
    advice = "resume with --verify-checkpoint to fall back to an older step"
    with _damage_as_user_error(path, advice), _open_file(path) as file, torch.no_grad():
        for piece, piece_reads in itertools.groupby(reads, key=attrgetter("piece")):
            # A slice is a view of the file, so only the requested blocks are read.
            stored = file.get_slice(piece.key)
            _check_shape(stored, piece)
            for read in piece_reads:
                for start, size in blocks(tuple(read.into.shape), read.into.element_size()):
                    position = tuple(i + j for i, j in zip(read.start, start, strict=True))
                    region(read.into, start, size).copy_(_slice(stored, piece, read.dtype, position, size))


def _open_file(path: Path) -> Any:
    """Opens a safetensors or torch file."""
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
def _damage_as_user_error(path: Path, advice: str) -> Iterator[None]:
    """Converts errors of a damaged file into a UserError with this advice."""
    try:
        yield
    except (_library().SafetensorError, FileNotFoundError, DamagedCheckpoint) as error:
        raise UserError(f"{path} is damaged ({error}); {advice}") from None


def _check_shape(stored: Any, piece: StoredPiece) -> None:
    if tuple(stored.get_shape()) != piece.shape:
        raise DamagedCheckpoint(f"{piece.key} is stored as {stored.get_shape()}, not {list(piece.shape)}")


def _slice(stored: Any, piece: StoredPiece, dtype: torch.dtype, start: Shape, size: Shape) -> Tensor:
    values: Tensor = stored[tuple(slice(i, i + n) for i, n in zip(start, size, strict=True))]
    if values.dtype != dtype:
        raise DamagedCheckpoint(f"{piece.key} is stored as {values.dtype}, not {dtype}")
    return values
