"""Which tokens make sample i: the split of a corpus, its epochs, and the order of documents and samples.

The draws follow the order that Megatron users' data already has, so that a run moved here sees the same samples.
Everything depends on the lengths, the number of samples asked for, the sample length and the seed, on nothing else.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from pentatron.errors import UserError
from pentatron.text import in_gib

IntArray = npt.NDArray[np.integer]

SPLIT_NAMES = ("train", "valid", "test")
# A last epoch that is needed for less than this share is shuffled on its own, so that the documents it repeats
# do not crowd into the earlier epochs.
FINAL_EPOCH_SHARE = 0.80
# At the least, while an order is built: where a sample begins and its place; and where a document begins in each epoch.
_BYTES_OF_A_SAMPLE, _BYTES_OF_A_DOCUMENT = 20, 16


def parse_split(text: str) -> tuple[float, float, float]:
    """The shares of train, valid and test in a text such as "949,50,1"; missing ones are 0, the sum becomes 1."""
    try:
        shares = [float(number) for number in re.findall(r"[.0-9]+", text)]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= len(SPLIT_NAMES) or sum(shares) == 0:
        raise UserError(
            f"cannot read the split '{text}'; give up to three numbers, for example --split 949,50,1"
        )
    shares += [0.0] * (len(SPLIT_NAMES) - len(shares))
    total = sum(shares)
    return shares[0] / total, shares[1] / total, shares[2] / total


def split_ranges(shares: Sequence[float], sequences: int) -> tuple[range | None, ...]:
    """The contiguous part of the file that each split reads; None where the share is zero."""
    bounds = list(accumulate(shares, initial=0.0))
    # round() goes to the even neighbour at .5: the boundaries of existing corpora depend on it.
    return tuple(
        range(round(low * sequences), round(high * sequences)) if high > low else None
        for low, high in pairwise(bounds)
    )


@dataclass(frozen=True, eq=False)
class SampleIndex:
    """Sample i is sample `shuffle[i]` of the documents read one after the other in the order `documents`.

    Row k of `starts` holds where sample k begins: a position in `documents` and a token offset in that document.
    Row k + 1 is the last token that sample k needs (its last label), and the first token of sample k + 1.
    """

    epochs: int
    separate_final_epoch: bool
    documents: IntArray
    starts: IntArray
    shuffle: IntArray

    def __len__(self) -> int:
        return len(self.shuffle)

    def arrays(self) -> dict[str, npt.NDArray[np.integer]]:
        """All of it, for a file."""
        facts = np.array([self.epochs, self.separate_final_epoch], dtype=np.int64)
        return {"facts": facts, "documents": self.documents, "starts": self.starts, "shuffle": self.shuffle}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[np.integer]]) -> "SampleIndex":
        epochs, separate = arrays["facts"].tolist()
        return cls(epochs, bool(separate), arrays["documents"], arrays["starts"], arrays["shuffle"])


def build_sample_index(
    lengths: npt.NDArray[np.integer],
    documents: range,
    num_samples: int | None,
    sequence_length: int,
    seed: int | Sequence[int],
) -> SampleIndex:
    """Cut `documents` (indices into `lengths`) into at least `num_samples` samples, or one epoch without a number."""
    if sequence_length < 1 or (num_samples is not None and num_samples < 1):
        raise UserError(
            f"samples need a positive length and number, found length {sequence_length}, number {num_samples}"
        )
    tokens = int(lengths[documents.start : documents.stop].sum(dtype=np.int64))
    least = 1 if num_samples is not None else sequence_length + 1
    if tokens < least:
        raise _too_short(documents, tokens, least)
    wanted = 0 if num_samples is None else num_samples * sequence_length + 1
    epochs = max(1, -(-wanted // tokens))
    # One token more than the samples: the last label.
    total = (epochs * tokens - 1) // sequence_length
    before_final = ((epochs - 1) * tokens - 1) // sequence_length if epochs > 1 else total
    require_memory(total, _BYTES_OF_A_SAMPLE * total + _BYTES_OF_A_DOCUMENT * epochs * len(documents))
    separate = num_samples is not None and _is_final_epoch_separate(
        num_samples - before_final, (tokens - 1) // sequence_length, epochs
    )

    # RandomState, not Generator: its stream is frozen, and one state serves both orders, documents first.
    random = np.random.RandomState(seed)
    order = _document_order(documents, epochs, separate, random)
    return SampleIndex(
        epochs=epochs,
        separate_final_epoch=separate,
        documents=order,
        starts=_sample_starts(lengths[order], total, sequence_length),
        shuffle=_sample_order(total, before_final if separate else total, random),
    )


def require_memory(samples: int, needed: int) -> None:
    """Refuses an order of so many samples before it is built, if the machine has less memory than the bytes that it needs."""
    if needed > (most := machine_memory()):
        raise UserError(
            f"the order of {samples} samples needs {in_gib(needed, '.0f')} GiB of memory, and this machine has {in_gib(most, '.0f')} GiB; ask "
            f"for fewer steps or epochs (data show: a smaller --index), or take the weights of the checkpoint alone with --finetune if it was made with fewer"
        )


def machine_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def epoch_samples(lengths: npt.NDArray[np.integer], documents: range, sequence_length: int) -> int:
    """How many samples one epoch of these documents has."""
    tokens = int(lengths[documents.start : documents.stop].sum(dtype=np.int64))
    if tokens <= sequence_length:
        raise _too_short(documents, tokens, sequence_length + 1)
    return (tokens - 1) // sequence_length


def _too_short(documents: range, tokens: int, least: int) -> UserError:
    return UserError(
        f"sequences {documents.start} to {documents.stop} hold {tokens} tokens where {least} are needed; "
        "use more data or another --split"
    )


def _is_final_epoch_separate(from_final: int, per_epoch: int, epochs: int) -> bool:
    if epochs == 1:
        return False
    assert 0 <= from_final <= per_epoch + 1, "the last epoch must be needed, and enough"
    return from_final < int(FINAL_EPOCH_SHARE * per_epoch)


def _document_order(documents: range, epochs: int, separate: bool, random: np.random.RandomState) -> IntArray:
    once = np.arange(documents.start, documents.stop, dtype=_small_type(documents.stop))
    parts = [np.tile(once, epochs - 1), once] if separate else [np.tile(once, epochs)]
    for part in parts:
        random.shuffle(part)
    return np.concatenate(parts)


def _sample_starts(lengths: npt.NDArray[np.integer], samples: int, sequence_length: int) -> IntArray:
    """Rows (position, offset) of the tokens 0, L, 2L … in documents of these lengths laid end to end."""
    begins = np.cumsum(lengths, dtype=np.int64)
    # How many samples start before each document ends; so many documents end at or before the start of sample k as
    # have a number of k at most, and that many positions lie before its own. Empty documents are never chosen.
    before = (begins + (sequence_length - 1)) // sequence_length
    positions = np.cumsum(np.bincount(before, minlength=samples + 1)[: samples + 1])
    begins -= lengths
    offsets = np.arange(samples + 1, dtype=np.int64)
    offsets *= sequence_length
    offsets -= begins[positions]
    starts = np.empty((samples + 1, 2), dtype=_small_type(max(len(lengths), int(lengths.max()))))
    starts[:, 0], starts[:, 1] = positions, offsets
    return starts


def _sample_order(total: int, first_part: int, random: np.random.RandomState) -> IntArray:
    small = total < 2**32
    order: IntArray = np.arange(total, dtype=np.uint32) if small else np.arange(total, dtype=np.int64)
    # Slices are views: each part is shuffled where it lies.
    random.shuffle(order[:first_part])
    random.shuffle(order[first_part:])
    return order


def _small_type(largest: int) -> type[np.integer]:
    """Half the memory and the time where it suffices."""
    return np.int32 if largest < 2**31 else np.int64
