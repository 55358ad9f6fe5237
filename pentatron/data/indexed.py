"""The `.bin/.idx` pair: every token of a corpus in one file, and where each sequence begins in the other.

The `.bin` file is the plain concatenation of all sequences in one integer type. The `.idx` file, little-endian:

    magic (9 bytes) · version (uint64) · type code (uint8) · S sequences (uint64) · D boundaries (uint64)
    lengths in tokens (int32 × S) · byte offsets into .bin (int64 × S) · document boundaries (int64 × D)

The boundaries count sequences: the first is 0, the last is S, and D is the number of documents + 1.
The format carries no checksum, so the reader checks at open everything that the two files say about each other.
"""

import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from pentatron.config.errors import UserError
from pentatron.data.atomic import commit, temporary_path

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()
}
# Other tools' threshold, a little below 2**16; files made here and there then have the same type.
UINT16_VOCAB_LIMIT = 65500
# Sequences checked at a time: bounds the temporary memory when a file holds a billion of them.
CHECK_BLOCK = 1 << 20


def token_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """The type that a writer should choose for token ids below `vocab_size`."""
    return DTYPES[8] if vocab_size is not None and vocab_size < UINT16_VOCAB_LIMIT else DTYPES[4]


def pair_paths(prefix: Path | str) -> tuple[Path, Path]:
    """The `.bin` and `.idx` of a prefix; a prefix may itself contain dots."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


class IndexedDataset:
    """Reads sequences from a memory-mapped pair; opening checks the structure, `get` then costs one slice."""

    def __init__(self, prefix: Path | str) -> None:
        self.prefix = Path(prefix)
        self.bin_path, self.idx_path = pair_paths(prefix)
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise UserError(
                    f"No data file {path}; give the prefix of a prepared .bin/.idx pair without its ending."
                )
        code, sequences, boundaries = _read_header(self.idx_path)
        self.dtype = DTYPES[code]
        index = np.memmap(self.idx_path, dtype=np.uint8, mode="r")
        self._lengths_at = HEADER.size
        self._pointers_at = self._lengths_at + 4 * sequences
        self._boundaries_at = self._pointers_at + 8 * sequences
        self.sequence_lengths: npt.NDArray[np.int32] = np.frombuffer(
            index, dtype="<i4", count=sequences, offset=self._lengths_at
        )
        self.pointers: npt.NDArray[np.int64] = np.frombuffer(
            index, dtype="<i8", count=sequences, offset=self._pointers_at
        )
        self.document_indices: npt.NDArray[np.int64] = np.frombuffer(
            index, dtype="<i8", count=boundaries, offset=self._boundaries_at
        )
        self._check_boundaries()
        self._check_pointers()
        # An empty file cannot be mapped.
        self._tokens: npt.NDArray[Any] = (
            np.memmap(self.bin_path, dtype=self.dtype, mode="r").view(np.ndarray)
            if self.bin_path.stat().st_size
            else np.empty(0, self.dtype)
        )

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """A read-only view of `length` tokens of sequence `index` from `offset` on (to its end without a length)."""
        available = int(self.sequence_lengths[index])
        stop = available if length is None else offset + length
        if not 0 <= offset <= stop <= available:
            raise IndexError(f"sequence {index} has {available} tokens, asked for [{offset}, {stop})")
        start = int(self.pointers[index]) // self.dtype.itemsize
        return self._tokens[start + offset : start + stop]

    def __reduce__(self) -> tuple[type[Self], tuple[Path]]:
        # Pickling a memory map would copy the whole corpus into every spawned data worker: reopen it there.
        return type(self), (self.prefix,)

    def _check_boundaries(self) -> None:
        bounds = self.document_indices
        if bounds[0] != 0:
            raise _damaged(self.idx_path, self._boundaries_at, "the first document boundary", 0, bounds[0])
        if bounds[-1] != len(self):
            at = self._boundaries_at + 8 * (len(bounds) - 1)
            raise _damaged(self.idx_path, at, "the last document boundary", len(self), bounds[-1])
        backward = np.flatnonzero(bounds[1:] < bounds[:-1])
        if len(backward):
            first = int(backward[0]) + 1
            at, expected = self._boundaries_at + 8 * first, f"{bounds[first - 1]} or more"
            raise _damaged(self.idx_path, at, f"document boundary {first}", expected, bounds[first])

    def _check_pointers(self) -> None:
        """Each pointer must be where the sequences before it end; `.bin` must end where the last one does."""
        end = 0
        for start in range(0, len(self), CHECK_BLOCK):
            lengths = self.sequence_lengths[start : start + CHECK_BLOCK].astype(np.int64)
            pointers = self.pointers[start : start + CHECK_BLOCK]
            if lengths.min() < 0:
                first = int(np.argmax(lengths < 0))
                at = self._lengths_at + 4 * (start + first)
                raise _damaged(
                    self.idx_path, at, f"length {start + first}", "zero or more", int(lengths[first])
                )
            ends = end + np.cumsum(lengths * self.dtype.itemsize)
            expected = np.concatenate(([end], ends[:-1]))
            if not np.array_equal(pointers, expected):
                first = int(np.argmax(pointers != expected))
                at = self._pointers_at + 8 * (start + first)
                raise _damaged(
                    self.idx_path, at, f"pointer {start + first}", int(expected[first]), int(pointers[first])
                )
            end = int(ends[-1])
        size = self.bin_path.stat().st_size
        if size != end:
            raise UserError(
                f"{self.bin_path} has {size} bytes where {self.idx_path.name} expects {end}: it is cut short or the "
                "two files are not a pair; copy both again or prepare the data again."
            )


class IndexedDatasetWriter:
    """Writes a pair, one document at a time; the files appear when the `with` block ends without an error."""

    def __init__(self, prefix: Path | str, dtype: npt.DTypeLike) -> None:
        self.bin_path, self.idx_path = pair_paths(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in DTYPES.items() if known == self.dtype]
        if not codes:
            names = ", ".join(str(known) for known in DTYPES.values())
            raise UserError(f"Tokens cannot be stored as {self.dtype}; choose one of {names}.")
        self._code = codes[0]
        self._lengths = array("i")
        self._boundaries = array("q", [0])
        self._bin: BinaryIO | None = None
        self._temporary_bin = temporary_path(self.bin_path)
        self._temporary_idx = temporary_path(self.idx_path)

    def __enter__(self) -> Self:
        self.bin_path.parent.mkdir(parents=True, exist_ok=True)
        self._bin = self._temporary_bin.open("wb")
        return self

    def add_document(self, tokens: Sequence[int] | npt.NDArray[Any]) -> None:
        """Append one document of one sequence; an empty one leaves a document boundary only."""
        assert self._bin is not None, "add_document outside the with block"
        ids = np.asarray(tokens, dtype=np.int64)
        if len(ids):
            limits = np.iinfo(self.dtype)
            low, high = int(ids.min()), int(ids.max())
            if low < limits.min or high > limits.max:
                wrong = low if low < limits.min else high
                raise UserError(
                    f"Token {wrong} does not fit {self.dtype}; choose the type with token_dtype(vocab_size)."
                )
            self._bin.write(ids.astype(self.dtype).tobytes())
            self._lengths.append(len(ids))
        self._boundaries.append(len(self._lengths))

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._bin is not None
        try:
            self._bin.close()
            if error_type is None:
                self._write_index()
                # Without this, a crash between the two renames would leave an old index beside new tokens.
                self.idx_path.unlink(missing_ok=True)
                commit(self._temporary_bin, self.bin_path)
                commit(self._temporary_idx, self.idx_path)
        finally:
            self._temporary_bin.unlink(missing_ok=True)
            self._temporary_idx.unlink(missing_ok=True)

    def _write_index(self) -> None:
        lengths = np.asarray(self._lengths, dtype="<i4")
        sizes = lengths.astype(np.int64) * self.dtype.itemsize
        pointers = np.cumsum(sizes) - sizes
        with self._temporary_idx.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(self._boundaries)))
            file.write(lengths.tobytes())
            file.write(pointers.astype("<i8").tobytes())
            file.write(np.asarray(self._boundaries, dtype="<i8").tobytes())


def _read_header(path: Path) -> tuple[int, int, int]:
    """Type code, number of sequences and number of boundaries, after checking them against the file's size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise _damaged(path, size, "the header", f"{HEADER.size} bytes", f"{size} bytes")
    magic, version, code, sequences, boundaries = HEADER.unpack(header)
    if magic != MAGIC:
        raise _damaged(path, 0, "the magic", MAGIC.hex(), magic.hex())
    if version != VERSION:
        raise _damaged(path, 9, "the version", VERSION, version)
    if code not in DTYPES:
        raise _damaged(path, 17, "the code of an integer type", f"one of {sorted(DTYPES)}", code)
    if boundaries < 1:
        raise _damaged(path, 26, "the number of document boundaries", "1 or more", boundaries)
    expected = HEADER.size + 12 * sequences + 8 * boundaries
    if size != expected:
        counts = f"the end of {sequences} sequences and {boundaries} document boundaries"
        raise _damaged(path, min(size, expected), counts, f"byte {expected}", f"byte {size}")
    return code, sequences, boundaries


def _damaged(path: Path, offset: int, what: str, expected: object, found: object) -> UserError:
    return UserError(
        f"{path} is damaged at byte {offset}: {what} should be {expected}, found {found}; "
        "copy the file again or prepare the data again."
    )
