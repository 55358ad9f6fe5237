"""The conversations that a configuration with `--sft` asks for."""

import datetime
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pentatron.config.run import RunConfig
from pentatron.config.training import DataConfig
from pentatron.data.corpus import only_one
from pentatron.data.epochs import EpochShuffle, Joined
from pentatron.data.indexed import IndexedDataset
from pentatron.data.pair_names import pair_paths
from pentatron.data.sampling import parse_split, split_ranges
from pentatron.data.tokenizer import Tokenizer, identify
from pentatron.errors import UserError
from pentatron.monitor.display import Display
from pentatron.parallel.collectives import on_some_ranks
from pentatron.parallel.world import World
from pentatron.text import plural

if TYPE_CHECKING:
    from pentatron.data.chat_template import ChatTemplate
    from pentatron.data.sft import SFTDataset

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
    from pentatron.data.sft import SFTDataset

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
    from pentatron.data.sft import SFTDataset

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
    from pentatron.data.sft import write_conversations

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
