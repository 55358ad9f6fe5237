"""Writes and merges `.bin/.idx` pairs in temporary files, renamed when complete."""

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from pentatron.checksums import BlockChecksums, ChecksummedFile
from pentatron.data import indexed
from pentatron.data.indexed import IndexedDataset, PairMetadata, TokenizerIdentity, pair_paths
from pentatron.errors import UserError
from pentatron.files import commit, fsync, lock, remove_leftovers, temporary_suffix

BUFFER = 1 << 20
# Documents copied at a time by `merge`.
STEP = 1 << 14
PARTS = ("bin", "lengths", "ends", "sums")
ALL_PARTS = (*PARTS, "idx", "meta")


@dataclass(frozen=True)
class EncodedDocuments:
    """Tokens of whole documents, the lengths of their sequences, sequences per document and largest token."""

    tokens: bytes | memoryview
    lengths: npt.NDArray[np.int32]
    counts: npt.NDArray[np.integer]
    largest: int


@dataclass
class PairState:
    """The sizes of an incomplete pair, and the running checksum of its last block of tokens."""

    bin: int = 0
    sequences: int = 0
    documents: int = 0
    largest: int = -1
    running: int = 0
    filled: int = 0


class PairInProgress:
    """An incomplete pair in append-only files, so that memory use does not depend on its size.

    `fsync` returns a state from which `PairInProgress(..., state)` resumes; anything written later is
    truncated.
    """

    def __init__(
        self, stem: Path, dtype: npt.DTypeLike, suffix: str = "", state: Mapping[str, int] | None = None
    ) -> None:
        self.dtype, self._type_code = _stored_dtype(dtype)
        self._stem, self._suffix = stem, suffix
        self.state = PairState(**(state or {}))
        self._sums = BlockChecksums(indexed.BLOCK_BYTES, self.state.running, self.state.filled)
        self._files: dict[str, BinaryIO] = {}
        # Descriptors of the locked temporary files, closed by `discard`.
        self._locks: list[int] = []
        try:
            self._open_files(resumes=state is not None)
        except BaseException:
            if state is None:
                self.discard()
            raise

    def _open_files(self, resumes: bool) -> None:
        state = self.state
        sums = indexed.SUM.itemsize * ((state.bin - state.filled) // indexed.BLOCK_BYTES)
        for part, size in zip(PARTS, (state.bin, 4 * state.sequences, 8 * state.documents, sums)):
            path = self.path(part)
            if resumes and (not path.is_file() or path.stat().st_size < size):
                raise UserError(
                    f"{path} is shorter than recorded by the interrupted run; delete {path.parent} to start over"
                )
            file = path.open("r+b" if resumes else "wb", buffering=BUFFER)
            self._files[part] = file
            self._lock(part)
            file.truncate(size)
            file.seek(size)

    @property
    def tokens(self) -> int:
        return self.state.bin // self.dtype.itemsize

    def path(self, part: str) -> Path:
        return Path(f"{self._stem}.{part}{self._suffix}")

    def append(self, documents: EncodedDocuments) -> None:
        self._files["bin"].write(documents.tokens)
        self._sums.update(documents.tokens)
        self._files["sums"].write(indexed.stored_sums(self._sums.take_finished()))
        self._files["lengths"].write(documents.lengths.astype("<i4").tobytes())
        state = self.state
        self._files["ends"].write((state.sequences + np.cumsum(documents.counts, dtype="<i8")).tobytes())
        state.bin += memoryview(documents.tokens).nbytes
        state.sequences += len(documents.lengths)
        state.documents += len(documents.counts)
        state.largest = max(state.largest, documents.largest)
        state.running, state.filled = self._sums.running, self._sums.filled

    def sync(self) -> dict[str, int]:
        """Flushes everything appended so far to disk and returns the state to resume from."""
        for file in self._files.values():
            fsync(file)
        return asdict(self.state)

    def complete(self, tokenizer: TokenizerIdentity | None = None, job: str | None = None) -> PairMetadata:
        """Writes the index and the sidecar, still under temporary names."""
        self._files["sums"].write(indexed.stored_sums(self._sums.take_last()))
        self.close()
        index_sums = BlockChecksums(indexed.BLOCK_BYTES)
        with self.path("idx").open("wb", buffering=BUFFER) as file:
            self._lock("idx")
            index = ChecksummedFile(file, index_sums)
            self._write_index(index)
        state, counts = self.state, (self.state.sequences, self.state.documents, self.tokens)
        meta = PairMetadata(str(self.dtype), *counts, state.largest, state.bin, index.bytes, tokenizer, job)
        with self.path("meta").open("wb") as file, self.path("sums").open("rb") as sums:
            self._lock("meta")
            indexed.write_sidecar(file, meta, sums, indexed.stored_sums(index_sums.take_last()))
        return meta

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _lock(self, part: str) -> None:
        """Locks a temporary file, so that other processes do not remove it as a leftover."""
        if self._suffix:
            self._locks.append(os.open(self.path(part), os.O_RDWR))
            lock(self._locks[-1])

    def discard(self) -> None:
        """Removes the temporary files, even if the disk is full."""
        for file in self._files.values():
            with suppress(OSError):
                file.close()
        for part in ALL_PARTS:
            with suppress(OSError):
                self.path(part).unlink(missing_ok=True)
        while self._locks:
            os.close(self._locks.pop())

    def _write_index(self, file: ChecksummedFile) -> None:
        counts = self.state.sequences, self.state.documents + 1
        file.write(indexed.HEADER.pack(indexed.MAGIC, indexed.VERSION, self._type_code, *counts))
        with self.path("lengths").open("rb") as lengths:
            shutil.copyfileobj(lengths, file)
            lengths.seek(0)
            end = 0
            while data := lengths.read(4 * indexed.CHECK_BLOCK):
                sizes = np.frombuffer(data, "<i4").astype(np.int64) * self.dtype.itemsize
                ends = end + np.cumsum(sizes)
                file.write((ends - sizes).astype("<i8").tobytes())
                end = int(ends[-1])
        file.write(bytes(8))
        with self.path("ends").open("rb") as boundaries:
            shutil.copyfileobj(boundaries, file)


def remove_leftovers_of_pair(stem: Path) -> None:
    """Removes temporary files of a pair left by killed processes; locked ones of a running process stay."""
    for part in ALL_PARTS:
        remove_leftovers(Path(f"{stem}.{part}"))


def publish(stem: Path, suffix: str, prefix: Path | str) -> None:
    """Renames a complete pair to its final names; idempotent, so that it can be repeated after a crash.

    An old index is removed first and the new one renamed last: at any time the prefix opens as the old
    pair, as the new pair, or not at all.
    """
    binary, index = pair_paths(prefix)
    if not Path(f"{stem}.idx{suffix}").exists():
        return
    index.unlink(missing_ok=True)
    for part, target in (("bin", binary), ("meta", indexed.sidecar_path(prefix)), ("idx", index)):
        if (temporary := Path(f"{stem}.{part}{suffix}")).exists():
            commit(temporary, target)


class IndexedDatasetWriter:
    """Writes a pair document by document; the files appear when the `with` block succeeds."""

    # The metadata of the complete pair.
    metadata: PairMetadata

    def __init__(
        self, prefix: Path | str, dtype: npt.DTypeLike, tokenizer: TokenizerIdentity | None = None
    ) -> None:
        self.prefix, self.tokenizer = Path(prefix), tokenizer
        self.dtype, _ = _stored_dtype(dtype)
        self._suffix = temporary_suffix()

    def __enter__(self) -> Self:
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers_of_pair(self.prefix)
        self.pair = PairInProgress(self.prefix, self.dtype, self._suffix)
        return self

    def add_document(self, tokens: npt.ArrayLike, lengths: Sequence[int] | None = None) -> None:
        """Appends a document of one sequence, or of several with given lengths."""
        ids = np.asarray(tokens, dtype=np.int64)
        if lengths is None:
            lengths = [len(ids)] if len(ids) else []
        assert sum(lengths) == len(ids), "the lengths of the sequences do not add up to the document"
        limits = np.iinfo(self.dtype)
        smallest, largest = int(ids.min(initial=0)), int(ids.max(initial=-1))
        if smallest < limits.min or largest > limits.max:
            wrong = smallest if smallest < limits.min else largest
            raise UserError(f"token {wrong} does not fit {self.dtype}; use token_dtype(vocab_size)")
        data, sizes = ids.astype(self.dtype).tobytes(), np.asarray(lengths, np.int32)
        self.pair.append(EncodedDocuments(data, sizes, np.array([len(lengths)]), largest))

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        try:
            if error_type is None:
                self.metadata = self.pair.complete(self.tokenizer)
                publish(self.prefix, self._suffix, self.prefix)
        finally:
            self.pair.discard()


def _stored_dtype(dtype: npt.DTypeLike) -> tuple[np.dtype[Any], int]:
    """Returns the little-endian type of tokens in a file, and its code in the index."""
    stored = np.dtype(dtype).newbyteorder("<")
    for code, supported in indexed.DTYPES.items():
        if supported == stored:
            return stored, code
    raise UserError(
        f"tokens cannot be stored as {stored}; choose one of {', '.join(map(str, indexed.DTYPES.values()))}"
    )


def merge(prefixes: Sequence[Path | str], output: Path | str, overwrite: bool = False) -> PairMetadata:
    """Concatenates pairs into `output`; tokens are verified against the checksums of their sources."""
    sources = [IndexedDataset(prefix) for prefix in prefixes]
    tokenizer = _common_tokenizer(sources)
    remove_leftovers_of_pair(Path(output))
    if pair_paths(output)[1].exists() and not overwrite:
        raise UserError(f"{pair_paths(output)[1]} exists already; add --overwrite to replace it")
    with IndexedDatasetWriter(output, sources[0].dtype, tokenizer) as writer:
        for source in sources:
            _append_documents(writer.pair, source)
    return writer.metadata


def _append_documents(pair: PairInProgress, source: IndexedDataset) -> None:
    bounds, item = source.document_indices, source.dtype.itemsize
    for first in range(0, len(bounds) - 1, STEP):
        at = bounds[first : first + STEP + 1]
        lengths = source.sequence_lengths[at[0] : at[-1]]
        begin = int(source.pointers[at[0]]) // item if len(lengths) else 0
        tokens = source.read(begin, begin + int(lengths.sum(dtype=np.int64)))
        largest = int(tokens.max()) if len(tokens) else -1
        pair.append(EncodedDocuments(tokens.view(np.uint8).data, lengths, np.diff(at), largest))


def _common_tokenizer(sources: Sequence[IndexedDataset]) -> TokenizerIdentity | None:
    """Returns the tokenizer of all pairs, None if any is unknown; raises UserError on a mismatch."""
    known: list[tuple[Path, TokenizerIdentity]] = []
    for source in sources:
        if source.dtype != sources[0].dtype:
            raise UserError(
                f"{sources[0].prefix} holds {sources[0].dtype} and {source.prefix} holds {source.dtype}; only pairs of one type can "
                "be merged: prepare one of them again with the other's tokenizer"
            )
        if source.tokenizer is not None:
            known.append((source.prefix, source.tokenizer))
        if known and known[-1][1].fingerprint != known[0][1].fingerprint:
            raise UserError(
                f"{known[0][0]} and {source.prefix} were prepared with different tokenizers; prepare one of them "
                "again with the other's"
            )
    return known[0][1] if len(known) == len(sources) else None
