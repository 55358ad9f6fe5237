"""Describes and verifies existing `.bin/.idx` pairs, and writes sidecars for them."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pentatron.checksums import block_sums_of_file
from pentatron.data import indexed
from pentatron.data.indexed import IndexedDataset, PairMetadata, TokenizerIdentity, sidecar_path
from pentatron.data.tokenizer import Tokenizer, identify_tokenizer
from pentatron.errors import UserError
from pentatron.files import atomic_write

BAR = 40


@dataclass(frozen=True)
class LengthHistogram:
    """A histogram of document lengths: `powers` counts lengths 0, 1, 2 to 3, 4 to 7, and so on."""

    documents: int
    tokens: int
    shortest: int
    longest: int
    powers: tuple[int, ...]


def histogram_lines(powers: Sequence[int]) -> list[str]:
    """Draws the `powers` of a histogram as text."""
    spans = ["0", "1", *(f"{2 ** (power - 1):,} to {2**power - 1:,}" for power in range(2, len(powers)))]
    first = next((power for power, count in enumerate(powers) if count), len(powers))
    rows = list(zip(spans, powers))[first:]
    width = max((len(span) for span, _ in rows), default=0)
    bars = ["█" * max(1, round(BAR * n / max(powers))) if n else "" for _, n in rows]
    return [f"  {span:>{width}} tokens {n:>13,}  {bar}".rstrip() for (span, n), bar in zip(rows, bars)]


def document_lengths(dataset: IndexedDataset) -> LengthHistogram:
    bounds, item = dataset.document_indices, dataset.dtype.itemsize
    end = len(dataset.tokens)
    powers = np.zeros(65, np.int64)
    extremes = []
    for first in range(0, len(bounds) - 1, indexed.CHECK_BLOCK):
        at = bounds[first : first + indexed.CHECK_BLOCK + 1]
        starts = np.full(len(at), end, np.int64)
        inside = at < len(dataset)
        starts[inside] = dataset.pointers[at[inside]] // item
        lengths = np.diff(starts)
        # The exponent of frexp is the bit length, exactly for lengths below 2**53.
        powers += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=65)
        extremes += [int(lengths.min()), int(lengths.max())]
    kept = tuple(np.trim_zeros(powers, "b").tolist())
    shortest, longest = min(extremes, default=0), max(extremes, default=0)
    return LengthHistogram(len(bounds) - 1, end, shortest, longest, kept)


def verify(prefix: Path | str, vocab_size: int | None = None) -> str:
    """Checks structure, checksums and token ids of a pair; returns a summary or raises UserError."""
    dataset = IndexedDataset(prefix)
    blocks = dataset.verify_checksums()
    if vocab_size is None and dataset.tokenizer is not None:
        vocab_size = dataset.tokenizer.vocab_size
    ids = ""
    if vocab_size is not None:
        _check_tokens(dataset, vocab_size)
        ids = f", {len(dataset.tokens):,} tokens below {vocab_size:,}"
    if dataset.sidecar is None:
        return f"structure good{ids}; no checksums to compare (pentatron data seal {prefix} creates them)"
    return f"structure good, {blocks + len(dataset.sidecar.idx_sums):,} checksums good{ids}"


def seal(prefix: Path | str) -> PairMetadata:
    """Writes a sidecar for an existing pair, for example one of another program."""
    dataset = IndexedDataset(prefix, with_sidecar=False)
    largest = max((int(part.max()) for part in _token_chunks(dataset)), default=-1)
    counts = len(dataset), len(dataset.document_indices) - 1, len(dataset.tokens)
    sizes = dataset.bin_path.stat().st_size, dataset.idx_path.stat().st_size
    metadata = PairMetadata(str(dataset.dtype), *counts, largest, *sizes)
    sums = indexed.stored_sums(block_sums_of_file(dataset.bin_path, indexed.BLOCK_BYTES))
    index_sums = indexed.stored_sums(block_sums_of_file(dataset.idx_path, indexed.BLOCK_BYTES))
    with atomic_write(sidecar_path(prefix)) as file:
        indexed.write_sidecar(file, metadata, io.BytesIO(sums), index_sums)
    return metadata


def describe(prefix: Path | str) -> dict[str, Any]:
    """Returns what is shown by `pentatron data describe`."""
    dataset = IndexedDataset(prefix)
    lengths = document_lengths(dataset)
    metadata = dataset.metadata
    return {
        "prefix": str(prefix),
        "bin_bytes": dataset.bin_path.stat().st_size,
        "idx_bytes": dataset.idx_path.stat().st_size,
        "dtype": str(dataset.dtype),
        "documents": lengths.documents,
        "sequences": len(dataset),
        "tokens": lengths.tokens,
        "shortest_document": lengths.shortest,
        "longest_document": lengths.longest,
        "lengths_by_power_of_two": list(lengths.powers),
        "tokenizer": None if dataset.tokenizer is None else asdict(dataset.tokenizer),
        "largest_token": None if metadata is None else metadata.largest_token,
        "sidecar": metadata is not None,
    }


def format_description(described: dict[str, Any]) -> str:
    """Formats the result of `describe` as text."""
    tokenizer = described["tokenizer"]
    mean = described["tokens"] / max(1, described["documents"])
    rows = {
        "tokens": f"{described['tokens']:,} as {described['dtype']}, {described['bin_bytes']:,} bytes",
        "documents": f"{described['documents']:,} in {described['sequences']:,} sequences, index of {described['idx_bytes']:,} bytes",
        "lengths": f"{described['shortest_document']:,} to {described['longest_document']:,} tokens, {mean:,.1f} on average",
        "tokenizer": "not known"
        if tokenizer is None
        else f"{tokenizer['kind']}, {tokenizer['vocab_size']:,} ids, fingerprint {tokenizer['fingerprint'][:16]}",
        "checks": "structure good, checksums of the index good; `pentatron data verify` compares those of the tokens"
        if described["sidecar"]
        else "structure good; no checksums (`pentatron data seal` creates them)",
    }
    lines = [described["prefix"], *(f"  {name:<10} {text}" for name, text in rows.items()), ""]
    return "\n".join([*lines, *histogram_lines(described["lengths_by_power_of_two"])])


def require_same_tokenizer(dataset: IndexedDataset, tokenizer: Tokenizer) -> None:
    """Raises UserError if the sidecar records another tokenizer than the given one."""
    recorded = dataset.tokenizer
    if recorded is not None and recorded.fingerprint != (given := identify_tokenizer(tokenizer)).fingerprint:
        raise UserError(
            f"{dataset.bin_path} was prepared with another tokenizer ({_described_tokenizer(recorded)}) than the given one "
            f"({_described_tokenizer(given)}); give the one it was prepared with, prepare the data again, or, if both give the same ids, "
            f"remove the record: pentatron data seal {dataset.prefix}"
        )


def _described_tokenizer(tokenizer: TokenizerIdentity) -> str:
    return f"{tokenizer.kind} of {tokenizer.vocab_size:,} ids, fingerprint {tokenizer.fingerprint[:16]}"


def _check_tokens(dataset: IndexedDataset, vocab_size: int) -> None:
    at = 0
    for part in _token_chunks(dataset):
        if int(part.min()) < 0 or int(part.max()) >= vocab_size:
            wrong = int(np.argmax((part < 0) | (part >= vocab_size)))
            offset = (at + wrong) * dataset.dtype.itemsize
            raise UserError(
                f"{dataset.bin_path} holds token {part[wrong]} at byte {offset}, outside the vocabulary of {vocab_size}: it is "
                "damaged or was prepared with another tokenizer"
            )
        at += len(part)


def _token_chunks(dataset: IndexedDataset) -> Iterator[npt.NDArray[Any]]:
    """Yields all tokens, a few megabytes at a time."""
    step = 64 * indexed.BLOCK_BYTES
    return (dataset.tokens[at : at + step] for at in range(0, len(dataset.tokens), step))
