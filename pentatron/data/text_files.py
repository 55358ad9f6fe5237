"""Text files as a stream of chunks: JSON lines or plain text, as they are, gzipped or as Zstandard frames.

A chunk ends where a document ends, so that the documents do not depend on how the input was cut up.
"""

import glob
import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from pentatron.errors import UserError
from pentatron.text import binary_size

JSON_ENDINGS = (".jsonl", ".json", ".ndjson")
TEXT_ENDINGS = (".txt", ".text", ".md")
PACKED_ENDINGS = (".gz", ".zst", ".zstd")
# How plain text is cut into documents.
TEXT_DOCUMENTS = ("file", "line", "blank-line")
JSON_LINES = "json"
# Of a packed Zstandard file, at once: a few bytes of it can stand for 128 KiB.
READ_BYTES = 1 << 12
# Of one document: a line, or a paragraph. What is read into memory takes several times as much.
LONGEST_DOCUMENT = 64 << 20
# Of plain text that is one document as a whole.
LONGEST_FILE = 1 << 30


@dataclass(frozen=True)
class Place:
    """Where reading goes on: after `offset` unpacked bytes of a file, which ended line `lines`."""

    file: int = 0
    offset: int = 0
    lines: int = 0


@dataclass(frozen=True)
class Chunk:
    """Whole documents of one file, the number of their first line, and the place after them."""

    data: bytes
    file: int
    first_line: int
    cut: str
    after: Place
    # Bytes of the files as they lie on the disk up to the end of this chunk, to show progress.
    read: int


class _Unpacked(Protocol):
    def read(self, size: int, /) -> bytes: ...


def expand_inputs(patterns: Sequence[str]) -> tuple[Path, ...]:
    """The files that paths and patterns name, patterns in alphabetical order."""
    found: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            raise UserError(f"--input {pattern} is a folder; name its files, for example '{pattern}/*.jsonl'")
        if path.is_file():
            found.append(path)
            continue
        # Path.glob takes no absolute pattern.
        names = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
        matches = [Path(name) for name in names if Path(name).is_file()]
        if not matches:
            raise UserError(
                f"no input file {pattern}; --input takes files or patterns such as 'data/*.jsonl'"
            )
        found += matches
    seen: set[Path] = set()
    for path in found:
        if path.resolve() in seen:
            raise UserError(
                f"--input names {path} twice, which would double its documents; name every file once"
            )
        seen.add(path.resolve())
    return tuple(found)


def is_json(path: Path) -> bool:
    """Whether a file holds JSON lines; another ending is refused rather than guessed."""
    name = path.name.lower()
    for packed in PACKED_ENDINGS:
        name = name.removesuffix(packed)
    if name.endswith(JSON_ENDINGS):
        return True
    if name.endswith(TEXT_ENDINGS):
        return False
    raise UserError(
        f"what {path} holds is not clear from its name; call it .jsonl (one object per line) or .txt, with .gz or .zst behind if it "
        "is packed"
    )


def read_chunks(
    inputs: Sequence[Path], text_documents: str, chunk_bytes: int, start: Place | None = None
) -> Iterator[Chunk]:
    """The inputs from `start` on, in order."""
    place = start or Place()
    before = sum(path.stat().st_size for path in inputs[: place.file])
    for number in range(place.file, len(inputs)):
        path = inputs[number]
        cut = JSON_LINES if is_json(path) else text_documents
        begin = place if place.file == number else Place(number)
        with path.open("rb") as raw:
            try:
                yield from _chunks_of(path, raw, number, cut, chunk_bytes, begin, before)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise UserError(
                    f"{path} cannot be unpacked beyond its byte {raw.tell()} ({error}); it is damaged or cut short: copy it again"
                ) from error
        before += path.stat().st_size


def _chunks_of(
    path: Path, raw: BinaryIO, number: int, cut: str, chunk_bytes: int, begin: Place, before: int
) -> Iterator[Chunk]:
    stream = _unpacked(path, raw)
    _skip(path, stream, begin.offset)
    offset, lines, held = begin.offset, begin.lines, bytearray()
    wanted = chunk_bytes
    longest = max(chunk_bytes, LONGEST_FILE if cut == "file" else LONGEST_DOCUMENT)
    while True:
        while len(held) < wanted and (data := stream.read(wanted - len(held))):
            held += data
        ended = len(held) < wanted
        end = len(held) if ended else _last_end(held, cut)
        if end == 0 and not ended:
            if len(held) > longest:
                raise UserError(_too_long(path, cut, lines + 1, longest))
            # One document is larger than a chunk: take more of it.
            wanted = min(2 * wanted, longest + 1)
            continue
        if end:
            data = bytes(held[:end])
            del held[:end]
            offset += end
            first, lines = lines + 1, lines + data.count(b"\n")
            after = Place(number + 1) if ended else Place(number, offset, lines)
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


def _last_end(held: bytearray, cut: str) -> int:
    """How much of what is held are whole documents."""
    if cut == "file":
        return 0
    if cut == "blank-line":
        # A blank line may be followed by more of them: they belong to no document, on either side of the cut.
        return (
            max(held.rfind(b"\n\n") + 2, held.rfind(b"\n\r\n") + 3)
            if b"\n\n" in held or b"\n\r\n" in held
            else 0
        )
    return held.rfind(b"\n") + 1


def _skip(path: Path, stream: _Unpacked, offset: int) -> None:
    if isinstance(stream, Seekable):
        stream.raw.seek(offset)
        return
    left = offset
    while left:
        data = stream.read(min(left, 1 << 20))
        if not data:
            raise UserError(f"{path} is shorter than before; it has changed: add --overwrite to start over")
        left -= len(data)


@dataclass(frozen=True)
class Seekable:
    """A file that is not packed."""

    raw: BinaryIO

    def read(self, size: int, /) -> bytes:
        return self.raw.read(size)


def _unpacked(path: Path, raw: BinaryIO) -> _Unpacked:
    name = path.name.lower()
    if name.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    if name.endswith((".zst", ".zstd")):
        return _ZstandardStream(path, raw)
    return Seekable(raw)


class _ZstandardStream:
    """Frames one after another. The library's own reader ends without a word where a file is cut short."""

    def __init__(self, path: Path, raw: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise UserError(f"{path} needs the package zstandard; run: pip install zstandard") from error
        self._raw = raw
        self._library: Any = zstandard
        self._frame: Any = None
        self._rest = b""
        self._ready, self._taken = b"", 0

    def read(self, size: int, /) -> bytes:
        while self._taken == len(self._ready):
            packed = self._rest or self._raw.read(READ_BYTES)
            self._rest = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError("the last frame is not whole")
                return b""
            if self._frame is None:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            try:
                self._ready, self._taken = self._frame.decompress(packed), 0
            except self._library.ZstdError as error:
                raise EOFError(str(error)) from error
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        begin = self._taken
        self._taken = min(len(self._ready), begin + size)
        return self._ready[begin : self._taken]
