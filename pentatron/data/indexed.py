"""Indexed datasets in Megatron-LM's format: `.bin`, `.idx` and an optional `.meta` sidecar.

The `.bin` file is the concatenation of all sequences in one integer type. The `.idx` file, little-endian:

    magic (9 bytes) · version (uint64) · type code (uint8) · S sequences (uint64) · D boundaries (uint64)
    lengths in tokens (int32 × S) · byte offsets into .bin (int64 × S) · document boundaries (int64 × D)

The boundaries are indices of sequences: the first is 0, the last is S, and D is the number of documents + 1.

The format has no checksums, so the reader checks at open that both files are consistent. The sidecar
`<prefix>.meta` adds checksums; other programs ignore it:

    line 1: JSON object (counts, tokenizer, sizes) · line 2: CRC-32 of line 1
    CRC-32 of each block of .bin, then of each block of .idx (uint32)

The index is compared with the sidecar at open, and every block of tokens when it is first read. A file
that is rewritten or truncated while it is mapped raises an error at the next read (`_check_unchanged`).
"""

import glob
import json
import shutil
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from pentatron.checksums import crc32, crc32_of_stream
from pentatron.errors import UserError
from pentatron.text import parse_json, plural

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()
}
# Megatron-LM's threshold, slightly below 2**16, so that both write the same type.
UINT16_VOCAB_LIMIT = 65500
# Sequences checked at a time, which bounds the temporary memory for files with billions of sequences.
CHECK_BLOCK = 1 << 20
# Seconds between two stat calls per file: cheap, and frequent enough to detect most changes before a page
# is read.
STAMP_SECONDS = 0.01

FORMAT = "pentatron data 1"
# Small, so that reading one sample verifies little more than the sample (decision 0031).
BLOCK_BYTES = 1 << 16
SUM = np.dtype("<u4")
LONGEST_HEADER = 1 << 20


