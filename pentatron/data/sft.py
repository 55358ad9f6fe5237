"""Supervised fine-tuning datasets: conversations, padded or packed into sequences.

Conversations are tokenized once into a `.bin/.idx` pair. A document is a conversation. Its sequences come
in pairs: the tokens of a sample, and its loss mask of ones and zeros.
"""

import datetime
import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from pentatron.checksums import digest_of_file
from pentatron.data import chat_template, sample_index
from pentatron.data.chat_template import ChatTemplate
from pentatron.data.conversations import ConversationEncoder, MarkedText, Tokens, at_line, read_conversations
from pentatron.data.indexed import IndexedDataset, pair_paths, token_dtype
from pentatron.data.indexed_writer import IndexedDatasetWriter
from pentatron.data.loader import ConcatenatedDataset, EpochShuffle
from pentatron.data.sample_index import DOCUMENT_STARTS, Sample, positions_in_documents
from pentatron.data.tokenizer import Tokenizer, identify_tokenizer
from pentatron.errors import UserError
from pentatron.files import exclusive_folder
from pentatron.monitor.display import Display
from pentatron.parallel.collectives import run_on_all_ranks, run_on_some_ranks
from pentatron.parallel.world import World
from pentatron.settings.run_config import RunConfig
from pentatron.settings.training import DataConfig
from pentatron.text import format_count

IntArray = npt.NDArray[np.int64]
# Conversations tokenized in one batch.
TOKENIZE_BATCH = 256
# Any id works: padding has no loss, and no other token attends to it.
PADDING = 0
# Increment when conversations are tokenized differently, so that cached tokens are not reused.
RECIPE = 1
IDENTITY = "identity"

Progress = Callable[[int, int], None]
# The files of conversations, and their tokens.
Files = Sequence[tuple[Path, IndexedDataset]]


def write_conversations(path: Path, prefix: Path, writer: ConversationEncoder, progress: Progress) -> None:
    """Tokenizes a file of conversations into a pair; `progress` gets bytes read and file size."""
    tokenizer, documents = writer.tokenizer, 0
    dtype, identity = token_dtype(tokenizer.vocab_size), identify_tokenizer(tokenizer)
    with IndexedDatasetWriter(prefix, dtype, identity) as pair:
        conversations = read_conversations(path)
        while lines := list(islice(conversations, TOKENIZE_BATCH)):
            texts: list[tuple[int, MarkedText]] = []
            for number, conversation, _ in lines:
                with at_line(path, number):
                    texts += [(number, text) for text in writer.texts(conversation)]
            for _, samples in groupby(_tokenize(path, writer, texts), itemgetter(0)):
                sequences = [sequence for _, sample in samples for sequence in (sample.ids, sample.in_loss)]
                tokens = np.concatenate([np.asarray(sequence, np.int64) for sequence in sequences])
                pair.add_document(tokens, [len(sequence) for sequence in sequences])
            documents += len(lines)
            progress(lines[-1][2], path.stat().st_size)
        if documents == 0:
            raise UserError(f"{path} holds no conversation; it is empty")


def _tokenize(
    path: Path, writer: ConversationEncoder, texts: Sequence[tuple[int, MarkedText]]
) -> Iterator[tuple[int, Tokens]]:
    """Yields the tokens of numbered texts."""
    try:
        samples = writer.tokens([text for _, text in texts])
    except UserError:
        # Some text cannot be tokenized: try them one by one to find it.
        samples = []
        for number, text in texts:
            with at_line(path, number):
                try:
                    samples += writer.tokens([text])
                except UserError as error:
                    raise UserError(f"cannot be tokenized: {error}") from None
    for (number, _), sample in zip(texts, samples):
        with at_line(path, number):
            if not sample.in_loss[1:].any():
                raise UserError("has no answer to train on")
        yield number, sample


