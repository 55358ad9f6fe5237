"""The `.bin/.idx` pair: every token of a corpus in one file, and where each sequence begins in the other.

The `.bin` file is the plain concatenation of all sequences in one integer type. The `.idx` file, little-endian:

    magic (9 bytes) · version (uint64) · type code (uint8) · S sequences (uint64) · D boundaries (uint64)
    lengths in tokens (int32 × S) · byte offsets into .bin (int64 × S) · document boundaries (int64 × D)

The boundaries count sequences: the first is 0, the last is S, and D is the number of documents + 1.
The format carries no checksum, so the reader checks at open everything that the two files say about each other. Where a sidecar with
checksums lies beside them (`data/indexed.py`), the index is compared with it at open, and every block of tokens when first read.
A file that is rewritten or truncated while it is mapped raises an error at the next read (`_Stamp`).
"""

import glob
import json
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from pentatron.checksums import crc32, crc32_of_stream
from pentatron.errors import UserError
from pentatron.text import parse_json, plural

# The names of `.bin/.idx` pairs, and what was meant by a name that no pair has.


def pair_paths(prefix: Path | str) -> tuple[Path, Path]:
    """The `.bin` and `.idx` of a prefix; a prefix may itself contain dots."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def missing_pairs(prefixes: Sequence[Path | str]) -> str:
    """What to say of prefixes without their two files; empty if all are there."""
    gone = {prefix: path for prefix in prefixes if (path := _missing(prefix)) is not None}
    if not gone:
        return ""
    files = ", ".join(str(path) for path in gone.values())
    return f"no {plural(len(gone), 'data file')} {files}; {_meant(Path(next(iter(gone))))}"


def _missing(prefix: Path | str) -> Path | None:
    binary, index = pair_paths(prefix)
    return next((path for path in (index, binary) if not path.is_file()), None)


def _meant(prefix: Path) -> str:
    whole = prefix.with_suffix("") if prefix.suffix in (".bin", ".idx") else None
    if whole is not None and _missing(whole) is None:
        return f"give {whole}, without the ending"
    # The name that `prepare` was told is the beginning of those of its files.
    begun = prefix.parent.glob(f"{glob.escape(prefix.name)}*.idx") if prefix.name else iter(())
    inside = prefix.glob("*.idx") if prefix.is_dir() else iter(())
    pairs = [path.with_suffix("") for found in (inside, begun) for path in sorted(found)]
    near = next((pair for pair in pairs if _missing(pair) is None), None)
    if near is not None:
        return f"did you mean {near}?"
    return "give the prefix of a prepared .bin/.idx pair without its ending"


# What the `.bin/.idx` format lacks, in a third file: `<prefix>.meta`.
#
#     line 1: a JSON object (counts, tokenizer, sizes) · line 2: the CRC-32 of line 1 · then the checksums of the blocks of `.bin` and
#     of `.idx` (uint32 each)
#
# Programs that do not know it read the pair as before.


FORMAT = "pentatron data 1"
# Small, so that reading one sample checks little more than the sample (decision 0031).
BLOCK_BYTES = 1 << 16
SUM = np.dtype("<u4")
LONGEST_HEADER = 1 << 20


@dataclass(frozen=True)
class TokenizerIdentity:
    """Which tokenizer made the ids; two with the same fingerprint give the same ids for every text."""

    kind: str
    fingerprint: str
    vocab_size: int
    eod: int | None


@dataclass(frozen=True)
class Facts:
    """What a sidecar says about its pair."""

    dtype: str
    sequences: int
    documents: int
    tokens: int
    # -1 where there is no token at all.
    largest_token: int
    bin_bytes: int
    idx_bytes: int
    tokenizer: TokenizerIdentity | None = None
    # Of the command that made the pair: inputs and settings.
    job: str | None = None


@dataclass(frozen=True)
class Sidecar:
    path: Path
    facts: Facts
    bin_sums: npt.NDArray[np.uint32]
    idx_sums: npt.NDArray[np.uint32]
    sums_crc32: int

    def blame(self) -> UserError | None:
        """The sentence for checksums that are damaged themselves; asked only when one does not fit."""
        found = crc32(self.idx_sums.data, crc32(self.bin_sums.data))
        if found == self.sums_crc32:
            return None
        begin = self.path.stat().st_size - SUM.itemsize * (len(self.bin_sums) + len(self.idx_sums))
        return _damaged_sidecar(
            self.path, begin, "the checksums from there on are not those that were written"
        )


def sidecar_path(prefix: Path | str) -> Path:
    return Path(f"{prefix}.meta")


def block_count(size: int) -> int:
    return -(-size // BLOCK_BYTES)


def stored_sums(sums: Iterable[int]) -> bytes:
    """Checksums of blocks as they lie in a sidecar."""
    return np.fromiter(sums, SUM).tobytes()


def write_sidecar(file: BinaryIO, facts: Facts, bin_sums: BinaryIO, idx_sums: bytes) -> None:
    """`bin_sums` is read twice: the checksums of a large corpus need not fit into memory twice."""
    table = crc32(idx_sums, crc32_of_stream(bin_sums))
    bin_sums.seek(0)
    said = {
        "format": FORMAT,
        "checksum": "crc32",
        "block_bytes": BLOCK_BYTES,
        "sums_crc32": table,
        **asdict(facts),
    }
    line = json.dumps(said, sort_keys=True).encode()
    file.write(b"%s\n%08x\n" % (line, crc32(line)))
    while data := bin_sums.read(BLOCK_BYTES):
        file.write(data)
    file.write(idx_sums)


def read_sidecar(prefix: Path | str) -> Sidecar | None:
    """The sidecar of a pair, or None where there is none, as beside the files of other programs."""
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
        facts, sums_crc32 = _facts(path, line)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise _damaged_sidecar(
            path, 0, f"its first line says no such facts ({type(error).__name__}: {error})"
        ) from None
    blocks, index_blocks = block_count(facts.bin_bytes), block_count(facts.idx_bytes)
    expected = begin + SUM.itemsize * (blocks + index_blocks)
    if size != expected:
        raise _damaged_sidecar(path, min(size, expected), f"it should have {expected} bytes, found {size}")
    sums = np.memmap(path, dtype=np.uint8, mode="r", offset=begin).view(np.ndarray).view(SUM)
    return Sidecar(path, facts, sums[:blocks], sums[blocks:], sums_crc32)


def _facts(path: Path, line: bytes) -> tuple[Facts, int]:
    said: dict[str, Any] = parse_json(line)
    if said.get("format") != FORMAT or said.get("block_bytes") != BLOCK_BYTES:
        raise UserError(
            f"{path} is of the format '{said.get('format')}', which this version does not read; use a newer Pentatron, or "
            "delete it to open the pair with checks of its structure only"
        )
    tokenizer = said["tokenizer"]
    facts = Facts(
        **{name: said[name] for name in Facts.__dataclass_fields__ if name != "tokenizer"},
        tokenizer=None if tokenizer is None else TokenizerIdentity(**tokenizer),
    )
    counts = ("sequences", "documents", "tokens", "largest_token", "bin_bytes", "idx_bytes")
    if not all(type(getattr(facts, name)) is int and getattr(facts, name) >= -1 for name in counts):
        raise ValueError("a count is no number")
    return facts, int(said["sums_crc32"])


def _damaged_sidecar(path: Path, offset: int, what: str) -> UserError:
    return UserError(
        f"{path} is damaged at byte {offset}: {what}; copy the file again, or delete it to open the pair with checks of its "
        "structure only"
    )


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
# Seconds between two stat calls per file: rare enough to cost nothing, frequent enough to precede most reads of a changed page.
STAMP_SECONDS = 0.01


@dataclass(frozen=True)
class _Stamp:
    """Metadata of a mapped file. Its bytes are the same as long as size and modification time are."""

    path: Path
    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> Self:
        found = path.stat()
        return cls(path, found.st_ino, found.st_size, found.st_mtime_ns)

    def now(self) -> "_Stamp":
        """The current metadata, or the same if the file cannot be reached: the mapping outlives a removed name."""
        try:
            return self.of(self.path)
        except OSError:
            return self

    def differs(self, now: "_Stamp") -> bool:
        # A copy with the same size and time (rsync -a) has another inode and the same bytes.
        return (self.size, self.modified_ns) != (now.size, now.modified_ns)

    def error(self, now: "_Stamp") -> UserError:
        what = (
            f"it had {self.size} bytes and has {now.size}"
            if self.size != now.size
            else "its modification time is not that of the file that was opened"
        )
        return UserError(
            f"{self.path} changed while it was read ({what}); restore the file and run the same command, which resumes from the newest "
            f"checkpoint, or start another run on the new data"
        )


def token_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """The type that a writer should choose for token ids below `vocab_size`."""
    return DTYPES[8] if vocab_size is not None and vocab_size < UINT16_VOCAB_LIMIT else DTYPES[4]


class IndexedDataset:
    """Reads sequences from a memory-mapped pair; opening checks the structure, `get` then costs one slice.

    Threads and forked processes may share it: which blocks were compared is one byte each, set after the comparison.
    """

    def __init__(self, prefix: Path | str, vocab_size: int | None = None, with_sidecar: bool = True) -> None:
        self.prefix = Path(prefix)
        self.bin_path, self.idx_path = pair_paths(prefix)
        if missing := missing_pairs([prefix]):
            raise UserError(missing)
        self._stamps = [_Stamp.of(self.bin_path), _Stamp.of(self.idx_path)]
        self._stamped_at = time.monotonic()
        code, sequences, boundaries = _read_header(self.idx_path)
        self.dtype = DTYPES[code]
        index = np.memmap(self.idx_path, dtype=np.uint8, mode="r").view(np.ndarray)
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
        self._bytes: npt.NDArray[np.uint8] = (
            np.memmap(self.bin_path, dtype=np.uint8, mode="r").view(np.ndarray)
            if self.bin_path.stat().st_size
            else np.empty(0, np.uint8)
        )
        self._tokens: npt.NDArray[Any] = self._bytes.view(self.dtype)
        self.sidecar = read_sidecar(prefix) if with_sidecar else None
        self._compared = bytearray(block_count(len(self._bytes)))
        if self.sidecar is not None:
            self._check_sidecar(self.sidecar, index)
        if vocab_size is not None:
            self.check_vocabulary(vocab_size)

    @property
    def facts(self) -> Facts | None:
        """What the sidecar says, if there is one."""
        return None if self.sidecar is None else self.sidecar.facts

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """A read-only view of `length` tokens of sequence `index` from `offset` on (to its end without a length)."""
        available = int(self.sequence_lengths[index])
        stop = available if length is None else offset + length
        if not 0 <= offset <= stop <= available:
            raise IndexError(f"sequence {index} has {available} tokens, asked for [{offset}, {stop})")
        start = int(self.pointers[index]) // self.dtype.itemsize
        return self.read(start + offset, start + stop)

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """A read-only view of the tokens [start, stop) of the whole corpus."""
        if time.monotonic() - self._stamped_at > STAMP_SECONDS:
            self._check_unchanged()
        if self.sidecar is not None and stop > start:
            item = self.dtype.itemsize
            first, last = start * item // BLOCK_BYTES, (stop * item - 1) // BLOCK_BYTES
            if self._compared.find(0, first, last + 1) >= 0:
                self._compare(self.sidecar, range(first, last + 1))
        return self._tokens[start:stop]

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """All tokens one after another, not compared with the sidecar."""
        return self._tokens

    def compare_all(self, report: Callable[[int], None] = lambda done: None) -> int:
        """Compares every block of tokens with the sidecar; the number of blocks. `report` gets bytes done since last time."""
        if self.sidecar is None:
            return 0
        blocks, step = len(self._compared), 64
        for first in range(0, blocks, step):
            self._compare(self.sidecar, range(first, min(first + step, blocks)), again=True)
            report(min(step * BLOCK_BYTES, len(self._bytes) - first * BLOCK_BYTES))
        return blocks

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses tokens outside a vocabulary, at once if the sidecar knows the largest; else they are refused when read."""
        if self.facts is not None and self.facts.largest_token >= vocab_size:
            raise UserError(
                f"{self.bin_path} holds token {self.facts.largest_token}, outside the vocabulary of {vocab_size}: it was "
                "prepared with another tokenizer; give that one, or prepare the data again"
            )

    def _check_unchanged(self) -> None:
        """Refuses a pair that changed since it was opened, before its pages are read.

        With checksums, a `.bin` of the same inode and size is compared again block by block instead: `touch` changes no token.
        """
        binary, index = self._stamps
        now = binary.now()
        if binary.differs(now):
            if self.sidecar is None or (binary.inode, binary.size) != (now.inode, now.size):
                raise binary.error(now)
            self._compared = bytearray(len(self._compared))
            self._stamps[0] = now
        if index.differs(now := index.now()):
            raise index.error(now)
        self._stamped_at = time.monotonic()

    def _check_sidecar(self, sidecar: Sidecar, index: npt.NDArray[np.uint8]) -> None:
        said = sidecar.facts
        for path, expected, found in (
            (self.bin_path, said.bin_bytes, len(self._bytes)),
            (self.idx_path, said.idx_bytes, len(index)),
        ):
            if expected != found:
                raise UserError(
                    f"{path} has {found} bytes where {sidecar.path.name} expects {expected}: it is cut short or of another "
                    f"pair; copy all three files again{self._resealed()}"
                )
        for block in range(len(sidecar.idx_sums)):
            self._require_block(sidecar, self.idx_path, index, sidecar.idx_sums, block)

    def _compare(self, sidecar: Sidecar, blocks: range, again: bool = False) -> None:
        for block in blocks:
            if self._compared[block] and not again:
                continue
            self._require_block(sidecar, self.bin_path, self._bytes, sidecar.bin_sums, block)
            self._compared[block] = 1

    def _require_block(
        self,
        sidecar: Sidecar,
        path: Path,
        data: npt.NDArray[np.uint8],
        sums: npt.NDArray[np.uint32],
        block: int,
    ) -> None:
        """Refuses a block of a file whose checksum is not the one in the sidecar."""
        begin, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, len(data))
        found = crc32(data[begin:end].data)
        if found == sums[block]:
            return
        raise sidecar.blame() or UserError(
            f"{path} is damaged between bytes {begin} and {end}: their checksum should be {sums[block]:08x}, found "
            f"{found:08x}; copy the files again or prepare the data again{self._resealed()}"
        )

    def _resealed(self) -> str:
        return f" (after another program rewrote the pair on purpose: pentatron data seal {self.prefix})"

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
                "two files are not a pair; copy both again or prepare the data again"
            )


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
        "copy the file again or prepare the data again"
    )
