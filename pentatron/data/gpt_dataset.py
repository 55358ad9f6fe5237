"""GPT datasets for next-token prediction: prepared, synthetic and mock data."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import InitVar, dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pentatron.data import sample_index
from pentatron.data.indexed import IndexedDataset
from pentatron.data.sample_index import NO_CACHE, Boundaries, IndexCache, Sample, SampleIndex
from pentatron.errors import UserError
from pentatron.text import format_count


class TokenSource(Protocol):
    """A collection of token sequences: an indexed dataset on disk, or mock data."""

    @property
    def sequence_lengths(self) -> npt.NDArray[np.int32]: ...

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]: ...


def next_token_sample(tokens: npt.NDArray[Any], boundaries: Boundaries | None = None) -> Sample:
    """Splits L + 1 tokens into inputs and labels; all labels count unless `boundaries` mask some."""
    ids, length = tokens.astype(np.int64), len(tokens) - 1
    sample: Sample = {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": np.ones(length, np.float32)}
    sample["position_ids"] = np.arange(length, dtype=np.int64)
    return sample if boundaries is None else boundaries.mark(sample)


@dataclass(eq=False)
class GPTDataset:
    """At least `num_samples` shuffled samples of sequences in `source`, or one epoch.

    The order depends on the number of samples it is built for. If a number in `later` exceeds it, further
    epochs are appended as separately shuffled parts, so that earlier samples keep their positions. With a
    `vocab_size`, reading a token outside it raises a UserError with its position instead of an illegal
    memory access in the embedding. `boundaries` define the treatment of document ends.
    """

    source: TokenSource
    documents: range
    num_samples: int | None
    sequence_length: int
    seed: int
    vocab_size: int | None = None
    boundaries: Boundaries | None = None
    later: Sequence[int] = ()
    cache: InitVar[IndexCache] = NO_CACHE

    def __post_init__(self, cache: IndexCache) -> None:
        self.parts = [self._build(self.num_samples, self.seed, cache)]
        self.ends = [len(self.parts[0])]
        for number in self.later:
            if number > len(self):
                # Each part has its own random stream, different from that of any other integer seed.
                self.parts.append(self._build(number - len(self), [self.seed, len(self.parts)], cache))
                self.ends.append(self.ends[-1] + len(self.parts[-1]))

    def _build(self, num_samples: int | None, seed: int | Sequence[int], cache: IndexCache) -> SampleIndex:
        lengths, documents, length = self.source.sequence_lengths, self.documents, self.sequence_length

        def build() -> SampleIndex:
            return sample_index.build_sample_index(lengths, documents, num_samples, length, seed)

        if cache.folder is None:
            return build()
        digest = sample_index.array_digest(lengths[documents.start : documents.stop])
        key: dict[str, Any] = {"lengths": digest, "documents": [documents.start, documents.stop]}
        key |= {"samples": num_samples, "sequence_length": length, "seed": seed}
        entries = len(documents) + (num_samples or 0)
        return SampleIndex.from_arrays(cache.get(key, entries, lambda: build().arrays()))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a dataset of {len(self)} samples")
        part = bisect_right(self.ends, i)
        index = self.parts[part]
        within = i - (self.ends[part] - len(index))
        return next_token_sample(self._tokens(index, int(index.shuffle[within])), self.boundaries)

    def _tokens(self, index: SampleIndex, k: int) -> npt.NDArray[np.int64]:
        """Returns the L + 1 tokens of the k-th sample in document order, which may span several documents."""
        (position, offset), (last_position, last_offset) = index.starts[k : k + 2].tolist()
        tokens = np.empty(self.sequence_length + 1, dtype=np.int64)
        filled = 0
        while position <= last_position:
            document = int(index.documents[position])
            length = last_offset + 1 - offset if position == last_position else None
            part = self.source.get(document, offset, length)
            self._check_vocabulary(part, document, offset)
            tokens[filled : filled + len(part)] = part
            filled += len(part)
            position, offset = position + 1, 0
        assert filled == len(tokens), "the sample index and the source disagree"
        return tokens

    def _check_vocabulary(self, part: npt.NDArray[Any], document: int, offset: int) -> None:
        if self.vocab_size is not None and len(part) and (part.min() < 0 or part.max() >= self.vocab_size):
            at = int(np.argmax((part < 0) | (part >= self.vocab_size)))
            raise UserError(
                f"token {part[at]} at place {offset + at} of sequence {document} is outside the vocabulary of "
                f"{self.vocab_size}: the data is damaged or was prepared with another tokenizer"
            )


def split_documents(source: "IndexedDataset | CountingSequences", split: str) -> tuple[range | None, ...]:
    """Returns the ranges of sequences for train, valid and test; None for a share of zero."""
    return sample_index.split_ranges(sample_index.parse_split(split), len(source))


def require_share(source: IndexedDataset, split: str | None, name: str) -> range:
    """Returns the sequences of a share, or all without a split; raises UserError if there are none."""
    share = sample_index.SPLIT_NAMES.index(name)
    if documents := range(len(source)) if split is None else split_documents(source, split)[share]:
        return documents
    if not len(source):
        raise UserError(f"{source.prefix} has no tokens; prepare it again from files with text")
    advice = "give it a larger share, or 0 to leave it empty" if share else "give it a larger share"
    if len(source) == 1:
        # A text file is one document unless it is prepared as several, and one document cannot be split.
        several = "prepare it as several documents (of a .txt: --text-documents blank-line or line)"
        advice = f"train on all of it with --split 1,0,0, or {several}"
    raise UserError(
        f"--split {split} leaves no document of {source.prefix} ({format_count(len(source), 'sequence')}) to the {name} "
        f"set; {advice}"
    )


ALPHABET = 64
NOISE = 0.1
# First entry of the seed arrays, so that the cycle and the samples use independent random streams.
_CYCLE_STREAM, _SAMPLE_STREAM = 0, 1

MOCK_LENGTH_LIMIT = 4096
MOCK_SEED = 0


class SyntheticDataset:
    """Random walks on a cycle of tokens, which a model learns within a few dozen steps.

    A small alphabet is spread evenly over the vocabulary, so that every shard of a vocabulary-parallel
    embedding has some of it, and permuted into a cycle by the seed. A walk moves to the next token of the
    cycle, or, with probability NOISE, jumps to any token of the alphabet. The loss starts near
    log(vocab_size), falls fast to log(alphabet) once the model has learned the unused ids, then towards
    the entropy of the next token given the last once it has learned the successors.
    """

    def __init__(self, size: int, vocab_size: int, sequence_length: int, seed: int, first: int = 0) -> None:
        """Creates samples `first`, `first` + 1, ... of the sequence defined by the seed."""
        if min(size, vocab_size, sequence_length) < 1:
            raise UserError(
                f"synthetic data needs positive sizes, found {size} samples, vocabulary {vocab_size}, "
                f"sequence length {sequence_length}"
            )
        self.size, self.sequence_length, self.seed, self.first = size, sequence_length, seed, first
        alphabet = min(ALPHABET, vocab_size)
        tokens = np.arange(alphabet, dtype=np.int64) * vocab_size // alphabet
        self._random = np.random.RandomState([_CYCLE_STREAM, seed])
        self.cycle = self._random.permutation(tokens)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < self.size:
            raise IndexError(f"sample {i} of a dataset of {self.size} samples")
        # Reseeding resets the state completely, and is ten times faster than a new generator.
        random = self._random
        random.seed([_SAMPLE_STREAM, self.seed, self.first + i])
        steps = np.arange(self.sequence_length + 1)
        jumps = random.random_sample(len(steps)) < NOISE
        jumps[0] = True
        targets = random.randint(len(self.cycle), size=len(steps))
        # Between jumps the walk advances by one: its position is the last target plus the steps since then.
        last_jump = np.maximum.accumulate(np.where(jumps, steps, 0))
        return next_token_sample(self.cycle[(targets[last_jump] + steps - last_jump) % len(self.cycle)])


@dataclass(frozen=True, eq=False)
class CountingSequences:
    """Mock sequences 1, 2, 3 … (modulo the vocabulary size) that end with the end-of-document token."""

    sequence_lengths: npt.NDArray[np.int32]
    vocab_size: int
    eod: int

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> npt.NDArray[np.int64]:
        available = int(self.sequence_lengths[index])
        stop = available if length is None else offset + length
        if not 0 <= offset <= stop <= available:
            raise IndexError(f"sequence {index} has {available} tokens, asked for [{offset}, {stop})")
        tokens = np.arange(offset + 1, stop + 1, dtype=np.int64) % self.vocab_size
        if stop == available and len(tokens):
            tokens[-1] = self.eod
        return tokens


def mock_sequences(vocab_size: int, eod: int | None = None, sequences: int = 100_000) -> CountingSequences:
    """Returns the data of `--mock-data`; the end-of-document token defaults to the last id."""
    lengths = np.random.default_rng(MOCK_SEED).integers(1, MOCK_LENGTH_LIMIT, size=sequences, dtype=np.int32)
    return CountingSequences(lengths, vocab_size, vocab_size - 1 if eod is None else eod)


def count_epoch_samples(prefixes: Sequence[str], split: str | None, seq_length: int) -> int:
    """Counts the samples of one epoch over the training share of files, reading only indices."""
    # Without checksums: the run verifies the index when it opens the data.
    sources = (IndexedDataset(prefix, with_sidecar=False) for prefix in prefixes)
    shares = ((source.sequence_lengths, require_share(source, split, "train")) for source in sources)
    return sum(sample_index.epoch_samples(*share, seq_length) for share in shares)
