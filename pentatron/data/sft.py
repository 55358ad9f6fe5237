"""Samples for supervised fine-tuning: one conversation padded to the length of a sequence, or as many as fit.

Conversations are tokenized once into a `.bin/.idx` pair. A document of it is a conversation; its sequences come in twos: the tokens of
a sample, and for each of them 1 if the model is to say it, else 0.
"""

import datetime
import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from pentatron.data.conversations import MarkedText, Tokens, Writer, at_line, read_conversations
from pentatron.data.corpus import only_one
from pentatron.data.indexed import IndexedDataset, pair_paths, token_dtype
from pentatron.data.loader import EpochShuffle, Joined
from pentatron.data.pair_writer import IndexedDatasetWriter
from pentatron.data.sampling import DOCUMENT_STARTS, Sample, parse_split, positions_in_documents, split_ranges
from pentatron.data.tokenizer import Tokenizer, identify
from pentatron.errors import UserError
from pentatron.monitor.display import Display
from pentatron.parallel.collectives import on_some_ranks
from pentatron.parallel.world import World
from pentatron.settings.run import RunConfig
from pentatron.settings.training import DataConfig
from pentatron.text import plural

if TYPE_CHECKING:
    from pentatron.data.chat_template import ChatTemplate

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


# The conversations that a configuration with `--sft` asks for.


# Raise this when conversations become other tokens, so that those tokenized before are tokenized again.
RECIPE = 1
IDENTITY = "identity"


@dataclass(frozen=True)
class Conversations:
    """All endless. `fingerprint`: of what they are made of; `untested`: why there are none to test with."""

    train: EpochShuffle
    valid: EpochShuffle | None
    test: EpochShuffle | None
    fingerprint: str
    untested: str


def build_conversations(
    config: RunConfig,
    tokenizer: Tokenizer,
    world: World,
    folder: Path,
    display: Display,
    validates: bool,
    tests: bool,
) -> Conversations:
    """Conversations to train on, to validate and to test with, where that is wanted.

    Several files are read as one set; --split divides each of them.
    """

    data = config.data
    paths = [Path(name) for name in data.data_path]
    sources, contents = _tokenized(config, tokenizer, world, folder, display)
    length, packed = config.model.seq_length, data.sft_packing
    shares = parse_split(data.split)

    def read(part: int, name: str) -> list[SFTDataset]:
        """A part of every file that has something for it, after saying what it is."""
        parts = []
        for path, source in zip(paths, sources):
            documents = split_ranges(shares, len(source.document_indices) - 1)[part] or range(0)
            rows = SFTDataset(source, documents, length, packed)
            if len(rows) == 0:
                if part == 0:
                    raise UserError(_nothing_left(path, data.split, documents, rows))
                continue
            display.say(_report(name if len(paths) == 1 else f"{name}, {path}", rows, len(documents)))
            parts.append(rows)
        return parts

    train = _endless(read(0, "training"), config.run.seed)
    assert train is not None
    conversations = sum(len(source.document_indices) - 1 for source in sources)
    missing = f"--split {data.split} leaves none of {_count(conversations, 'conversation')} to"
    valid = _endless(read(1, "validation"), config.run.seed) if validates else None
    if validates and valid is None:
        display.say(f"note: {missing} validate with")
    tests = tests and shares[2] > 0
    test = _endless(read(2, "test"), config.run.seed) if tests else None
    untested = f"{missing} test with" if tests and test is None else ""
    what = contents[0] if len(contents) == 1 else hashlib.sha256(" ".join(contents).encode()).hexdigest()
    return Conversations(train, valid, test, f"sft {what} {'packed' if packed else 'padded'}", untested)


def count_sequences(
    config: RunConfig, tokenizer: Tokenizer, world: World, folder: Path, display: Display
) -> int:
    """How many sequences one pass over the training share has."""

    data, total = config.data, 0
    for path, source in zip(data.data_path, _tokenized(config, tokenizer, world, folder, display)[0]):
        documents = split_ranges(parse_split(data.split), len(source.document_indices) - 1)[0] or range(0)
        rows = SFTDataset(source, documents, config.model.seq_length, data.sft_packing)
        if len(rows) == 0:
            raise UserError(_nothing_left(Path(path), data.split, documents, rows))
        total += len(rows)
    return total


