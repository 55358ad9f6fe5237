"""Maps sample indices to tokens: splits, epochs, shuffling of documents and samples, and the index cache.

The random draws are those of Megatron-LM, so that a run moved from there sees the same samples. The
result depends only on the sequence lengths, the number of samples, the sample length and the seed.
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
from pentatron.files import atomic_write, shared_suffix
from pentatron.settings.training import DataConfig
from pentatron.text import in_gib, parse_json

Sample = dict[str, npt.NDArray[Any]]

# Key of a sample for the positions at which its documents begin, 0 first; attention is then restricted to
# documents.
DOCUMENT_STARTS = "document_starts"


Arrays = dict[str, npt.NDArray[Any]]

# Format of a cache file: magic (8 bytes) · header length and CRC-32 (uint32 each) · JSON header (arrays,
# bytes, crc32) · arrays, each at a multiple of 64 bytes.
MAGIC = b"PTORDER1"
ENDING = ".order"
_HEADER = struct.Struct("<II")
_ALIGNMENT = 64

IntArray = npt.NDArray[np.integer]
Seed = int | Sequence[int]

SPLIT_NAMES = ("train", "valid", "test")
# A last epoch of which less than this share is needed is shuffled separately, so that its documents do
# not repeat early in the run.
FINAL_EPOCH_SHARE = 0.80
# Least memory while an order is built: start and position of each sample, start of each document in each
# epoch.
_BYTES_OF_A_SAMPLE, _BYTES_OF_A_DOCUMENT = 20, 16


@dataclass(frozen=True)
class Boundaries:
    """The treatment of document boundaries inside samples; `eod` belongs to its document."""

    eod: int
    reset_positions: bool = False
    reset_attention: bool = False
    mask_loss: bool = False

    def mark(self, sample: Sample) -> Sample:
        """Applies the settings at the end-of-document tokens among the inputs."""
        length = len(sample["tokens"])
        ends = np.flatnonzero(sample["tokens"] == self.eod)
        begins = np.append(0, ends + 1)
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
    """Returns the configured treatment of boundaries, or None; calls `eod` only if a setting needs it."""
    flags = (data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
    return Boundaries(eod(), *flags) if any(flags) else None


def positions_in_documents(begins: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    """Returns position ids that restart from 0 in every document."""
    positions = np.ones(length, np.int64)
    positions[0] = 0
    # The differences of the position ids: at each document start, the step back from the last position to 0.
    positions[begins[1:]] = 1 - np.diff(begins)
    return np.cumsum(positions)


class DamagedIndexCache(Exception):
    """Raised for a damaged cache file; the message is the reason."""


@dataclass(frozen=True)
class IndexCache:
    """Caches sample orders in memory-mapped files, which all processes of a node share.

    A file is named after a hash of everything that determines its content, so a changed corpus, seed or
    size uses another file. Files are written atomically and carry a checksum. If a file cannot be read or
    written, the arrays are built in memory. Only processes with `builds` write files. Orders of fewer
    than `least_entries` entries are not cached.
    """

    folder: Path | None = None
    builds: bool = True
    least_entries: int = 0
    say: Callable[[str], None] = lambda text: None

    def get(self, key: Mapping[str, Any], entries: int, build: Callable[[], Arrays]) -> Arrays:
        """Returns the arrays determined by `key`, from the cache file or from `build`."""
        if self.folder is None or entries < self.least_entries:
            return build()
        text = json.dumps({"version": MAGIC.decode(), **key}, sort_keys=True)
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}{ENDING}"
        try:
            return read_arrays(path, verify=self.builds)
        except (DamagedIndexCache, OSError) as problem:
            if self.builds and not isinstance(problem, FileNotFoundError):
                self.say(f"the order of samples in {path} cannot be used ({problem}); it is rebuilt")
        arrays = build()
        if self.builds:
            try:
                write_arrays(path, arrays)
            except OSError as problem:
                self.say(f"{self.folder} cannot be written ({problem.strerror}); orders are kept in memory")
        return arrays


NO_CACHE = IndexCache()


def array_digest(array: npt.NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def write_arrays(path: Path, arrays: Arrays) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    offset, checksum, described = 0, 0, {}
    pieces: list[bytes | memoryview] = []
    for name, array in arrays.items():
        padding, content = bytes(-offset % _ALIGNMENT), np.ascontiguousarray(array).data
        pieces += [padding, content]
        checksum = crc32(content, crc32(padding, checksum))
        described[name] = {"type": array.dtype.str, "shape": array.shape, "at": offset + len(padding)}
        offset += len(padding) + array.nbytes
    header = json.dumps({"arrays": described, "bytes": offset, "crc32": checksum}).encode()
    header += b" " * (-(len(MAGIC) + _HEADER.size + len(header)) % _ALIGNMENT)
    # Nodes that share the folder may write the same file at the same time, so the temporary name must be
    # unique.
    with atomic_write(path, shared_suffix()) as file:
        file.write(MAGIC + _HEADER.pack(len(header), crc32(header)) + header)
        for piece in pieces:
            file.write(piece)


def read_arrays(path: Path, verify: bool) -> Arrays:
    """Memory-maps the arrays of a cache file; `verify` checks the checksum first."""
    size = path.stat().st_size
    header_start = len(MAGIC) + _HEADER.size
    with path.open("rb") as file:
        start = file.read(header_start)
        if len(start) < header_start or not start.startswith(MAGIC):
            raise DamagedIndexCache("its magic number is wrong")
        length, header_crc32 = _HEADER.unpack(start[len(MAGIC) :])
        header = file.read(min(length, size))
    if len(header) != length or crc32(header) != header_crc32:
        raise DamagedIndexCache("its header is damaged")
    try:
        content = parse_json(header)
        total, checksum = int(content["bytes"]), content["crc32"]
        layouts = {name: _array_layout(array) for name, array in content["arrays"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedIndexCache(f"its header is damaged: {type(error).__name__}: {error}") from None
    begin = header_start + length
    if size != begin + total:
        raise DamagedIndexCache(f"it has {size} bytes where {begin + total} are expected")
    data = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)[begin:]
    if verify and crc32(data.data) != checksum:
        raise DamagedIndexCache("its checksum is wrong")
    if any(at + math.prod(shape) * kind.itemsize > total for shape, kind, at in layouts.values()):
        raise DamagedIndexCache("an array would reach beyond its end")
    return {name: np.ndarray(shape, kind, data, at) for name, (shape, kind, at) in layouts.items()}


def _array_layout(array: Mapping[str, Any]) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Returns shape, type and offset of an array; numeric types only, as objects would be pointers."""
    shape, kind, at = tuple(array["shape"]), np.dtype(array["type"]), array["at"]
    if kind.kind not in "iufb" or not all(type(n) is int and n >= 0 for n in (*shape, at)):
        raise ValueError(f"{array} is not an array of numbers")
    return shape, kind, at


