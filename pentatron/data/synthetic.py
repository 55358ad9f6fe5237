"""Data made up on the spot: a corpus that a model can learn, and the counting sequences of mock runs."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pentatron.data.boundaries import Sample
from pentatron.data.gpt_dataset import next_token_sample
from pentatron.errors import UserError

ALPHABET = 64
NOISE = 0.1
# First words of the seeds, so that the cycle and the samples draw from unrelated streams.
_CYCLE_STREAM, _SAMPLE_STREAM = 0, 1

MOCK_SEQUENCES = 100_000
MOCK_LENGTH_LIMIT = 4096
MOCK_SEED = 0


class SyntheticDataset:
    """Noisy walks around a cycle: each token has one likely successor, so a few dozen steps show learning.

    A small alphabet is spread evenly over the vocabulary (every shard of a split embedding holds some of it) and
    put on a cycle drawn from the seed. A walk goes on to the next token of the cycle, or, with probability
    `noise`, jumps to any token of the alphabet. The loss starts near log(vocab_size), falls fast to
    log(alphabet) once the unused ids are known, then towards `best_loss` once the successors are.
    """

    def __init__(self, size: int, vocab_size: int, sequence_length: int, seed: int, first: int = 0) -> None:
        """Samples `first`, `first` + 1, ... of the walks the seed describes."""
        if min(size, vocab_size, sequence_length) < 1:
            raise UserError(
                f"synthetic data needs positive sizes, found {size} samples, vocabulary {vocab_size}, "
                f"sequence length {sequence_length}"
            )
        self.size = size
        self.sequence_length = sequence_length
        self.seed = seed
        self.first = first
        alphabet = min(ALPHABET, vocab_size)
        tokens = np.arange(alphabet, dtype=np.int64) * vocab_size // alphabet
        self._random = np.random.RandomState([_CYCLE_STREAM, seed])
        self.cycle = self._random.permutation(tokens)

    @property
    def best_loss(self) -> float:
        """The entropy of the next token given the last: no model does better on average."""
        jump = NOISE / len(self.cycle)
        follow = 1 - NOISE + jump
        others = (len(self.cycle) - 1) * jump
        return float(-follow * np.log(follow) - others * np.log(jump))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < self.size:
            raise IndexError(f"sample {i} of a dataset of {self.size} samples")
        # Seeding anew forgets everything before, and costs a tenth of making another generator.
        random = self._random
        random.seed([_SAMPLE_STREAM, self.seed, self.first + i])
        steps = np.arange(self.sequence_length + 1)
        jumps = random.random_sample(len(steps)) < NOISE
        jumps[0] = True
        targets = random.randint(len(self.cycle), size=len(steps))
        # Between jumps the walk advances by one: its place is the last target plus the steps since then.
        last_jump = np.maximum.accumulate(np.where(jumps, steps, 0))
        return next_token_sample(self.cycle[(targets[last_jump] + steps - last_jump) % len(self.cycle)])


@dataclass(frozen=True, eq=False)
class CountingSequences:
    """Sequences 1, 2, 3 … (modulo the vocabulary) that end with the end-of-document token."""

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


def mock_indexed(
    vocab_size: int, eod: int | None = None, sequences: int = MOCK_SEQUENCES
) -> CountingSequences:
    """The data of `--mock-data`: the same lengths in every run; the last id ends documents unless told otherwise."""
    lengths = np.random.default_rng(MOCK_SEED).integers(1, MOCK_LENGTH_LIMIT, size=sequences, dtype=np.int32)
    return CountingSequences(lengths, vocab_size, vocab_size - 1 if eod is None else eod)
