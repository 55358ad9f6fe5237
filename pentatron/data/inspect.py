"""Looking at pairs that exist: sizes, lengths, checks, and a sidecar for those of other programs."""

import io
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pentatron.checksums import block_sums_of_file
from pentatron.data.indexed import (
    BLOCK_BYTES,
    CHECK_BLOCK,
    Facts,
    IndexedDataset,
    TokenizerIdentity,
    sidecar_path,
    stored_sums,
    write_sidecar,
)
from pentatron.data.tokenizer import Tokenizer, identify
from pentatron.errors import UserError
from pentatron.files import replaced

BAR = 40
Report = Callable[[int], None]


@dataclass(frozen=True)
class Lengths:
    """How long documents are: how many of 0 tokens, of 1, of 2 to 3, of 4 to 7 and so on."""

    documents: int
    tokens: int
    shortest: int
    longest: int
    powers: tuple[int, ...]

    def lines(self) -> list[str]:
        most = max(self.powers, default=0)
        drawn = []
        for power, count in enumerate(self.powers):
            low, high = (0, 0) if power == 0 else (2 ** (power - 1), 2**power - 1)
            span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            bar = "█" * max(1, round(BAR * count / most)) if count else ""
            drawn.append((span, count, bar))
        while drawn and not drawn[0][1]:
            drawn.pop(0)
        width = max((len(span) for span, _, _ in drawn), default=0)
        return [f"  {span:>{width}} tokens {count:>13,}  {bar}".rstrip() for span, count, bar in drawn]


def document_lengths(dataset: IndexedDataset) -> Lengths:
    bounds, item = dataset.document_indices, dataset.dtype.itemsize
    end = len(dataset.tokens)
    powers = np.zeros(65, np.int64)
    shortest, longest = 0, 0
    for first in range(0, len(bounds) - 1, CHECK_BLOCK):
        at = bounds[first : first + CHECK_BLOCK + 1]
        starts = np.full(len(at), end, np.int64)
        inside = at < len(dataset)
        starts[inside] = dataset.pointers[at[inside]] // item
        lengths = np.diff(starts)
        # frexp gives the number of binary digits, exactly: lengths are far below 2**53.
        powers += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=65)
        shortest = int(lengths.min()) if first == 0 else min(shortest, int(lengths.min()))
        longest = max(longest, int(lengths.max()))
    used = np.flatnonzero(powers)
    kept = tuple(int(count) for count in powers[: used[-1] + 1]) if len(used) else ()
    return Lengths(len(bounds) - 1, end, shortest, longest, kept)


def verify(prefix: Path | str, vocab_size: int | None = None, report: Report = lambda done: None) -> str:
    """Checks everything that can be checked about a pair and says what that was; raises what it finds."""
    dataset = IndexedDataset(prefix)
    blocks = dataset.compare_all(report)
    limit = vocab_size
    if limit is None and dataset.facts is not None and dataset.facts.tokenizer is not None:
        limit = dataset.facts.tokenizer.vocab_size
    if limit is not None:
        _check_tokens(dataset, limit)
    ids = f", {len(dataset.tokens):,} tokens below {limit:,}" if limit is not None else ""
    if dataset.sidecar is None:
        return f"structure good{ids}; no checksums to compare (pentatron data seal {prefix} makes them)"
    return f"structure good, {blocks + len(dataset.sidecar.idx_sums):,} checksums good{ids}"


def seal(prefix: Path | str, report: Report = lambda done: None) -> Facts:
    """Writes a sidecar for a pair as it is now, for example one that another program made."""
    dataset = IndexedDataset(prefix, with_sidecar=False)
    largest = max((int(part.max()) for part in _parts(dataset)), default=-1)
    facts = Facts(
        str(dataset.dtype),
        len(dataset),
        len(dataset.document_indices) - 1,
        len(dataset.tokens),
        largest,
        dataset.bin_path.stat().st_size,
        dataset.idx_path.stat().st_size,
    )
    sums = stored_sums(block_sums_of_file(dataset.bin_path, BLOCK_BYTES, tell=report))
    index_sums = stored_sums(block_sums_of_file(dataset.idx_path, BLOCK_BYTES))
    target = sidecar_path(prefix)
    with replaced(target) as file:
        write_sidecar(file, facts, io.BytesIO(sums), index_sums)
    return facts