def parse_split(text: str) -> tuple[float, float, float]:
    """Parses shares such as "949,50,1", normalised to a sum of 1; missing ones are 0."""
    try:
        shares = [float(number) for number in re.findall(r"[.0-9]+", text)]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= len(SPLIT_NAMES) or sum(shares) == 0:
        raise UserError(f"cannot read the split '{text}'; give up to three numbers, such as --split 949,50,1")
    train, valid, test = (share / sum(shares) for share in [*shares, 0.0, 0.0][:3])
    return train, valid, test


def split_ranges(shares: Sequence[float], sequences: int) -> tuple[range | None, ...]:
    """Returns the contiguous range of sequences of each split; None for a share of zero."""
    # round() rounds half to even, as in Megatron-LM, which determines the boundaries.
    return tuple(
        range(round(low * sequences), round(high * sequences)) if high > low else None
        for low, high in pairwise(accumulate(shares, initial=0.0))
    )


@dataclass(frozen=True, eq=False)
class SampleIndex:
    """The order of samples: sample i is number `shuffle[i]` of the documents in their order.

    Row k of `starts` is the start of sample k: a position in `documents` and a token offset in that
    document. Row k + 1 is the last token that sample k needs (its last label), and the first token of
    sample k + 1.
    """

    epochs: int
    separate_final_epoch: bool
    documents: IntArray
    starts: IntArray
    shuffle: IntArray

    def __len__(self) -> int:
        return len(self.shuffle)

    def arrays(self) -> dict[str, IntArray]:
        """Returns the index as arrays for the index cache."""
        scalars = np.array([self.epochs, self.separate_final_epoch], dtype=np.int64)
        return {"facts": scalars, "documents": self.documents, "starts": self.starts, "shuffle": self.shuffle}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, IntArray]) -> "SampleIndex":
        epochs, separate = arrays["facts"].tolist()
        return cls(epochs, bool(separate), arrays["documents"], arrays["starts"], arrays["shuffle"])


