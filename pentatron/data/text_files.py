"""Reads text files in chunks: JSON Lines or plain text, uncompressed, gzip or Zstandard.

Chunks end at document boundaries, so that the documents do not depend on the chunk size.
"""

import glob
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from pentatron.errors import UserError, import_package
from pentatron.text import binary_size

JSON_ENDINGS = (".jsonl", ".json", ".ndjson")
TEXT_ENDINGS = (".txt", ".text", ".md")
PACKED_ENDINGS = (".gz", ".zst", ".zstd")
# How plain text is split into documents.
TEXT_DOCUMENTS = ("file", "line", "blank-line")
JSON_LINES = "json"
# Bytes of a Zstandard file decompressed at a time; a few of them can expand to 128 KiB.
READ_BYTES = 1 << 12
# Largest line or paragraph, in bytes. Tokenizing it takes several times as much memory.
LONGEST_DOCUMENT = 64 << 20
# Largest plain-text file that is one document.
LONGEST_FILE = 1 << 30


@dataclass(frozen=True)
class Position:
    """A position in the inputs: after `offset` decompressed bytes of a file, at the end of line `lines`."""

    file: int = 0
    offset: int = 0
    lines: int = 0


@dataclass(frozen=True)
class Chunk:
    """Whole documents of one file, the number of their first line, and the position after them."""

    data: bytes
    file: int
    first_line: int
    cut: str
    after: Position
    # Bytes on disk read up to the end of this chunk, to report progress.
    read: int


class _ByteStream(Protocol):
    def read(self, size: int, /) -> bytes: ...


def expand_inputs(patterns: Sequence[str]) -> tuple[Path, ...]:
    """Returns the files named by paths and glob patterns; the matches of a pattern are sorted."""
    files: list[Path] = []
    for given in patterns:
        path = Path(given)
        if path.is_dir():
            raise UserError(f"--input {given} is a folder; name its files, for example '{given}/*.jsonl'")
        # Path.glob does not accept absolute patterns.
        names = [given] if path.is_file() else sorted(glob.glob(given, recursive=True))  # noqa: PTH207
        matches = [Path(name) for name in names if Path(name).is_file()]
        if not matches:
            raise UserError(f"no input file {given}; --input takes files or patterns such as 'data/*.jsonl'")
        files += matches
    seen: set[Path] = set()
    for path in files:
        if path.resolve() in seen:
            raise UserError(f"--input names {path} twice, which doubles its documents; give every file once")
        seen.add(path.resolve())
    return tuple(files)


def is_json_lines(path: Path) -> bool:
    """Whether a file has JSON Lines, not plain text; raises UserError for an unknown extension."""
    name = path.name.lower()
    for packed in PACKED_ENDINGS:
        name = name.removesuffix(packed)
    if name.endswith((*JSON_ENDINGS, *TEXT_ENDINGS)):
        return name.endswith(JSON_ENDINGS)
    raise UserError(
        f"the format of {path} is not clear from its name; name it .jsonl (one object per line) or .txt, followed by .gz or .zst if "
        "it is compressed"
    )


def read_chunks(
    inputs: Sequence[Path], text_documents: str, chunk_bytes: int, start: Position | None = None
) -> Iterator[Chunk]:
    """Yields the chunks of the inputs in order, from position `start`."""
    place = start or Position()
    before = sum(path.stat().st_size for path in inputs[: place.file])
    for number, path in enumerate(inputs[place.file :], place.file):
        cut = JSON_LINES if is_json_lines(path) else text_documents
        begin = place if place.file == number else Position(number)
        with path.open("rb") as raw:
            try:
                yield from _chunks_of(path, raw, number, cut, chunk_bytes, begin, before)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise UserError(
                    f"{path} cannot be unpacked beyond its byte {raw.tell()} ({error}); it is damaged or cut short: copy it again"
                ) from error
        before += path.stat().st_size


def _chunks_of(
    path: Path, raw: BinaryIO, number: int, cut: str, chunk_bytes: int, begin: Position, before: int
) -> Iterator[Chunk]:
    stream = _decompressed(path, raw)
    _skip(path, raw, stream, begin.offset)
    offset, lines, buffer = begin.offset, begin.lines, bytearray()
    wanted = chunk_bytes
    longest = max(chunk_bytes, LONGEST_FILE if cut == "file" else LONGEST_DOCUMENT)
    while True:
        while len(buffer) < wanted and (data := stream.read(wanted - len(buffer))):
            buffer += data
        ended = len(buffer) < wanted
        end = len(buffer) if ended else _end_of_documents(buffer, cut)
        if end == 0 and not ended:
            if len(buffer) > longest:
                raise UserError(_too_long(path, cut, lines + 1, longest))
            # One document is larger than a chunk: read more of it.
            wanted = min(2 * wanted, longest + 1)
            continue
        if end:
            data = bytes(buffer[:end])
            del buffer[:end]
            offset += end
            first, lines = lines + 1, lines + data.count(b"\n")
            after = Position(number + 1) if ended else Position(number, offset, lines)
            yield Chunk(data, number, first, cut, after, before + raw.tell())
        if ended:
            return
        wanted = chunk_bytes


def _too_long(path: Path, cut: str, line: int, longest: int) -> str:
    most = binary_size(longest)
    if cut == "file":
        return (
            f"{path} is longer than {most}, which is too much for one document; cut it into several with --text-documents line or "
            f"blank-line, or into several files"
        )
    what = "the paragraph" if cut == "blank-line" else "the line"
    return f"{what} that begins at line {line} of {path} is longer than {most}; cut it into several documents, or leave it out"


def _end_of_documents(buffer: bytearray, cut: str) -> int:
    """Returns the number of bytes at the beginning of the buffer that are whole documents."""
    if cut == "file":
        return 0
    if cut == "blank-line":
        # Further blank lines may follow: they belong to no document, on either side of the cut.
        ends = [buffer.rfind(mark) + len(mark) for mark in (b"\n\n", b"\n\r\n") if mark in buffer]
        return max(ends, default=0)
    return buffer.rfind(b"\n") + 1


def _skip(path: Path, raw: BinaryIO, stream: _ByteStream, offset: int) -> None:
    """Advances a stream by `offset` decompressed bytes."""
    if stream is raw:
        raw.seek(offset)
        return
    left = offset
    while left:
        if not (data := stream.read(min(left, 1 << 20))):
            raise UserError(f"{path} is shorter than before; it has changed: add --overwrite to start over")
        left -= len(data)


def _decompressed(path: Path, raw: BinaryIO) -> _ByteStream:
    if path.suffix.lower() == ".gz":
        return gzip.GzipFile(fileobj=raw)
    return _ZstandardStream(path, raw) if path.suffix.lower() in (".zst", ".zstd") else raw


class _ZstandardStream:
    """Reads concatenated Zstandard frames; detects truncation, unlike the library's reader."""

    def __init__(self, path: Path, raw: BinaryIO) -> None:
        self._raw, self._library = raw, import_package("zstandard", str(path))
        self._frame: Any = None
        # Compressed bytes after the end of a frame, and decompressed bytes not yet returned.
        self._rest, self._ready = b"", io.BytesIO()

    def read(self, size: int, /) -> bytes:
        while not (data := self._ready.read(size)):
            packed = self._rest or self._raw.read(READ_BYTES)
            self._rest = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError("the last frame is not complete")
                return b""
            if self._frame is None:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            try:
                self._ready = io.BytesIO(self._frame.decompress(packed))
            except self._library.ZstdError as error:
                raise EOFError(str(error)) from error
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        return data