def describe(prefix: Path | str) -> dict[str, Any]:
    """What `pentatron data describe` shows."""
    dataset = IndexedDataset(prefix)
    lengths = document_lengths(dataset)
    facts = dataset.facts
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
        "tokenizer": None if facts is None or facts.tokenizer is None else asdict(facts.tokenizer),
        "largest_token": None if facts is None else facts.largest_token,
        "sidecar": facts is not None,
    }


def described(said: dict[str, Any]) -> str:
    """The same as text."""
    tokenizer = said["tokenizer"]
    mean = said["tokens"] / max(1, said["documents"])
    facts = {
        "tokens": f"{said['tokens']:,} as {said['dtype']}, {said['bin_bytes']:,} bytes",
        "documents": f"{said['documents']:,} in {said['sequences']:,} sequences, index of {said['idx_bytes']:,} bytes",
        "lengths": f"{said['shortest_document']:,} to {said['longest_document']:,} tokens, {mean:,.1f} on average",
        "tokenizer": "not known"
        if tokenizer is None
        else f"{tokenizer['kind']}, {tokenizer['vocab_size']:,} ids, fingerprint {tokenizer['fingerprint'][:16]}",
        "checks": "structure good, checksums of the index good; `pentatron data verify` compares those of the tokens"
        if said["sidecar"]
        else "structure good; no checksums (`pentatron data seal` makes them)",
    }
    lines = [said["prefix"], *(f"  {name:<10} {text}" for name, text in facts.items()), ""]
    lengths = Lengths(
        said["documents"],
        said["tokens"],
        said["shortest_document"],
        said["longest_document"],
        tuple(said["lengths_by_power_of_two"]),
    )
    return "\n".join([*lines, *lengths.lines()])


def refuse_other_tokenizer(dataset: IndexedDataset, tokenizer: Tokenizer) -> None:
    """Data that another tokenizer made is refused, where its sidecar says which one that was."""
    made_by = None if dataset.facts is None else dataset.facts.tokenizer
    if made_by is None:
        return
    named = identify(tokenizer)
    if made_by.fingerprint != named.fingerprint:
        raise UserError(
            f"{dataset.bin_path} was prepared with another tokenizer ({_in_words(made_by)}) than the one named now "
            f"({_in_words(named)}); name the one it was prepared with, prepare the data again, or, if the ids mean the same, forget "
            f"which it was: pentatron data seal {dataset.prefix}"
        )


def _in_words(tokenizer: TokenizerIdentity) -> str:
    return f"{tokenizer.kind} of {tokenizer.vocab_size:,} ids, fingerprint {tokenizer.fingerprint[:16]}"


def _check_tokens(dataset: IndexedDataset, vocab_size: int) -> None:
    at = 0
    for part in _parts(dataset):
        if int(part.min()) < 0 or int(part.max()) >= vocab_size:
            wrong = int(np.argmax((part < 0) | (part >= vocab_size)))
            offset = (at + wrong) * dataset.dtype.itemsize
            raise UserError(
                f"{dataset.bin_path} holds token {part[wrong]} at byte {offset}, outside the vocabulary of {vocab_size}: it is "
                "damaged or was prepared with another tokenizer"
            )
        at += len(part)


def _parts(dataset: IndexedDataset) -> Iterator[npt.NDArray[Any]]:
    """All tokens, some megabytes at a time."""
    step = 64 * BLOCK_BYTES
    return (dataset.tokens[at : at + step] for at in range(0, len(dataset.tokens), step))