def build_sample_index(
    lengths: IntArray, documents: range, num_samples: int | None, sequence_length: int, seed: Seed
) -> SampleIndex:
    """Cuts `documents` into at least `num_samples` samples, or one epoch if it is None."""
    if sequence_length < 1 or (num_samples is not None and num_samples < 1):
        raise UserError(
            f"samples need a positive length and number, found length {sequence_length}, number {num_samples}"
        )
    tokens = _count_tokens(lengths, documents, 1 if num_samples is not None else sequence_length + 1)
    wanted = 0 if num_samples is None else num_samples * sequence_length + 1
    epochs = max(1, -(-wanted // tokens))
    # The last sample needs one token more, its last label.
    total = (epochs * tokens - 1) // sequence_length
    before_final = ((epochs - 1) * tokens - 1) // sequence_length if epochs > 1 else total
    require_memory(total, _BYTES_OF_A_SAMPLE * total + _BYTES_OF_A_DOCUMENT * epochs * len(documents))
    separate = False
    if num_samples is not None and epochs > 1:
        from_final, per_epoch = num_samples - before_final, (tokens - 1) // sequence_length
        assert 0 <= from_final <= per_epoch + 1, "the last epoch must be needed, and enough"
        separate = from_final < int(FINAL_EPOCH_SHARE * per_epoch)

    # RandomState, not Generator: its stream is stable. One state draws both orders, documents first, as
    # in Megatron-LM.
    random = np.random.RandomState(seed)
    once = np.arange(documents.start, documents.stop, dtype=_small_type(documents.stop))
    parts = [np.tile(once, epochs - 1), once] if separate else [np.tile(once, epochs)]
    for part in parts:
        random.shuffle(part)
    order = np.concatenate(parts)
    starts = _sample_starts(lengths[order], total, sequence_length)
    shuffle: IntArray = np.arange(total, dtype=np.uint32 if total < 2**32 else np.int64)
    first_part = before_final if separate else total
    # Slices are views, so each part is shuffled in place.
    random.shuffle(shuffle[:first_part])
    random.shuffle(shuffle[first_part:])
    return SampleIndex(epochs, separate, order, starts, shuffle)


def require_memory(samples: int, needed: int) -> None:
    """Raises UserError if an order of samples needs more memory than the machine has."""
    if needed > (most := machine_memory()):
        raise UserError(
            f"the order of {samples} samples needs {in_gib(needed, '.0f')} GiB of memory, and this machine has {in_gib(most, '.0f')} GiB; ask "
            f"for fewer steps or epochs (data show: a smaller --index), or load only the weights of the checkpoint with --finetune if it was made with fewer"
        )


def machine_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def epoch_samples(lengths: IntArray, documents: range, sequence_length: int) -> int:
    """Returns the number of samples of one epoch of the documents."""
    return (_count_tokens(lengths, documents, sequence_length + 1) - 1) // sequence_length


def _count_tokens(lengths: IntArray, documents: range, least: int) -> int:
    """Returns the number of tokens of the documents; raises UserError if there are fewer than `least`."""
    tokens = int(lengths[documents.start : documents.stop].sum(dtype=np.int64))
    if tokens < least:
        raise UserError(
            f"sequences {documents.start} to {documents.stop} hold {tokens} tokens where {least} are needed; "
            "use more data or another --split"
        )
    return tokens


def _sample_starts(lengths: IntArray, samples: int, sequence_length: int) -> IntArray:
    """Returns rows (position, offset) of the tokens 0, L, 2L … of the concatenated documents."""
    begins = np.cumsum(lengths, dtype=np.int64)
    # Number of samples that start before the end of each document. The position of sample k is the number
    # of documents with at most k such samples, which end at or before its start. This skips empty
    # documents.
    samples_before_end = (begins + (sequence_length - 1)) // sequence_length
    positions = np.cumsum(np.bincount(samples_before_end, minlength=samples + 1)[: samples + 1])
    begins -= lengths
    offsets = np.arange(samples + 1, dtype=np.int64)
    offsets *= sequence_length
    offsets -= begins[positions]
    starts = np.empty((samples + 1, 2), dtype=_small_type(max(len(lengths), int(lengths.max()))))
    starts[:, 0], starts[:, 1] = positions, offsets
    return starts


def _small_type(largest: int) -> type[np.integer]:
    """Returns int32 if it suffices, for half the memory and time."""
    return np.int32 if largest < 2**31 else np.int64
