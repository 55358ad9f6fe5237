"""Several pairs as one, document after document."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pentatron.data.indexed import IndexedDataset
from pentatron.data.pair_names import pair_paths
from pentatron.data.pair_writer import PairInProgress, publish, remove_leftovers_of_pair
from pentatron.data.sidecar import Facts, TokenizerIdentity
from pentatron.errors import UserError
from pentatron.files import temporary_suffix

# Documents copied at a time.
STEP = 1 << 14


def merge(
    prefixes: Sequence[Path | str],
    output: Path | str,
    overwrite: bool = False,
    report: Callable[[int], None] = lambda done: None,
) -> Facts:
    """Writes the documents of all pairs, in this order, under `output`; what is copied is compared with its checksums."""
    sources = [IndexedDataset(prefix) for prefix in prefixes]
    tokenizer = _common_tokenizer(sources)
    remove_leftovers_of_pair(Path(output))
    if pair_paths(output)[1].exists() and not overwrite:
        raise UserError(f"{pair_paths(output)[1]} exists already; add --overwrite to replace it")
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    suffix = temporary_suffix()
    pair = PairInProgress(Path(output), sources[0].dtype, suffix)
    try:
        for source in sources:
            _append(pair, source, report)
        facts = pair.complete(tokenizer)
        publish(Path(output), suffix, output)
    finally:
        pair.discard()
    return facts


def _append(pair: PairInProgress, source: IndexedDataset, report: Callable[[int], None]) -> None:
    bounds, item = source.document_indices, source.dtype.itemsize
    for first in range(0, len(bounds) - 1, STEP):
        at = bounds[first : first + STEP + 1]
        sequences = range(int(at[0]), int(at[-1]))
        lengths = source.sequence_lengths[sequences.start : sequences.stop]
        begin = int(source.pointers[sequences.start]) // item if len(sequences) else 0
        tokens = source.read(begin, begin + int(lengths.sum(dtype=np.int64)))
        largest = int(tokens.max()) if len(tokens) else -1
        pair.append(tokens.view(np.uint8).data, lengths, np.diff(at), largest)
        report(tokens.nbytes)


def _common_tokenizer(sources: Sequence[IndexedDataset]) -> TokenizerIdentity | None:
    """The tokenizer that made all of them, if that is known; pairs that do not fit together are refused."""
    known: IndexedDataset | None = None
    for source in sources:
        if source.dtype != sources[0].dtype:
            raise UserError(
                f"{sources[0].prefix} holds {sources[0].dtype} and {source.prefix} holds {source.dtype}; only pairs of one type can "
                "be merged: prepare one of them again with the other's tokenizer"
            )
        made_by = source.facts.tokenizer if source.facts is not None else None
        if made_by is None:
            continue
        first = known.facts.tokenizer if known is not None and known.facts is not None else made_by
        if first is not None and first.fingerprint != made_by.fingerprint:
            raise UserError(
                f"{known.prefix if known else ''} and {source.prefix} were prepared with different tokenizers; prepare one of them "
                "again with the other's"
            )
        known = known or source
    everywhere = all(source.facts is not None and source.facts.tokenizer is not None for source in sources)
    return known.facts.tokenizer if everywhere and known is not None and known.facts is not None else None