class SFTDataset(Dataset[Sample]):
    """Conversations of a pair, one per row or packed; every row has `sequence_length` tokens.

    Longer conversations are truncated at the end. Attention is restricted to each packed conversation and
    its position ids start at 0, so that its loss does not depend on its place in the row.
    """

    def __init__(self, source: IndexedDataset, documents: range, sequence_length: int, packed: bool) -> None:
        self.source, self.sequence_length, self.packed = source, sequence_length, packed
        self.conversations = len(documents)
        bounds = source.document_indices
        samples = np.arange(bounds[documents.start], bounds[documents.stop], 2, dtype=np.int64)
        # The last token is only a label.
        lengths = source.sequence_lengths[samples].astype(np.int64) - 1
        too_long = lengths > sequence_length
        lost = np.array([not self._learned(int(sample)).any() for sample in samples[too_long]], bool)
        # Those whose answers were cut off completely are dropped.
        self.cut, self.without_answer = int(too_long.sum()), int(lost.sum())
        self.longest = int(lengths.max(initial=-1)) + 1
        kept = ~too_long
        kept[too_long] = ~lost
        self.samples, fitting = samples[kept], np.minimum(lengths[kept], sequence_length)
        self.filled = int(fitting.sum())
        if packed:
            self.members, self.bounds = pack(fitting, sequence_length)
        else:
            self.members, self.bounds = np.arange(len(fitting)), np.arange(len(fitting) + 1)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a dataset of {len(self)} samples")
        tokens = np.full(self.sequence_length, PADDING, np.int64)
        labels, loss_mask = tokens.copy(), np.zeros(self.sequence_length, np.float32)
        begins, at = [], 0
        for member in self.members[self.bounds[i] : self.bounds[i + 1]]:
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
        # The padding is one more document.
        starts = np.array([*begins, at] if at < self.sequence_length else begins, np.int64)
        positions = positions_in_documents(starts, self.sequence_length)
        return {**row, "position_ids": positions, DOCUMENT_STARTS: starts}

    def _learned(self, sample: int) -> npt.NDArray[np.integer]:
        """Returns the loss mask of the labels of a sample, truncated to the sequence length."""
        return self.source.get(sample + 1)[1 : self.sequence_length + 1]


def pack(lengths: Sequence[int] | IntArray, capacity: int) -> tuple[IntArray, IntArray]:
    """Packs samples into rows by best-fit decreasing; rows and members are sorted by file order.

    Returns members and bounds: row i holds `members[bounds[i] : bounds[i + 1]]`.
    """
    rows: list[list[int]] = []
    # Rows by their free space, and the sorted free spaces that occur.
    rows_by_space: dict[int, list[int]] = defaultdict(list)
    spaces: list[int] = []
    for member in np.argsort(-np.asarray(lengths, np.int64), kind="stable"):
        length = int(lengths[member])
        place = bisect_left(spaces, length)
        if place == len(spaces):
            row, space = len(rows), capacity
            rows.append([])
        else:
            space = spaces[place]
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                del spaces[place]
        rows[row].append(int(member))
        left = space - length
        if left > 0:
            if not rows_by_space[left]:
                insort(spaces, left)
            rows_by_space[left].append(row)
    ordered = sorted(sorted(row) for row in rows)
    bounds = np.cumsum([0, *map(len, ordered)], dtype=np.int64)
    return np.array(list(chain.from_iterable(ordered)), np.int64), bounds


def build_conversations(
    config: RunConfig, files: Files, display: Display, sizes: Sequence[int]
) -> tuple[tuple[EpochShuffle, EpochShuffle | None, EpochShuffle | None], str]:
    """Builds the infinite datasets of a run with `--sft`; --split divides each file.

    `sizes` are the numbers of samples to train, validate and test with. Returns the datasets for each, and
    the reason if there is no test set.
    """
    data = config.data

    def read(part: int, name: str) -> EpochShuffle | None:
        """Opens one part of the split in every file that has samples for it, and reports its size."""
        parts = []
        for path, source in files:
            rows = _open_part(config, path, source, part)
            if len(rows):
                display.say(_report(name if len(files) == 1 else f"{name}, {path}", rows))
                parts.append(rows)
        if not parts:
            return None
        return EpochShuffle(parts[0] if len(parts) == 1 else ConcatenatedDataset(parts), config.run.seed)

    train = read(0, "training")
    assert train is not None
    conversations = sum(len(source.document_indices) - 1 for _, source in files)
    missing = f"--split {data.split} leaves none of {format_count(conversations, 'conversation')} to"
    valid = read(1, "validation") if sizes[1] else None
    if sizes[1] and valid is None:
        display.say(f"note: {missing} validate with")
    tests = sizes[2] and sample_index.parse_split(data.split)[2] > 0
    test = read(2, "test") if tests else None
    return (train, valid, test), f"{missing} test with" if tests and test is None else ""


def count_sequences(config: RunConfig, files: Files) -> int:
    """Counts the sequences of one epoch over the training share."""
    return sum(len(_open_part(config, path, source, 0)) for path, source in files)