def pair_paths(prefix: Path | str) -> tuple[Path, Path]:
    """Returns the `.bin` and `.idx` paths of a prefix, which may itself contain dots."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def missing_pairs_message(prefixes: Sequence[Path | str]) -> str:
    """Returns an error message for prefixes whose files are missing, or an empty string."""
    missing = {prefix: path for prefix in prefixes if (path := _missing(prefix)) is not None}
    if not missing:
        return ""
    files = ", ".join(map(str, missing.values()))
    return f"no {plural(len(missing), 'data file')} {files}; {_suggestion(Path(next(iter(missing))))}"


def _missing(prefix: Path | str) -> Path | None:
    """Returns the first file of a pair that does not exist."""
    binary, index = pair_paths(prefix)
    return next((path for path in (index, binary) if not path.is_file()), None)


def _suggestion(prefix: Path) -> str:
    """Suggests the prefix that was probably meant."""
    stem = prefix.with_suffix("")
    if prefix.suffix in (".bin", ".idx") and _missing(stem) is None:
        return f"give {stem}, without the ending"
    # The output prefix of `pentatron prepare` is the beginning of the names of its files.
    longer = prefix.parent.glob(f"{glob.escape(prefix.name)}*.idx") if prefix.name else ()
    for path in (*sorted(prefix.glob("*.idx")), *sorted(longer)):
        if _missing(path.with_suffix("")) is None:
            return f"did you mean {path.with_suffix('')}?"
    return "give the prefix of a prepared .bin/.idx pair without its ending"


@dataclass(frozen=True)
class TokenizerIdentity:
    """Identifies a tokenizer; equal fingerprints mean equal ids for every text."""

    kind: str
    fingerprint: str
    vocab_size: int
    eod: int | None


@dataclass(frozen=True)
class PairMetadata:
    """The metadata of a pair in its sidecar."""

    dtype: str
    sequences: int
    documents: int
    tokens: int
    # -1 if there are no tokens.
    largest_token: int
    bin_bytes: int
    idx_bytes: int
    tokenizer: TokenizerIdentity | None = None
    # Fingerprint of the inputs and settings of the command that wrote the pair.
    job: str | None = None


@dataclass(frozen=True)
class Sidecar:
    """The metadata and block checksums of a pair."""

    path: Path
    metadata: PairMetadata
    bin_sums: npt.NDArray[np.uint32]
    idx_sums: npt.NDArray[np.uint32]
    sums_crc32: int

    def checksum_error(self) -> UserError | None:
        """Returns an error if the checksums themselves are damaged; called only after a mismatch."""
        if crc32(self.idx_sums.data, crc32(self.bin_sums.data)) == self.sums_crc32:
            return None
        begin = self.path.stat().st_size - self.bin_sums.nbytes - self.idx_sums.nbytes
        reason = "the checksums from there on are not those that were written"
        return _damaged_sidecar(self.path, begin, reason)


def sidecar_path(prefix: Path | str) -> Path:
    return Path(f"{prefix}.meta")


def block_count(size: int) -> int:
    return -(-size // BLOCK_BYTES)


def stored_sums(sums: Iterable[int]) -> bytes:
    """Encodes block checksums as stored in a sidecar."""
    return np.fromiter(sums, SUM).tobytes()


def write_sidecar(file: BinaryIO, metadata: PairMetadata, bin_sums: BinaryIO, idx_sums: bytes) -> None:
    """Writes a sidecar. `bin_sums` is a file read twice, so that the checksums are not held in memory."""
    sums_crc32 = crc32(idx_sums, crc32_of_stream(bin_sums))
    bin_sums.seek(0)
    header = {"format": FORMAT, "checksum": "crc32", "block_bytes": BLOCK_BYTES, "sums_crc32": sums_crc32}
    line = json.dumps({**header, **asdict(metadata)}, sort_keys=True).encode()
    file.write(b"%s\n%08x\n" % (line, crc32(line)))
    shutil.copyfileobj(bin_sums, file)
    file.write(idx_sums)


def read_sidecar(prefix: Path | str) -> Sidecar | None:
    """Reads the sidecar of a pair; None if it has none, as pairs written by other programs."""
    path = sidecar_path(prefix)
    if not path.is_file():
        return None
    size = path.stat().st_size
    with path.open("rb") as file:
        line = file.readline(LONGEST_HEADER)
        sum_line = file.readline(16)
        begin = file.tell()
    if not line.endswith(b"\n") or sum_line != b"%08x\n" % crc32(line[:-1]):
        raise _damaged_sidecar(path, 0, "its first line does not have the checksum of its second")
    try:
        metadata, sums_crc32 = _parse_header(path, line)
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"its first line is not a valid header ({type(error).__name__}: {error})"
        raise _damaged_sidecar(path, 0, reason) from None
    blocks, index_blocks = block_count(metadata.bin_bytes), block_count(metadata.idx_bytes)
    expected = begin + SUM.itemsize * (blocks + index_blocks)
    if size != expected:
        raise _damaged_sidecar(path, min(size, expected), f"it should have {expected} bytes, found {size}")
    sums = np.memmap(path, dtype=np.uint8, mode="r", offset=begin).view(np.ndarray).view(SUM)
    return Sidecar(path, metadata, sums[:blocks], sums[blocks:], sums_crc32)


def _parse_header(path: Path, line: bytes) -> tuple[PairMetadata, int]:
    header: dict[str, Any] = parse_json(line)
    if header.get("format") != FORMAT or header.get("block_bytes") != BLOCK_BYTES:
        raise UserError(
            f"{path} is of the format '{header.get('format')}', which this version does not read; use a newer Pentatron, or "
            "delete it to open the pair with checks of its structure only"
        )
    tokenizer = header["tokenizer"]
    metadata = PairMetadata(
        **{name: header[name] for name in PairMetadata.__dataclass_fields__ if name != "tokenizer"},
        tokenizer=None if tokenizer is None else TokenizerIdentity(**tokenizer),
    )
    counts = ("sequences", "documents", "tokens", "largest_token", "bin_bytes", "idx_bytes")
    if not all(type(getattr(metadata, name)) is int and getattr(metadata, name) >= -1 for name in counts):
        raise ValueError("a count is not a number")
    return metadata, int(header["sums_crc32"])


def _damaged_sidecar(path: Path, offset: int, what: str) -> UserError:
    return UserError(
        f"{path} is damaged at byte {offset}: {what}; copy the file again, or delete it to open the pair with checks of its "
        "structure only"
    )


def token_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """Returns the type in which token ids below `vocab_size` are stored."""
    return DTYPES[8] if vocab_size is not None and vocab_size < UINT16_VOCAB_LIMIT else DTYPES[4]


class IndexedDataset:
    """Reads sequences from a memory-mapped pair. The structure is checked at open; `get` is one slice.

    Threads and forked processes may share it: `_verified` has one byte per block, set after its
    comparison, so a race only repeats a comparison.
    """

    def __init__(self, prefix: Path | str, vocab_size: int | None = None, with_sidecar: bool = True) -> None:
        self.prefix = Path(prefix)
        self.bin_path, self.idx_path = pair_paths(prefix)
        if missing := missing_pairs_message([prefix]):
            raise UserError(missing)
        self._opened = {path: path.stat() for path in (self.bin_path, self.idx_path)}
        self._stamped_at = time.monotonic()
        self.dtype, sequences = _read_header(self.idx_path)
        index = np.memmap(self.idx_path, dtype=np.uint8, mode="r").view(np.ndarray)
        self._pointers_at = HEADER.size + 4 * sequences
        self._boundaries_at = self._pointers_at + 8 * sequences
        self.sequence_lengths: npt.NDArray[np.int32] = np.frombuffer(index, "<i4", sequences, HEADER.size)
        self.pointers: npt.NDArray[np.int64] = np.frombuffer(index, "<i8", sequences, self._pointers_at)
        self.document_indices: npt.NDArray[np.int64] = np.frombuffer(index, "<i8", offset=self._boundaries_at)
        self._check_boundaries()
        self._check_pointers()
        self._bytes = np.empty(0, np.uint8)
        # An empty file cannot be mapped.
        if self.bin_path.stat().st_size:
            self._bytes = np.memmap(self.bin_path, dtype=np.uint8, mode="r").view(np.ndarray)
        # All tokens; not verified, unlike those that `read` returns.
        self.tokens: npt.NDArray[Any] = self._bytes.view(self.dtype)
        self.sidecar = read_sidecar(prefix) if with_sidecar else None
        self.metadata = None if self.sidecar is None else self.sidecar.metadata
        # The tokenizer that made the ids, if it is known.
        self.tokenizer = None if self.metadata is None else self.metadata.tokenizer
        self._verified = bytearray(block_count(len(self._bytes)))
        if self.sidecar is not None:
            self._check_sidecar(self.sidecar, index)
        # Without a sidecar, `GPTDataset` checks the tokens when they are read.
        if vocab_size is not None and self.metadata is not None and self.metadata.largest_token >= vocab_size:
            raise UserError(
                f"{self.bin_path} holds token {self.metadata.largest_token}, outside the vocabulary of {vocab_size}: it was "
                "prepared with another tokenizer; give that one, or prepare the data again"
            )

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Returns a read-only view of tokens of sequence `index` from `offset`, up to its end by default."""
        available = int(self.sequence_lengths[index])
        stop = available if length is None else offset + length
        if not 0 <= offset <= stop <= available:
            raise IndexError(f"sequence {index} has {available} tokens, asked for [{offset}, {stop})")
        start = int(self.pointers[index]) // self.dtype.itemsize
        return self.read(start + offset, start + stop)

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Returns a read-only view of the tokens [start, stop) of the whole corpus."""
        if time.monotonic() - self._stamped_at > STAMP_SECONDS:
            self._check_unchanged()
        if self.sidecar is not None and stop > start:
            item = self.dtype.itemsize
            block, last = start * item // BLOCK_BYTES, (stop * item - 1) // BLOCK_BYTES
            while (block := self._verified.find(0, block, last + 1)) >= 0:
                self._verify_block(self.sidecar, block)
                block += 1
        return self.tokens[start:stop]

    def verify_checksums(self) -> int:
        """Verifies every block and returns their number, 0 without a sidecar."""
        if self.sidecar is None:
            return 0
        for block in range(len(self._verified)):
            self._verify_block(self.sidecar, block)
        return len(self._verified)

    def _check_unchanged(self) -> None:
        """Raises UserError if a file of the pair has changed since it was opened.

        With checksums, a `.bin` file of the same inode and size is verified again instead, as after `touch`.
        """
        for path, before in self._opened.items():
            try:
                now = path.stat()
            except OSError:
                # The mapping of an unlinked file stays valid.
                continue
            # The inode is not compared: a copy that preserves the time (rsync -a) has the same content.
            if (before.st_size, before.st_mtime_ns) == (now.st_size, now.st_mtime_ns):
                continue
            same_file = (before.st_ino, before.st_size) == (now.st_ino, now.st_size)
            if path == self.idx_path or self.sidecar is None or not same_file:
                what = "its modification time is not that of the file that was opened"
                if before.st_size != now.st_size:
                    what = f"it had {before.st_size} bytes and has {now.st_size}"
                raise UserError(
                    f"{path} changed while it was read ({what}); restore the file and run the same command, which resumes from the newest "
                    f"checkpoint, or start another run on the new data"
                )
            self._verified = bytearray(len(self._verified))
            self._opened[path] = now
        self._stamped_at = time.monotonic()

    def _check_sidecar(self, sidecar: Sidecar, index: npt.NDArray[np.uint8]) -> None:
        for path, expected, size in (
            (self.bin_path, sidecar.metadata.bin_bytes, len(self._bytes)),
            (self.idx_path, sidecar.metadata.idx_bytes, len(index)),
        ):
            if expected != size:
                raise UserError(
                    f"{path} has {size} bytes where {sidecar.path.name} expects {expected}: it is cut short or of another "
                    f"pair; copy all three files again{self._seal_hint()}"
                )
        for block, expected in enumerate(sidecar.idx_sums):
            self._require_block(sidecar, self.idx_path, index, block, expected)

    def _verify_block(self, sidecar: Sidecar, block: int) -> None:
        self._require_block(sidecar, self.bin_path, self._bytes, block, sidecar.bin_sums[block])
        self._verified[block] = 1

    def _require_block(
        self, sidecar: Sidecar, path: Path, data: npt.NDArray[np.uint8], block: int, expected: np.uint32
    ) -> None:
        """Raises UserError if the checksum of a block differs from the one in the sidecar."""
        begin, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, len(data))
        found = crc32(data[begin:end].data)
        if found != expected:
            raise sidecar.checksum_error() or UserError(
                f"{path} is damaged between bytes {begin} and {end}: their checksum should be {expected:08x}, found "
                f"{found:08x}; copy the files again or prepare the data again{self._seal_hint()}"
            )

    def _seal_hint(self) -> str:
        return f" (after another program rewrote the pair on purpose: pentatron data seal {self.prefix})"

    def __reduce__(self) -> tuple[type[Self], tuple[Path]]:
        # Spawned data workers reopen the files: pickling the memory map would copy the whole corpus.
        return type(self), (self.prefix,)

    def _check_boundaries(self) -> None:
        """Checks that document boundaries start at 0, do not decrease and end at the last sequence."""
        bounds = self.document_indices
        if bounds[0] != 0:
            raise _damaged(self.idx_path, self._boundaries_at, "the first document boundary", 0, bounds[0])
        if bounds[-1] != len(self):
            at = self._boundaries_at + bounds.nbytes - 8
            raise _damaged(self.idx_path, at, "the last document boundary", len(self), bounds[-1])
        backward = np.flatnonzero(bounds[1:] < bounds[:-1])
        if len(backward):
            first = int(backward[0]) + 1
            at, expected = self._boundaries_at + 8 * first, f"{bounds[first - 1]} or more"
            raise _damaged(self.idx_path, at, f"document boundary {first}", expected, bounds[first])

    def _check_pointers(self) -> None:
        """Checks that pointers are the ends of the sequences before them, and the size of `.bin`."""
        end = 0
        for start in range(0, len(self), CHECK_BLOCK):
            lengths = self.sequence_lengths[start : start + CHECK_BLOCK].astype(np.int64)
            pointers = self.pointers[start : start + CHECK_BLOCK]
            if lengths.min() < 0:
                first = int(np.argmax(lengths < 0))
                at, name = HEADER.size + 4 * (start + first), f"length {start + first}"
                raise _damaged(self.idx_path, at, name, "zero or more", int(lengths[first]))
            ends = end + np.cumsum(lengths * self.dtype.itemsize)
            expected = np.concatenate(([end], ends[:-1]))
            if not np.array_equal(pointers, expected):
                first = int(np.argmax(pointers != expected))
                at, name = self._pointers_at + 8 * (start + first), f"pointer {start + first}"
                raise _damaged(self.idx_path, at, name, int(expected[first]), int(pointers[first]))
            end = int(ends[-1])
        size = self.bin_path.stat().st_size
        if size != end:
            raise UserError(
                f"{self.bin_path} has {size} bytes where {self.idx_path.name} expects {end}: it is cut short or the "
                "two files are not a pair; copy both again or prepare the data again"
            )


def _read_header(path: Path) -> tuple[np.dtype[Any], int]:
    """Returns type and number of sequences; checks both and the number of boundaries against the
    file size.
    """
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
    return DTYPES[code], sequences


def _damaged(path: Path, offset: int, what: str, expected: object, found: object) -> UserError:
    return UserError(
        f"{path} is damaged at byte {offset}: {what} should be {expected}, found {found}; "
        "copy the file again or prepare the data again"
    )
