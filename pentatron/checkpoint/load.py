"""Loads a checkpoint into existing tensors, resharding from the layout that saved it to the current one."""

import contextlib
import functools
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentatron.checkpoint.format import DamagedCheckpoint, Manifest, StoredPiece, TensorRecord
from pentatron.checkpoint.tensor_file import DTYPES, TORCH_FILES, blocks, represents_exactly
from pentatron.checkpoint.torch_file import TorchFile
from pentatron.errors import UserError
from pentatron.parallel.sharding import Fragment, Shape, overlap, region

WEIGHTS = "weights/"
# Expert biases of routers, which are updated from token counts, not by gradients.
ROUTERS = "routers/"


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
    targets = list(targets)
    _check_targets(folder, manifest, targets)
    stored = {name: _Overlaps(manifest.tensors[name]) for name in {target.tensor for target in targets}}
    reads = [read for target in targets for read in stored[target.tensor].reads(target)]
    advice = "resume with --verify-checkpoint to fall back to an older step"
    with StepReader(folder, manifest, advice, max_open_files=1) as reader, torch.no_grad():
        for read in sorted(reads, key=lambda read: (read.piece.file, read.piece.key)):
            reader.copy(read)


def load_tensor(folder: Path, manifest: Manifest, name: str) -> Tensor:
    """Loads one whole tensor, such as the state of a random generator."""
    if name not in manifest.tensors:
        raise UserError(f"checkpoint {folder} has no {name}; load it with the version that saved it")
    record = manifest.tensors[name]
    tensor = torch.empty(record.shape, dtype=DTYPES[record.dtype])
    load_fragments(folder, manifest, [Fragment(name, record.shape, (0,) * len(record.shape), tensor)])
    return tensor


class StepReader(contextlib.ExitStack):
    """Context manager that reads rectangles of the tensors of a step.

    Files stay open until the block ends, or until `max_open_files` are: steps of many ranks have more.
    `advice`: in the error for a damaged file.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, advice: str = "name another step", max_open_files: int = 200
    ) -> None:
        super().__init__()
        self.folder, self.manifest = folder, manifest
        self._advice, self._max_open_files = advice, max_open_files
        self._files: dict[Path, Any] = {}
        self._overlaps = functools.lru_cache(1)(lambda name: _Overlaps(manifest.tensors[name]))

    def read(self, name: str, start: Shape, size: Shape) -> Tensor:
        """Returns the values in their stored dtype.

        A view of the file if one piece contains the whole rectangle.
        """
        stored = self._overlaps(name)
        pieces = list(stored.find(start, size))
        if len(pieces) == 1 and pieces[0][1] == (start, size):
            piece = pieces[0][0]
            position = tuple(i - j for i, j in zip(start, piece.start))
            return self._rectangle(piece, stored.dtype, position, size)
        values = torch.empty(size, dtype=stored.dtype)
        for read in stored.reads(Fragment(name, self.manifest.tensors[name].shape, start, values)):
            self.copy(read)
        return values

    def read_blocks(self, name: str) -> Iterator[tuple[Shape, Tensor]]:
        """Yields (start, values) of the blocks of a tensor, in memory order."""
        record = self.manifest.tensors[name]
        for start, size in blocks(record.shape, DTYPES[record.dtype].itemsize):
            yield start, self.read(name, start, size)

    def copy(self, read: _Read) -> None:
        """Copies one read block by block."""
        for start, size in blocks(tuple(read.into.shape), read.into.element_size()):
            position = tuple(i + j for i, j in zip(read.start, start, strict=True))
            region(read.into, start, size).copy_(self._rectangle(read.piece, read.dtype, position, size))

    def _rectangle(self, piece: StoredPiece, dtype: torch.dtype, start: Shape, size: Shape) -> Tensor:
        # Imported here: a run that loads nothing does not need it.
        from safetensors import SafetensorError

        path = self.folder / piece.file
        try:
            # A slice is a view of the file, so only the requested rectangle is read.
            stored = self._open(path).get_slice(piece.key)
            if (shape := tuple(stored.get_shape())) != piece.shape:
                raise DamagedCheckpoint(f"{piece.key} is stored as {list(shape)}, not {list(piece.shape)}")
            values: Tensor = stored[tuple(slice(i, i + n) for i, n in zip(start, size, strict=True))]
            if values.dtype != dtype:
                raise DamagedCheckpoint(f"{piece.key} is stored as {values.dtype}, not {dtype}")
        except (SafetensorError, FileNotFoundError, DamagedCheckpoint) as error:
            raise UserError(f"{path} is damaged ({error}); {self._advice}") from None
        return values

    def _open(self, path: Path) -> Any:
        """Opens a safetensors or torch file."""
        from safetensors import safe_open

        if path not in self._files:
            if len(self._files) >= self._max_open_files:
                self.close()
                self._files.clear()
            is_torch = path.suffix in TORCH_FILES
            file = TorchFile(path) if is_torch else safe_open(path, framework="pt")
            self._files[path] = self.enter_context(file)
        return self._files[path]


def _check_targets(folder: Path, manifest: Manifest, targets: Sequence[Fragment]) -> None:
    """Checks that every target is stored with its shape and an allowed dtype."""
    names = dict.fromkeys(target.tensor for target in targets)
    if missing := [name for name in names if name not in manifest.tensors]:
        raise UserError(
            f"checkpoint {folder} lacks {len(missing)} tensors of this model, the first being {missing[0]}; check the parameters it was "
            f"converted or trained with: the architecture must be the same, tensor and pipeline sizes need not"
        )
    for target in targets:
        name, record = target.tensor, manifest.tensors[target.tensor]
        if tuple(target.shape) != record.shape:
            raise UserError(
                f"checkpoint {folder} holds {name} as {list(record.shape)}, this model needs {list(target.shape)}; "
                f"check the parameters it was converted or trained with: the architecture must be the same, tensor and pipeline sizes need not"
            )
        dtype, stored, is_weight = target.values.dtype, DTYPES[record.dtype], name.startswith(WEIGHTS)
        if not (represents_exactly(dtype, stored) if is_weight else dtype == stored):
            advice = "; import the model again with --dtype fp32 --allow-narrowing" if is_weight else ""
            raise UserError(
                f"checkpoint {folder} holds {name} as {record.dtype}, this run keeps it as {str(dtype).removeprefix('torch.')}{advice}"
            )


class _Overlaps:
    """Finds the pieces that overlap a rectangle by binary search along one dimension.

    Tensors of many ranks have many pieces, so testing each for every rectangle would be quadratic.
    """

    def __init__(self, record: TensorRecord) -> None:
        self.dtype, pieces = DTYPES[record.dtype], record.pieces
        axes = range(len(pieces[0].start) if pieces else 0)
        # The dimension with the most distinct starts. A scalar has no dimension, and one piece.
        self._dimension = max(axes, key=lambda d: len({p.start[d] for p in pieces}), default=None)
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
            if (common := overlap(start, size, piece.start, piece.shape)) is not None:
                yield piece, common

    def reads(self, target: Fragment) -> Iterator[_Read]:
        """Yields the reads that fill a target from the stored pieces."""
        size, elements = tuple(target.values.shape), 0
        for piece, (start, common) in self.find(target.start, size):
            inside = tuple(i - j for i, j in zip(start, target.start, strict=True))
            into = region(target.values.detach(), inside, common)
            position = tuple(i - j for i, j in zip(start, piece.start, strict=True))
            yield _Read(piece, self.dtype, position, into)
            elements += math.prod(common)
        assert elements == math.prod(size), f"{target.tensor}: only {elements} elements of {size} are stored"