def _open_part(config: RunConfig, path: Path, source: IndexedDataset, part: int) -> SFTDataset:
    """Opens one part of the split of a file; raises UserError if there is nothing to train on."""
    data = config.data
    documents = sample_index.split_ranges(
        sample_index.parse_split(data.split), len(source.document_indices) - 1
    )[part] or range(0)
    rows = SFTDataset(source, documents, config.model.seq_length, data.sft_packing)
    if part == 0 and not len(documents):
        raise UserError(
            f"--split {data.split} leaves no conversation of {path} to train on; give training a larger share"
        )
    if part == 0 and not len(rows):
        raise UserError(
            f"no conversation of {path} has an answer within {rows.sequence_length} tokens; raise --seq-length "
            f"(the longest has {rows.longest} tokens)"
        )
    return rows


def tokenize_conversations(
    config: RunConfig, tokenizer: Tokenizer, world: World, folder: Path, display: Display
) -> tuple[Files, str]:
    """Opens the tokenized conversations of every file, and returns them with a fingerprint.

    Local rank 0 of every node tokenizes files that are not yet in `--data-cache-path` or the folder.
    """
    data = config.data
    folder = folder if data.data_cache_path is None else Path(data.data_cache_path)
    paths = [Path(name) for name in data.data_path]

    def identify() -> tuple[ChatTemplate | None, list[str]]:
        """Returns the chat template, and for each file a hash of everything that determines its tokens."""
        template = find_template(data, tokenizer)
        recipe = [RECIPE, asdict(identify_tokenizer(tokenizer)), None]
        if template is not None:
            recipe[2] = [template.source, sorted(template.special_tokens.items()), str(template.day)]
        contents = [digest_of_file(path, 0) if path.is_file() else "" for path in paths]
        return template, [_sha256(repr(recipe) + content) for content in contents]

    # An error on one node must be raised on all ranks before any of them waits for the others.
    template, contents = run_on_all_ranks(identify, world.all_ranks)
    prefixes = [folder / f"sft-{content[:16]}" for content in contents]

    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive_folder(folder):
            for path, prefix in zip(paths, prefixes):
                if not _is_tokenized(prefix, display):
                    writer = ConversationEncoder(tokenizer, template)
                    write_conversations(path, prefix, writer, partial(display.work, "tokenize"))

    try:
        run_on_some_ranks(world.local_rank == 0, prepare, world.all_ranks)
    finally:
        chat_template.stop_sandbox()
    sources = [IndexedDataset(prefix, config.model.vocab_size) for prefix in prefixes]
    content = contents[0] if len(contents) == 1 else _sha256(" ".join(contents))
    return list(zip(paths, sources)), f"sft {content} {'packed' if data.sft_packing else 'padded'}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _is_tokenized(prefix: Path, display: Display) -> bool:
    """Whether intact tokens of an earlier run exist; damaged ones are reported."""
    if not all(file.exists() for file in pair_paths(prefix)):
        return False
    try:
        IndexedDataset(prefix).verify_checksums()
    except UserError as error:
        display.say(f"note: {str(error).partition(';')[0]}; it is tokenized again")
        return False
    return True


def find_template(data: DataConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Returns the chat template of the tokenizer or --chat-template; None for no template."""
    if data.sft_tokenizer_prompt_format == IDENTITY:
        return None
    folder = tokenizer.path.parent if hasattr(tokenizer, "path") else None
    source: tuple[str, Path] | None = None
    if data.chat_template is not None:
        source = chat_template.read_template(Path(data.chat_template))
    elif folder is not None:
        source = chat_template.find_chat_template(folder)
    if source is None:
        where = "the tokenizer has no folder" if folder is None else f"{folder} has no chat template"
        raise UserError(
            f"{where}, which is needed to turn a conversation into a text; name one with --chat-template FILE, or concatenate texts "
            f"without a template with --sft-tokenizer-prompt-format {IDENTITY}"
        )
    tokens = {} if folder is None else chat_template.special_tokens(folder)
    day = datetime.date.fromisoformat(data.sft_date)
    return ChatTemplate(source[0], tokens, day, f"the chat template of {source[1]}").check()


def _report(name: str, rows: SFTDataset) -> str:
    length, conversations = rows.sequence_length, rows.conversations
    samples = len(rows.samples) + rows.without_answer
    text = f"{name}: {format_count(conversations, 'conversation')}"
    if samples > conversations:
        text += f" (as {samples} samples, one for each answer, where the template changes earlier ones)"
    text += f" {'packed into' if rows.packed else 'padded to'} {format_count(len(rows), 'sequence')}"
    text += f" of {length} tokens, {rows.filled / (len(rows) * length):.0%} filled"
    if rows.cut:
        text += f"; {rows.cut} too long and cut at the end (the longest has {rows.longest} tokens)"
    if rows.without_answer:
        text += f", {rows.without_answer} of them left out because no answer was left"
    return text
