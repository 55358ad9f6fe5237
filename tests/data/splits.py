"""Opens the splits of one corpus as datasets."""

from collections.abc import Sequence
from pathlib import Path

from pentatron.data.gpt_dataset import GPTDataset, require_share, split_documents
from pentatron.data.indexed import IndexedDataset
from pentatron.data.sample_index import SPLIT_NAMES, Boundaries


def open_splits(
    prefix: Path | str,
    split: str,
    sizes: Sequence[int | None],
    sequence_length: int,
    seed: int,
    vocab_size: int | None = None,
    boundaries: Boundaries | None = None,
) -> tuple[GPTDataset | None, ...]:
    """Returns train, valid and test of one corpus; None for a share or size of zero."""
    source = IndexedDataset(prefix, vocab_size)
    datasets: list[GPTDataset | None] = []
    for name, documents, size in zip(SPLIT_NAMES, split_documents(source, split), sizes, strict=True):
        if documents is None or size == 0:
            datasets.append(None)
            continue
        assert require_share(source, split, name) == documents
        datasets.append(GPTDataset(source, documents, size, sequence_length, seed, vocab_size, boundaries))
    return tuple(datasets)