def _tokenized(
    config: RunConfig, tokenizer: Tokenizer, world: World, folder: Path, display: Display
) -> tuple[list[IndexedDataset], list[str]]:
    """The conversations of every file, and a hash of what they are made of. They are tokenized once, in `--data-cache-path` or the folder."""
    from pentatron.data.chat_template import end_rendering
    from pentatron.data.conversations import Writer

    data = config.data
    folder = folder if data.data_cache_path is None else Path(data.data_cache_path)
    paths = [Path(name) for name in data.data_path]
    # What fails on one machine alone must be told by all, before any of them waits for the others.
    found = on_some_ranks(True, lambda: _identified(data, tokenizer, paths), world.everyone)
    assert found is not None
    template, contents = found
    prefixes = [folder / f"sft-{content[:16]}" for content in contents]

    def prepare() -> bool:
        folder.mkdir(parents=True, exist_ok=True)
        with only_one(folder):
            for path, prefix in zip(paths, prefixes):
                if not _is_good(prefix, display):
                    writer = Writer(tokenizer, template)
                    write_conversations(
                        path, prefix, writer, lambda done, total: display.work("tokenize", done, total)
                    )
        return True

    try:
        on_some_ranks(world.local_rank == 0, prepare, world.everyone)
    finally:
        end_rendering()
    return [IndexedDataset(prefix, config.model.vocab_size) for prefix in prefixes], contents


def _identified(
    data: DataConfig, tokenizer: Tokenizer, paths: Sequence[Path]
) -> "tuple[ChatTemplate | None, list[str]]":
    """The template, and a hash of everything that determines the tokens of each file."""
    template = find_template(data, tokenizer)
    recipe = [RECIPE, asdict(identify(tokenizer)), None]
    if template is not None:
        recipe[2] = [template.source, sorted(template.special_tokens.items()), str(template.day)]
    hashes = []
    for path in paths:
        what = hashlib.sha256(repr(recipe).encode())
        what.update(_content(path).encode())
        hashes.append(what.hexdigest())
    return template, hashes


def _endless(parts: "Sequence[SFTDataset]", seed: int) -> EpochShuffle | None:
    return EpochShuffle(parts[0] if len(parts) == 1 else Joined(parts), seed) if parts else None


def _is_good(prefix: Path, display: Display) -> bool:
    """Whether an earlier run has left the tokens here; what is damaged is made again rather than complained about."""
    if not all(file.exists() for file in pair_paths(prefix)):
        return False
    try:
        IndexedDataset(prefix).compare_all()
    except UserError as error:
        display.say(f"note: {str(error).partition(';')[0]}; it is made again")
        return False
    return True


def find_template(data: DataConfig, tokenizer: Tokenizer) -> "ChatTemplate | None":
    """The template to write conversations with; None if their texts are to follow each other as they are."""
    if data.sft_tokenizer_prompt_format == IDENTITY:
        return None
    from pentatron.data.chat_template import ChatTemplate, find_chat_template, read_template, special_tokens

    folder = getattr(tokenizer, "path", None)
    folder = None if folder is None else Path(folder).parent
    if data.chat_template is not None:
        file = Path(data.chat_template)
        found: tuple[str, Path] | None = read_template(file), file
    else:
        found = None if folder is None else find_chat_template(folder)
    if found is None:
        where = "the tokenizer has no folder" if folder is None else f"{folder} has no chat template"
        raise UserError(
            f"{where}, which would say how a conversation becomes a text; name one with --chat-template FILE, or let texts follow each "
            f"other as they are with --sft-tokenizer-prompt-format {IDENTITY}"
        )
    words = {} if folder is None else special_tokens(folder)
    day = datetime.date.fromisoformat(data.sft_date)
    return ChatTemplate(found[0], words, day, f"the chat template of {found[1]}").check()


def _report(name: str, rows: "SFTDataset", conversations: int) -> str:
    cut, length = rows.shortened, rows.sequence_length
    samples = len(rows.samples) + cut.without_answer
    several = (
        f" (as {samples} samples, one for each answer, where the template changes earlier ones)"
        if samples > conversations
        else ""
    )
    text = (
        f"{name}: {_count(conversations, 'conversation')}{several} {'packed into' if rows.packed else 'padded to'} "
        f"{_count(len(rows), 'sequence')} of {length} tokens, {rows.filled / (len(rows) * length):.0%} filled"
    )
    if not cut.samples:
        return text
    without = (
        f", {cut.without_answer} of them left out because no answer was left" if cut.without_answer else ""
    )
    return (
        f"{text}; {cut.samples} too long and cut at the end (the longest has {cut.longest} tokens){without}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {plural(number, what)}"


def _nothing_left(path: Path, split: str, part: range, rows: "SFTDataset") -> str:
    if not len(part):
        return f"--split {split} leaves no conversation of {path} to train on; give it a larger share"
    return (
        f"No conversation of {path} has an answer within {rows.sequence_length} tokens; raise --seq-length "
        f"(the longest has {rows.shortened.longest} tokens)"
    )


def _content(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
