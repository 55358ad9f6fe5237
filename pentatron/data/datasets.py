"""The samples a configuration asks for to train, validate and test with, and their order."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pentatron.checkpoint.state import TrainState
from pentatron.data.blending import Member, SampleRecipe, build_blend
from pentatron.data.corpus import PreparedCorpus, prepare_python_corpus
from pentatron.data.gpt_dataset import (
    SyntheticDataset,
    documents_of,
    mock_indexed,
    require_documents,
    require_text,
    samples_of_files,
)
from pentatron.data.identity import DataIdentity, FileIdentity, require_same_data
from pentatron.data.indexed import IndexedDataset
from pentatron.data.inspect import refuse_other_tokenizer
from pentatron.data.loader import EpochShuffle, SampleSource
from pentatron.data.sampling import (
    SPLIT_NAMES,
    Boundaries,
    IndexCache,
    Sample,
    boundaries_of,
    parse_split,
    split_ranges,
)
from pentatron.data.sft import build_conversations, count_sequences
from pentatron.data.tokenizer import FileTokenizer, Tokenizer, load_tokenizer
from pentatron.errors import AgreedError, UserError
from pentatron.monitor.display import Display
from pentatron.parallel.collectives import broadcast_object, on_some_ranks
from pentatron.parallel.world import World
from pentatron.settings.data_paths import (
    Blend,
    counted_by_the_run,
    names_files,
    trained_files,
    without_epochs,
)
from pentatron.settings.resolve import Resolved
from pentatron.settings.run import RunConfig
from pentatron.settings.settings import unset
from pentatron.settings.training import DataConfig
from pentatron.text import decimal_size

# As Megatron splits its mock data, whatever --split says.
_MOCK_SPLIT = "1,1,1"
# A smaller order takes less time to build than files take to be made.
_WORTH_A_FILE = 1 << 20
# Samples whose origins are counted at once.
_TOGETHER = 1 << 22
# Of synthetic walks: beyond all that is ever trained on or validated with.
_FIRST_TEST_SAMPLE = 1 << 31


class TrainingSamples(Protocol):
    """Samples that know which dataset each of them comes from."""

    def __getitem__(self, index: int) -> Sample: ...

    def origins(self, samples: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]: ...


@dataclass(frozen=True)
class Datasets:
    """`names`: of the datasets that training draws from. `untested`: why there is no test set, where its share is too small."""

    train: TrainingSamples
    valid: SampleSource | None
    test: SampleSource | None
    tokenizer: Tokenizer | None
    names: tuple[str, ...]
    untested: str = ""

    def drawn(self, first: int, stop: int) -> Counter[str]:
        """How many of the training samples from `first` on come from each dataset."""
        if len(self.names) == 1:
            return Counter({self.names[0]: stop - first})
        counts = np.zeros(len(self.names), np.int64)
        for begin in range(first, stop, _TOGETHER):
            some = np.arange(begin, min(stop, begin + _TOGETHER))
            counts += np.bincount(self.train.origins(some), minlength=len(self.names))
        found: Counter[str] = Counter()
        for name, count in zip(self.names, counts.tolist(), strict=True):
            # One corpus may have been named twice.
            found[name] += count
        return found


class Parts(NamedTuple):
    train: TrainingSamples
    valid: SampleSource | None
    test: SampleSource | None


Order = Callable[["Numbers", IndexCache], Parts]
# For training, validation and test: which part of which files.
Members = tuple[list[Member], list[Member] | None, list[Member] | None]


class Numbers(NamedTuple):
    """For how many samples the orders of training and validation were built, first and each time they had to grow."""

    train: Sequence[int]
    valid: Sequence[int]


@dataclass(frozen=True)
class OpenedData:
    """Data that was found and checked. `order` lays its samples out, for the numbers that the order was built for."""

    order: Order
    tokenizer: Tokenizer | None
    names: tuple[str, ...]
    # Two runs with the same one, and files of the same tokens, see the same samples; a resumed run insists on it.
    fingerprint: str
    # Whether the order depends on the number of samples it is built for.
    depends_on_length: bool = True
    untested: str = ""
    files: tuple[FileIdentity, ...] = ()

    @property
    def identity(self) -> DataIdentity:
        return DataIdentity(self.fingerprint, self.files)


def open_data(config: RunConfig, world: World, data_folder: Path, display: Display) -> OpenedData:
    data = config.data
    if data.sft:
        return _open_conversations(config, world, data_folder, display)
    if data.corpus is not None:
        prepared = prepare_corpus(config, world, data_folder, display)
        display.say(
            f"corpus: Python's standard library, {prepared.documents} files, {decimal_size(prepared.bytes)}, "
            f"{prepared.tokens:,} tokens, vocabulary {config.model.vocab_size}"
        )
        tokenizer = FileTokenizer(prepared.tokenizer_path)
        blend = Blend((str(prepared.prefix),))
        identity = DataIdentity(f"python corpus {prepared.fingerprint}")
        return _open_files(config, (blend, blend, blend), tokenizer, identity, data.split)
    if data.data_path or data.train_data_path:
        configured = configured_tokenizer(data, config.model.vocab_size)
        train = Blend.parse(data.data_path or data.train_data_path)
        valid, test = (
            Blend.parse(words) if words else None for words in (data.valid_data_path, data.test_data_path)
        )
        blends = (train, train, train) if data.data_path else (train, valid, test)
        # What a run is tested with does not change what it learns.
        identity = DataIdentity.of_blends(*blends[:2])
        return _open_files(config, blends, configured, identity, data.split if data.data_path else None)
    if data.mock_data:
        return _open_mock(config)
    return _open_synthetic(config, data.dataset_size or 0)


def arrange(
    opened: OpenedData, config: RunConfig, world: World, state: TrainState, folder: Path, display: Display
) -> Datasets:
    """The samples in the order that the run began with, or in a new one that is noted in its state.

    The first rank of every machine builds; the others wait and find what it left, or build the same in memory.
    """
    require_same_data(opened.identity, world)
    wanted, validated, _ = wanted_samples(config)
    # A run that has had other batch sizes than this plan's does not end where the plan does.
    steps_left = max(0, (config.train.train_iters or 0) - state.step)
    wanted = max(wanted, config.batch_plan.advance(state.consumed_samples, steps_left))
    longer = not state.ordered_for or wanted > state.ordered_for[-1]
    if longer and state.ordered_for and opened.depends_on_length:
        display.say(
            f"note: samples were ordered for a run of {state.ordered_for[-1]}; they keep that order, and further epochs are "
            f"appended as far as {wanted} need them"
        )
    if longer:
        state.ordered_for = [*state.ordered_for, wanted]
    if validated > max(state.valid_ordered_for, default=0):
        state.valid_ordered_for = [*state.valid_ordered_for, validated]
    named = config.data.data_cache_path
    place = Path(named) if named is not None else folder / "order"
    least = 0 if named is not None else _WORTH_A_FILE

    def lay_out(builds: bool) -> Parts:
        cache = IndexCache(place, builds, least, lambda text: display.say(f"note: {text}"))
        return opened.order(Numbers(state.ordered_for, state.valid_ordered_for), cache)

    built = on_some_ranks(world.local_rank == 0, lambda: lay_out(True), world.everyone)
    datasets = Datasets(*(built or lay_out(False)), opened.tokenizer, opened.names, opened.untested)
    # Names that are not read any more are those of data that was changed knowingly.
    if not set(opened.names) <= set(state.drawn) or sum(state.drawn.values()) != state.consumed_samples:
        state.drawn = dict(datasets.drawn(0, state.consumed_samples))
    return datasets


def _open_files(
    config: RunConfig,
    blends: tuple[Blend, Blend | None, Blend | None],
    tokenizer: Tokenizer | None,
    identity: DataIdentity,
    split: str | None,
) -> OpenedData:
    """With a `split` all blends read their part of the same files."""
    sources: dict[str, IndexedDataset] = {}
    boundaries: dict[str, Boundaries | None] = {}
    members: list[list[Member] | None] = []
    untested = ""
    for name, blend, size in zip(SPLIT_NAMES, blends, wanted_samples(config), strict=True):
        if blend is None or size == 0 or (split is not None and not _share(split, name)):
            members.append(None)
            continue
        for prefix in blend.prefixes:
            if prefix not in sources:
                sources[prefix] = IndexedDataset(prefix, config.model.vocab_size)
                if tokenizer is not None:
                    refuse_other_tokenizer(sources[prefix], tokenizer)
                boundaries[prefix] = _boundaries(config.data, sources[prefix], tokenizer)
        if name == "test" and split is not None:
            # Hardly anyone chose this share: where it is too small for a sample, there is no test.
            by_size = blend.weights is None and len(blend.prefixes) > 1
            least = config.model.seq_length + 1 if by_size else 1
            untested = next(filter(None, (_too_small(sources[p], split, least) for p in blend.prefixes)), "")
            if untested:
                members.append(None)
                continue
        members.append([_part(sources[p], split, name, boundaries[p]) for p in blend.prefixes])
    train, valid, test = members
    assert train is not None, "the rules refuse a split without a training share"
    # A split with files of its own and only one of them has nothing to weigh.
    weights = [
        None if blend is None or (split is None and len(blend.prefixes) == 1) else blend.weights
        for blend in blends
    ]
    return OpenedData(
        lambda numbers, cache: _laid_out(config, (train, valid, test), weights, numbers, cache),
        tokenizer,
        blends[0].prefixes,
        identity.fingerprint,
        untested=untested,
        files=identity.files,
    )


def _too_small(source: IndexedDataset, split: str, least: int) -> str:
    """Why the last share of a split cannot be tested with; empty if it can."""
    documents = documents_of(source, split)[-1]
    assert documents is not None
    tokens = int(source.sequence_lengths[documents.start : documents.stop].sum(dtype=np.int64))
    if tokens >= least:
        return ""
    return f"--split {split} leaves {tokens} tokens of {source.prefix} to test with, and {least} are needed"


def _share(split: str, name: str) -> float:
    return parse_split(split)[SPLIT_NAMES.index(name)]


def _part(source: IndexedDataset, split: str | None, name: str, boundaries: Boundaries | None) -> Member:
    if split is None:
        require_text(source)
        return Member(source, range(len(source)), boundaries)
    documents = documents_of(source, split)[SPLIT_NAMES.index(name)]
    assert documents is not None
    require_documents(source, documents, split, name)
    return Member(source, documents, boundaries)


def _boundaries(data: DataConfig, source: IndexedDataset, tokenizer: Tokenizer | None) -> Boundaries | None:
    return boundaries_of(data, lambda: _end_of_document(source, tokenizer))


def _laid_out(
    config: RunConfig,
    members: Members,
    weights: Sequence[Sequence[float] | None],
    numbers: Numbers,
    cache: IndexCache,
) -> Parts:
    data, wanted = config.data, wanted_samples(config)
    recipe = SampleRecipe(
        config.model.seq_length,
        config.run.seed,
        config.model.vocab_size,
        data.mid_level_dataset_surplus,
        cache,
    )
    train: TrainingSamples
    if data.dataloader_type == "cyclic":
        # Epochs of one fixed set: a longer run has more of them. Only weights need a number to make that set.
        once = build_blend(members[0], weights[0], numbers.train[:1] if weights[0] else None, recipe)
        train = EpochShuffle(once, config.run.seed)
    else:
        train = build_blend(members[0], weights[0], numbers.train, recipe)
    valid = test = None
    if members[1] is not None and config.train.full_validation:
        valid = build_blend(members[1], None, None, recipe)
    elif members[1] is not None:
        valid = build_blend(members[1], weights[1], numbers.valid, recipe)
    if members[2] is not None:
        test = build_blend(members[2], weights[2], [wanted.test], recipe)
    return Parts(train, valid, test)


def _open_conversations(config: RunConfig, world: World, folder: Path, display: Display) -> OpenedData:
    tokenizer = tokenizer_of_conversations(config, world)
    wanted = wanted_samples(config)
    found = build_conversations(config, tokenizer, world, folder, display, wanted.valid > 0, wanted.test > 0)
    parts = Parts(found.train, found.valid, found.test)
    names = config.data.data_path
    return OpenedData(
        lambda _, __: parts,
        tokenizer,
        names,
        found.fingerprint,
        depends_on_length=False,
        untested=found.untested,
    )


def _open_mock(config: RunConfig) -> OpenedData:
    vocabulary = config.model.vocab_size
    source = mock_indexed(vocabulary)
    ends = boundaries_of(config.data, lambda: source.eod)
    train, valid, test = (
        [Member(source, part or range(0), ends)] if size else None
        for part, size in zip(
            split_ranges(parse_split(_MOCK_SPLIT), len(source)), wanted_samples(config), strict=True
        )
    )
    assert train is not None
    return OpenedData(
        lambda numbers, cache: _laid_out(config, (train, valid, test), (None, None, None), numbers, cache),
        None,
        ("mock",),
        f"mock {vocabulary}",
    )


def _open_synthetic(config: RunConfig, size: int) -> OpenedData:
    vocabulary, seed = config.model.vocab_size, config.run.seed
    length, wanted = config.model.seq_length, wanted_samples(config)
    synthetic = SyntheticDataset(size, vocabulary, length, seed)
    # Walks around the same cycle, which nothing before them has seen, however long the run becomes.
    valid, test = (
        SyntheticDataset(count, vocabulary, length, seed, first) if count else None
        for count, first in ((wanted.valid, size), (wanted.test, _FIRST_TEST_SAMPLE))
    )
    return OpenedData(
        lambda numbers, cache: Parts(EpochShuffle(synthetic, seed), valid, test),
        None,
        ("synthetic",),
        f"synthetic {size} {vocabulary}",
        depends_on_length=False,
    )


class Wanted(NamedTuple):
    train: int
    valid: int
    test: int


def wanted_samples(config: RunConfig) -> Wanted:
    """How many samples training, all its validations and the test need, as Megatron counts them."""
    train = config.train
    evaluated = train.eval_iters * config.eval_batch[0]
    validates = train.eval_interval or train.skip_train
    # Every validation goes on where the one before ended; one more follows the last step.
    times = train.train_iters // train.eval_interval + 1 if train.eval_interval else 1
    # Without an interval nothing is evaluated, unless files were named for it.
    tests = validates or config.data.test_data_path
    return Wanted(
        config.spans.total,
        times * evaluated if validates else 0,
        evaluated if tests else 0,
    )


def _end_of_document(source: IndexedDataset, tokenizer: Tokenizer | None) -> int:
    """The tokenizer that was named knows, or the one the data was prepared with."""
    if tokenizer is not None:
        return tokenizer.eod
    facts = source.facts
    known = None if facts is None else facts.tokenizer
    if known is None or known.eod is None:
        raise UserError(
            f"which token ends a document of {source.prefix} is not known, and --reset-position-ids, --reset-attention-mask and "
            "--eod-mask-loss ask for it; name the tokenizer the data was prepared with (--tokenizer-type, --tokenizer-model)"
        )
    return known.eod


def tokenizer_of_conversations(config: RunConfig, world: World) -> Tokenizer:
    """Every rank must ask: what one of them cannot read, all tell."""
    tokenizer = on_some_ranks(
        True, lambda: configured_tokenizer(config.data, config.model.vocab_size), world.everyone
    )
    assert tokenizer is not None, "the rules refuse conversations without a tokenizer"
    return tokenizer


def configured_tokenizer(data: DataConfig, vocab_size: int | None) -> Tokenizer | None:
    """The tokenizer the user named, if any."""
    named = (data.tokenizer_type, data.tokenizer_model, data.vocab_file, data.merge_file)
    if all(name is None for name in named):
        return None
    return load_tokenizer(
        data.tokenizer_type, data.tokenizer_model, vocab_size, data.vocab_file, data.merge_file
    )


# How long a run with `--epochs` is, where it tokenizes its data itself, or its ranks must agree: the samples
# of a pass are counted first of all.


def settle_epochs(
    resolved: Resolved, world: World, folder: Path, display: Display, own_data: bool = False
) -> Resolved:
    """The same configuration with its length. The tokens stay in `folder`, where the run finds them when it opens its data.

    `own_data`: what the settings name is not what is read, or not in a way that we know.
    """
    config = resolved.config
    if resolved.open is None:
        return resolved
    if own_data:
        if unset(config.train.train_iters):
            raise AgreedError(
                f"how many steps --epochs {config.train.epochs} are is not known: the program has data of its own; give --train-iters instead"
            )
        return resolved
    named = config.data
    if not counted_by_the_run(named) and (not names_files(named) or without_epochs(named)):
        return resolved
    world.whereabouts.phase = "opening the data"
    counted = on_some_ranks(True, lambda: _count(config, world, folder, display), world.everyone)
    # Machines with other data are found out later; until then all have one length, so that none waits in vain.
    samples = broadcast_object(counted, world.everyone)
    settled = on_some_ranks(True, lambda: resolved.with_epoch(samples), world.everyone)
    assert settled is not None
    return settled


def _count(config: RunConfig, world: World, folder: Path, display: Display) -> int:
    if config.data.sft:
        tokenizer = tokenizer_of_conversations(config, world)
        return count_sequences(config, tokenizer, world, folder, display)
    prefixes, split = (
        ((str(prepare_corpus(config, world, folder, display).prefix),), config.data.split)
        if config.data.corpus
        else trained_files(config.data)
    )
    return samples_of_files(prefixes, split, config.model.seq_length)


def prepare_corpus(config: RunConfig, world: World, folder: Path, display: Display) -> PreparedCorpus:
    """The first rank of every machine prepares; the others wait and then find it ready."""
    vocabulary = config.model.vocab_size

    def prepare(progress: Callable[[str, int, int], None] | None = None) -> PreparedCorpus:
        return prepare_python_corpus(folder, vocabulary, config.data.corpus_bytes, progress)

    first_here = world.local_rank == 0
    return on_some_ranks(first_here, lambda: prepare(display.work), world.everyone) or prepare()
