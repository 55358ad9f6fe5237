"""What the `.bin/.idx` format lacks, in a third file: `<prefix>.meta`.

    line 1: a JSON object (counts, tokenizer, sizes) · line 2: the CRC-32 of line 1 · then the checksums of the blocks of `.bin` and
    of `.idx` (uint32 each)

Programs that do not know it read the pair as before.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pentatron.checksums import crc32, crc32_of_stream
from pentatron.config.parsing import parse_json
from pentatron.errors import UserError

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
        return _damaged(self.path, begin, "the checksums from there on are not those that were written")


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
        raise _damaged(path, 0, "its first line does not have the checksum of its second")
    try:
        facts, sums_crc32 = _facts(path, line)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise _damaged(
            path, 0, f"its first line says no such facts ({type(error).__name__}: {error})"
        ) from None
    blocks, index_blocks = block_count(facts.bin_bytes), block_count(facts.idx_bytes)
    expected = begin + SUM.itemsize * (blocks + index_blocks)
    if size != expected:
        raise _damaged(path, min(size, expected), f"it should have {expected} bytes, found {size}")
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


def _damaged(path: Path, offset: int, what: str) -> UserError:
    return UserError(
        f"{path} is damaged at byte {offset}: {what}; copy the file again, or delete it to open the pair with checks of its "
        "structure only"
    )
