"""Which tokens make sample i: the split of a corpus, its epochs, and the order of documents and samples.

The draws follow the order that Megatron users' data already has, so that a run moved here sees the same samples.
Everything depends on the lengths, the number of samples asked for, the sample length and the seed, on nothing else.
"""

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pentatron.checksums import crc32
from pentatron.errors import UserError
from pentatron.files import replaced, shared_suffix
from pentatron.settings.training import DataConfig
from pentatron.text import in_gib, parse_json

# What the end of a document means inside a sample: three wishes, each by itself.


Sample = dict[str, npt.NDArray[Any]]

# In a sample, beside what becomes tensors: where its documents begin, 0 first. A token then sees its own document alone.
DOCUMENT_STARTS = "document_starts"


@dataclass(frozen=True)
class Boundaries:
    """The token `eod` ends a document and belongs to it."""

    eod: int
    reset_positions: bool = False
    reset_attention: bool = False
    mask_loss: bool = False

    def mark(self, sample: Sample) -> Sample:
        """The sample with what was wished: only where the input is the end of a document, never the label."""
        length = len(sample["tokens"])
        ends = np.flatnonzero(sample["tokens"] == self.eod)
        begins = np.zeros(len(ends) + 1, np.int64)
        begins[1:] = ends + 1
        begins = begins[begins < length]
        marked = dict(sample)
        if self.mask_loss:
            marked["loss_mask"] = sample["loss_mask"].copy()
            marked["loss_mask"][ends] = 0
        if self.reset_positions:
            marked["position_ids"] = positions_in_documents(begins, length)
        if self.reset_attention:
            marked[DOCUMENT_STARTS] = begins
        return marked


def boundaries_of(data: DataConfig, eod: Callable[[], int]) -> Boundaries | None:
    """What the settings wish for; the end of a document is asked for only if they do."""
    wishes = (data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
    return Boundaries(eod(), *wishes) if any(wishes) else None


def positions_in_documents(begins: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    """Positions that count from 0 in every document."""
    positions = np.ones(length, np.int64)
    positions[0] = 0
    # Each document begins one position further than the one before had come, back at 0.
    positions[begins[1:]] = 1 - np.diff(begins)
    return np.cumsum(positions)


# Orders of samples kept as files: built once on a machine, mapped by all its processes, good without a shared
# file system.
#
# A file is named after a hash of everything that determines it, so a changed corpus, seed or number finds
# another file. It appears whole or not at all, carries a checksum, and is never needed: whoever cannot read
# or write it builds the same arrays in memory.
#
#     magic (8 bytes) · length of the header (uint32) and its crc32 · header (JSON: arrays, bytes, crc32) · arrays, each at a multiple of 64


Arrays = dict[str, npt.NDArray[Any]]

MAGIC = b"PTORDER1"
ENDING = ".order"
_OF_HEADER = struct.Struct("<II")
_ALIGNMENT = 64


class DamagedIndex(Exception):
    """What is wrong with a file, as the end of a sentence."""


@dataclass(frozen=True)
class IndexCache:
    """A folder for orders, or none. `builds`: this process writes what is missing; the others read it afterwards.

    Orders of less than `least_entries` are built faster than they are found, so no file is made of them.
    """

    folder: Path | None = None
    builds: bool = True
    least_entries: int = 0
    say: Callable[[str], None] = lambda text: None

    def get(self, key: Mapping[str, Any], entries: int, build: Callable[[], Arrays]) -> Arrays:
        """The arrays that `key` determines, from the file or from `build`."""
        if self.folder is None or entries < self.least_entries:
            return build()
        path = self.folder / f"{digest(key)}{ENDING}"
        try:
            return read_arrays(path, verify=self.builds)
        except FileNotFoundError:
            pass
        except (DamagedIndex, OSError) as problem:
            if self.builds:
                self.say(f"the order of samples in {path} cannot be used ({problem}); it is built again")
        arrays = build()
        if self.builds:
            try:
                write_arrays(path, arrays)
            except OSError as problem:
                self.say(f"{self.folder} cannot be written ({problem.strerror}); orders are kept in memory")
        return arrays


def digest(key: Mapping[str, Any]) -> str:
    text = json.dumps({"version": MAGIC.decode(), **key}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def digest_of(array: npt.NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def write_arrays(path: Path, arrays: Arrays) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    offset, checksum, described = 0, 0, {}
    for name, array in arrays.items():
        padding = -offset % _ALIGNMENT
        offset += padding
        checksum = _crc32_of(array, crc32(bytes(padding), checksum))
        described[name] = {"type": array.dtype.str, "shape": array.shape, "at": offset}
        offset += array.nbytes
    header = json.dumps({"arrays": described, "bytes": offset, "crc32": checksum}).encode()
    header += b" " * (-(len(MAGIC) + _OF_HEADER.size + len(header)) % _ALIGNMENT)
    # Machines that share the folder may write the same file at the same time: the name must be nobody else's.
    with replaced(path, shared_suffix()) as file:
        file.write(MAGIC + _OF_HEADER.pack(len(header), crc32(header)) + header)
        written = 0
        for array in arrays.values():
            padding = -written % _ALIGNMENT
            file.write(bytes(padding))
            file.write(np.ascontiguousarray(array).data)
            written += padding + array.nbytes


def read_arrays(path: Path, verify: bool) -> Arrays:
    """Maps the arrays; with `verify` every byte is compared with the checksum first."""
    size = path.stat().st_size
    before = len(MAGIC) + _OF_HEADER.size
    with path.open("rb") as file:
        start = file.read(before)
        if len(start) < before or not start.startswith(MAGIC):
            raise DamagedIndex("it does not begin as such a file does")
        length, of_header = _OF_HEADER.unpack(start[len(MAGIC) :])
        header = file.read(min(length, size))
    if len(header) != length or crc32(header) != of_header:
        raise DamagedIndex("its header is damaged")
    try:
        said = parse_json(header)
        arrays, total, checksum = said["arrays"], int(said["bytes"]), said["crc32"]
        places = {name: _place(array) for name, array in arrays.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedIndex(f"its header is damaged: {type(error).__name__}: {error}") from None
    begin = before + length
    if size != begin + total:
        raise DamagedIndex(f"it has {size} bytes where {begin + total} are expected")
    content = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)[begin:]
    if verify and _crc32_of(content, 0) != checksum:
        raise DamagedIndex("its checksum is wrong")
    if any(at + math.prod(shape) * kind.itemsize > total for shape, kind, at in places.values()):
        raise DamagedIndex("an array would reach beyond its end")
    return {name: np.ndarray(shape, kind, content, at) for name, (shape, kind, at) in places.items()}


def _place(array: Mapping[str, Any]) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Shape, type and offset that a header says; numbers alone, never objects, which would be addresses."""
    shape, kind, at = tuple(array["shape"]), np.dtype(array["type"]), array["at"]
    if kind.kind not in "iufb" or not all(type(n) is int and n >= 0 for n in (*shape, at)):
        raise ValueError(f"{array} is no array of numbers")
    return shape, kind, at


def _crc32_of(array: npt.NDArray[Any], before: int) -> int:
    return crc32(np.ascontiguousarray(array).data, before)


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
