"""How many samples one pass over prepared files has, by their indices alone."""

from collections.abc import Sequence

from pentatron.data.gpt_dataset import documents_of, require_documents, require_text
from pentatron.data.indexed import IndexedDataset
from pentatron.data.sampling import epoch_samples


def samples_of_files(prefixes: Sequence[str], split: str | None, seq_length: int) -> int:
    """Counted as the datasets count: whole sequences of each file, its training share alone where files are split."""
    total = 0
    for prefix in prefixes:
        # The run compares the index with its checksums itself.
        source = IndexedDataset(prefix, with_sidecar=False)
        if split is None:
            require_text(source)
            documents = range(len(source))
        else:
            documents = documents_of(source, split)[0] or range(0)
            require_documents(source, documents, split, "train")
        total += epoch_samples(source.sequence_lengths, documents, seq_length)
    return total
