"""Samples for supervised fine-tuning: one conversation padded to the length of a sequence, or as many as fit.

Conversations are tokenized once into a `.bin/.idx` pair. A document of it is a conversation; its sequences come in twos: the tokens of
a sample, and for each of them 1 if the model is to say it, else 0.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pentatron.data.boundaries import DOCUMENT_STARTS, Sample, positions_in_documents
from pentatron.data.conversations import MarkedText, Tokens, Writer, at_line, read_conversations
from pentatron.data.indexed import IndexedDataset, token_dtype
from pentatron.data.pair_writer import IndexedDatasetWriter
from pentatron.data.tokenizer import identify
from pentatron.errors import UserError

T = TypeVar("T")
IntArray = npt.NDArray[np.int64]
# Conversations that a tokenizer gets at once.
TOGETHER = 256
# Any id will do: no loss is taken from padding, and nothing sees it.
PADDING = 0


def write_conversations(
    path: Path, prefix: Path, writer: Writer, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Tokenizes a file of conversations into a pair; `progress` gets the bytes read and those of the file."""
    size = path.stat().st_size if path.is_file() else 0
    tokenizer, documents = writer.tokenizer, 0
    with IndexedDatasetWriter(prefix, token_dtype(tokenizer.vocab_size), identify(tokenizer)) as pair:
        for lines in _batched(read_conversations(path), TOGETHER):
            texts: list[MarkedText] = []
            owners: list[int] = []
            for number, conversation, _ in lines:
                with at_line(path, number):
                    found = writer.texts(conversation)
                texts += found
                owners += [number] * len(found)
            with_owners = zip(owners, _tokens(path, writer, owners, texts))
            for _, samples in groupby(with_owners, lambda entry: entry[0]):
                parts = [part for _, sample in samples for part in (sample.ids, sample.learned)]
                whole = np.concatenate([np.asarray(part, np.int64) for part in parts])
                pair.add_document(whole, [len(part) for part in parts])
            documents += len(lines)
            progress(lines[-1][2], size)
        if documents == 0:
            raise UserError(f"{path} holds no conversation; it is empty")


def _tokens(path: Path, writer: Writer, lines: Sequence[int], texts: Sequence[MarkedText]) -> list[Tokens]:
    try:
        samples = writer.tokens(texts)
    except UserError:
        # One of them; one by one, to find it.
        samples = []
        for number, text in zip(lines, texts):
            with at_line(path, number):
                try:
                    samples += writer.tokens([text])
                except UserError as error:
                    raise UserError(f"cannot be tokenized: {error}") from None
    for number, sample in zip(lines, samples):
        if not sample.learned[1:].any():
            with at_line(path, number):
                raise UserError("has no answer to learn from")
    return samples


def _batched(lines: Iterator[T], size: int) -> Iterator[list[T]]:
    while batch := list(islice(lines, size)):
        yield batch


@dataclass(frozen=True)
class Shortened:
    """What did not fit into a sequence."""

    samples: int
    # Those of them that lost all there was to learn, and are left out.
    without_answer: int
    longest: int


class SFTDataset:
    """The conversations `documents` of a pair, one to a row or packed; every row is `sequence_length` long.

    What is too long loses its end. Packed conversations see each themselves alone, and positions count from 0 in each, so that a
    conversation has the same loss wherever it lies.
    """

    def __init__(self, source: IndexedDataset, documents: range, sequence_length: int, packed: bool) -> None:
        self.source, self.sequence_length, self.packed = source, sequence_length, packed
        bounds = source.document_indices
        samples = np.arange(bounds[documents.start], bounds[documents.stop], 2, dtype=np.int64)
        # The last token is a label only.
        lengths = source.sequence_lengths[samples].astype(np.int64) - 1
        too_long = lengths > sequence_length
        lost = np.array([not self._learned(int(sample)).any() for sample in samples[too_long]], bool)
        self.shortened = Shortened(int(too_long.sum()), int(lost.sum()), int(lengths.max(initial=-1)) + 1)
        kept = np.ones(len(samples), bool)
        kept[np.flatnonzero(too_long)[lost]] = False
        self.samples, fitting = samples[kept], np.minimum(lengths[kept], sequence_length)
        self.filled = int(fitting.sum())
        if packed:
            self.rows = pack(fitting, sequence_length)
        else:
            self.rows = Rows(np.arange(len(fitting)), np.arange(len(fitting) + 1))

    def __len__(self) -> int:
        return len(self.rows.bounds) - 1

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a dataset of {len(self)} samples")
        tokens = np.full(self.sequence_length, PADDING, np.int64)
        labels, loss_mask = tokens.copy(), np.zeros(self.sequence_length, np.float32)
        begins, at = [], 0
        for member in self.rows.members[self.rows.bounds[i] : self.rows.bounds[i + 1]]:
            sample = int(self.samples[member])
            ids = self.source.get(sample)[: self.sequence_length + 1]
            end = at + len(ids) - 1
            tokens[at:end], labels[at:end] = ids[:-1], ids[1:]
            loss_mask[at:end] = self._learned(sample)
            begins.append(at)
            at = end
        row: Sample = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}
        if not self.packed:
            return {**row, "position_ids": np.arange(self.sequence_length, dtype=np.int64)}
        # Padding is a document of its own.
        starts = np.array([*begins, at] if at < self.sequence_length else begins, np.int64)
        positions = positions_in_documents(starts, self.sequence_length)
        return {**row, "position_ids": positions, DOCUMENT_STARTS: starts}

    def _learned(self, sample: int) -> npt.NDArray[np.integer]:
        """For every label of a sample that fits, whether it counts."""
        return self.source.get(sample + 1)[1 : self.sequence_length + 1]


@dataclass(frozen=True, eq=False)
class Rows:
    """Row i holds `members[bounds[i] : bounds[i + 1]]`."""

    members: IntArray
    bounds: IntArray


def pack(lengths: Sequence[int] | IntArray, capacity: int) -> Rows:
    """The longest first, each into the fullest row that has room for it; rows and what is in them keep the order of the file."""
    rows: list[list[int]] = []
    # By the room that is left: which rows have it, and, in order, which rooms there are.
    with_room: dict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []
    for member in np.argsort(-np.asarray(lengths, np.int64), kind="stable"):
        length = int(lengths[member])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[place]
        rows[row].append(int(member))
        left = room - length
        if left > 0:
            if not with_room[left]:
                insort(rooms, left)
            with_room[left].append(row)
    ordered = sorted(sorted(row) for row in rows)
    bounds = np.cumsum([0, *map(len, ordered)], dtype=np.int64)
    return Rows(np.array([member for row in ordered for member in row], np.int64), bounds)
