"""Opens the data of a configuration and builds its training, validation and test datasets."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pentatron.checkpoint.state import TrainState
from pentatron.data import gpt_dataset
from pentatron.data.blending import BlendedDataset, BlendMember, SampleRecipe, build_blend
from pentatron.data.gpt_dataset import SyntheticDataset
from pentatron.data.identity import DataIdentity, require_same_data
from pentatron.data.indexed import IndexedDataset
from pentatron.data.inspect import require_same_tokenizer
from pentatron.data.loader import EpochShuffle, SampleSource
from pentatron.data.python_corpus import PreparedCorpus, prepare_python_corpus
from pentatron.data.sample_index import SPLIT_NAMES, Boundaries, IndexCache, boundaries_of, parse_split
from pentatron.data.sft import build_conversations, count_sequences, tokenize_conversations
from pentatron.data.tokenizer import FileTokenizer, Tokenizer, TokenizerSettings
from pentatron.errors import AgreedError, UserError
from pentatron.monitor.display import Display
from pentatron.parallel.collectives import broadcast_object, run_on_all_ranks, run_on_some_ranks
from pentatron.parallel.world import World
from pentatron.settings import data_paths
from pentatron.settings.data_paths import Blend
from pentatron.settings.resolve import Resolved
from pentatron.settings.run_config import RunConfig
from pentatron.settings.settings import is_unset
from pentatron.settings.training import DataConfig
from pentatron.text import decimal_size

# Megatron-LM's split of mock data; --split is ignored.
_MOCK_SPLIT = "1,1,1"
# Smaller sample orders are built faster than they are written to the index cache.
_LEAST_CACHED_ENTRIES = 1 << 20
# Samples whose datasets are counted at a time.
_COUNT_CHUNK = 1 << 22
# First synthetic sample of the test set, beyond all samples that training or validation read.
_FIRST_TEST_SAMPLE = 1 << 31


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run.

    `names` are those of the training datasets. `no_test` is the reason if the share of the test set is too
    small.
    """

    train: SampleSource
    valid: SampleSource | None
    test: SampleSource | None
    tokenizer: Tokenizer | None
    names: tuple[str, ...]
    no_test: str = ""

    def drawn(self, first: int, stop: int) -> Counter[str]:
        """Counts the training samples [first, stop) of each dataset."""
        if len(self.names) == 1:
            return Counter({self.names[0]: stop - first})
        assert isinstance(self.train, BlendedDataset | EpochShuffle), "it has several datasets"
        counts = np.zeros(len(self.names), np.int64)
        for begin in range(first, stop, _COUNT_CHUNK):
            samples = np.arange(begin, min(stop, begin + _COUNT_CHUNK))
            counts += np.bincount(self.train.origins(samples), minlength=len(self.names))
        # A corpus can be named twice in a blend.
        by_name: Counter[str] = Counter()
        for name, count in zip(self.names, counts.tolist(), strict=True):
            by_name[name] += count
        return by_name


class SplitDatasets(NamedTuple):
    """The training, validation and test samples in order."""

    train: SampleSource
    valid: SampleSource | None
    test: SampleSource | None


Order = Callable[["OrderSizes", IndexCache], SplitDatasets]
# The files of each split.
Blends = Sequence[Blend | None]
# For the name of each split that is read, the documents of each file and the weights of the files.
Parts = dict[str, tuple[Sequence[BlendMember], Sequence[float] | None]]


class OrderSizes(NamedTuple):
    """The numbers of samples for which the orders were built, initially and each time they were extended."""

    train: Sequence[int]
    valid: Sequence[int]


@dataclass(frozen=True)
class OpenedData:
    """Data that is opened and checked; `order` builds its datasets for given numbers of samples."""

    order: Order
    tokenizer: Tokenizer | None
    names: tuple[str, ...]
    # Runs with the same identity see the same samples; checked on resume.
    identity: DataIdentity
    # Whether the order depends on the number of samples it is built for.
    depends_on_length: bool = True
    no_test: str = ""


def open_data(config: RunConfig, world: World, data_folder: Path, display: Display) -> OpenedData:
    """Opens the data that the configuration names: conversations, a corpus, files, mock or synthetic data."""
    data = config.data
    if data.sft:
        return _open_conversations(config, world, data_folder, display)
    if data.corpus is not None:
        prepared = prepare_corpus(config, world, data_folder, display)
        display.say(
            f"corpus: Python's standard library, {prepared.documents} files, {decimal_size(prepared.bytes)}, "
            f"{prepared.tokens:,} tokens, vocabulary {config.model.vocab_size}"
        )
        tokenizer, blends = FileTokenizer(prepared.tokenizer_path), [Blend((str(prepared.prefix),))] * 3
        identity = DataIdentity(f"python corpus {prepared.fingerprint}")
        return _open_files(config, blends, tokenizer, identity, data.split)
    if data.data_path or data.train_data_path:
        configured = configured_tokenizer(data, config.model.vocab_size)
        separate = data.train_data_path, data.valid_data_path, data.test_data_path
        paths = (data.data_path,) * 3 if data.data_path else separate
        train, valid, test = (Blend.parse(words) if words else None for words in paths)
        # The test set does not affect training, so it is not part of the identity.
        identity, split = DataIdentity.of_blends(train, valid), data.split if data.data_path else None
        return _open_files(config, (train, valid, test), configured, identity, split)
    return _open_mock(config) if data.mock_data else _open_synthetic(config, data.dataset_size or 0)


def build_datasets(
    opened: OpenedData, config: RunConfig, world: World, state: TrainState, folder: Path, display: Display
) -> Datasets:
    """Builds the datasets in the order recorded in the train state, extended if the run is longer.

    Local rank 0 of every node builds the order and writes the index cache; the other ranks wait and read
    it, or build the same order in memory.
    """
    require_same_data(opened.identity, world)
    wanted, validated, _ = required_samples(config)
    # A run that has used other batch sizes consumes a different number of samples than the plan.
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
    path, least_entries = folder / "order", _LEAST_CACHED_ENTRIES
    if config.data.data_cache_path is not None:
        path, least_entries = Path(config.data.data_cache_path), 0

    def build(writes_cache: bool) -> SplitDatasets:
        cache = IndexCache(path, writes_cache, least_entries, lambda text: display.say(f"note: {text}"))
        return opened.order(OrderSizes(state.ordered_for, state.valid_ordered_for), cache)

    built = run_on_some_ranks(world.local_rank == 0, lambda: build(True), world.all_ranks)
    datasets = Datasets(*(built or build(False)), opened.tokenizer, opened.names, opened.no_test)
    # Other names, or counts that do not add up, mean that the data was changed on purpose: count again.
    if not set(opened.names) <= set(state.drawn) or sum(state.drawn.values()) != state.consumed_samples:
        state.drawn = dict(datasets.drawn(0, state.consumed_samples))
    return datasets


def _open_files(
    config: RunConfig, blends: Blends, tokenizer: Tokenizer | None, identity: DataIdentity, split: str | None
) -> OpenedData:
    """Opens prepared files. With a `split`, all blends read their share of the same files."""
    sources: dict[str, IndexedDataset] = {}
    boundaries: dict[str, Boundaries | None] = {}
    parts: Parts = {}
    no_test, shares = "", parse_split(split) if split is not None else (1.0,) * 3
    for name, blend, size, share in zip(SPLIT_NAMES, blends, required_samples(config), shares, strict=True):
        if blend is None or size == 0 or share == 0:
            continue
        for prefix in blend.prefixes:
            if prefix not in sources:
                source = sources[prefix] = IndexedDataset(prefix, config.model.vocab_size)
                if tokenizer is not None:
                    require_same_tokenizer(source, tokenizer)
                boundaries[prefix] = boundaries_of(config.data, partial(_end_of_document, source, tokenizer))
        if name == "test" and split is not None:
            # The default split has a small test share: if it is too small for a sample, skip the test set.
            by_size = blend.weights is None and len(blend.prefixes) > 1
            least = config.model.seq_length + 1 if by_size else 1
            no_test = next(filter(None, (_too_small(sources[p], split, least) for p in blend.prefixes)), "")
            if no_test:
                continue
        documents = [gpt_dataset.require_share(sources[prefix], split, name) for prefix in blend.prefixes]
        members = [BlendMember(sources[p], d, boundaries[p]) for p, d in zip(blend.prefixes, documents)]
        # Separate files per split: a single file needs no weight.
        parts[name] = members, None if split is None and len(members) == 1 else blend.weights
    assert blends[0] is not None
    names = blends[0].prefixes
    return OpenedData(partial(_build_parts, config, parts), tokenizer, names, identity, no_test=no_test)


def _too_small(source: IndexedDataset, split: str, least: int) -> str:
    """Returns why the test share of a split is too small, or an empty string."""
    documents = gpt_dataset.split_documents(source, split)[-1]
    assert documents is not None
    tokens = int(source.sequence_lengths[documents.start : documents.stop].sum(dtype=np.int64))
    if tokens >= least:
        return ""
    return f"--split {split} leaves {tokens} tokens of {source.prefix} to test with, and {least} are needed"


def _build_parts(config: RunConfig, parts: Parts, numbers: OrderSizes, cache: IndexCache) -> SplitDatasets:
    data, model, seed = config.data, config.model, config.run.seed
    recipe = SampleRecipe(model.seq_length, seed, model.vocab_size, data.mid_level_dataset_surplus, cache)
    members, weights = parts["train"]
    if data.dataloader_type == "cyclic":
        # Repeats one fixed set of samples; only a weighted blend needs a size for that set.
        once = build_blend(members, weights, numbers.train[:1] if weights else None, recipe)
        train: SampleSource = EpochShuffle(once, seed)
    else:
        train = build_blend(members, weights, numbers.train, recipe)
    valid = test = None
    if "valid" in parts and config.train.full_validation:
        valid = build_blend(parts["valid"][0], None, None, recipe)
    elif "valid" in parts:
        valid = build_blend(*parts["valid"], numbers.valid, recipe)
    if "test" in parts:
        test = build_blend(*parts["test"], [required_samples(config).test], recipe)
    return SplitDatasets(train, valid, test)


def _open_conversations(config: RunConfig, world: World, folder: Path, display: Display) -> OpenedData:
    tokenizer = load_conversation_tokenizer(config, world)
    files, fingerprint = tokenize_conversations(config, tokenizer, world, folder, display)
    parts, no_test = build_conversations(config, files, display, required_samples(config))
    datasets, names = SplitDatasets(*parts), config.data.data_path
    return OpenedData(lambda *sizes: datasets, tokenizer, names, DataIdentity(fingerprint), False, no_test)


def _open_mock(config: RunConfig) -> OpenedData:
    vocabulary = config.model.vocab_size
    source = gpt_dataset.mock_sequences(vocabulary)
    ends = boundaries_of(config.data, lambda: source.eod)
    shares = gpt_dataset.split_documents(source, _MOCK_SPLIT)
    parts: Parts = {
        name: ([BlendMember(source, documents or range(0), ends)], None)
        for name, documents, size in zip(SPLIT_NAMES, shares, required_samples(config), strict=True)
        if size
    }
    identity = DataIdentity(f"mock {vocabulary}")
    return OpenedData(partial(_build_parts, config, parts), None, ("mock",), identity)


def _open_synthetic(config: RunConfig, size: int) -> OpenedData:
    vocabulary, seed = config.model.vocab_size, config.run.seed
    length, wanted = config.model.seq_length, required_samples(config)
    synthetic = SyntheticDataset(size, vocabulary, length, seed)
    # Samples of the same cycle that training never reads, however long the run becomes.
    settings = vocabulary, length, seed
    valid = SyntheticDataset(wanted.valid, *settings, size) if wanted.valid else None
    test = SyntheticDataset(wanted.test, *settings, _FIRST_TEST_SAMPLE) if wanted.test else None
    datasets = SplitDatasets(EpochShuffle(synthetic, seed), valid, test)
    identity = DataIdentity(f"synthetic {size} {vocabulary}")
    return OpenedData(lambda *sizes: datasets, None, ("synthetic",), identity, depends_on_length=False)


class SampleCounts(NamedTuple):
    """Numbers of samples to train, validate and test with."""

    train: int
    valid: int
    test: int


def required_samples(config: RunConfig) -> SampleCounts:
    """Returns the samples needed by training, all validations and the test, counted as in Megatron-LM."""
    train = config.train
    evaluated = train.eval_iters * config.eval_batch[0]
    validates = train.eval_interval or train.skip_train
    # Every validation continues after the samples of the previous one; one more follows the last step.
    times = train.train_iters // train.eval_interval + 1 if train.eval_interval else 1
    # Without an evaluation interval, only an explicitly named test set is used.
    tests = validates or config.data.test_data_path
    return SampleCounts(
        config.schedule_lengths.total, times * evaluated if validates else 0, evaluated if tests else 0
    )


def _end_of_document(source: IndexedDataset, tokenizer: Tokenizer | None) -> int:
    """Returns the end-of-document token of the configured tokenizer, or of that of the sidecar."""
    if tokenizer is not None:
        return tokenizer.eod
    if source.tokenizer is None or source.tokenizer.eod is None:
        raise UserError(
            f"the end-of-document token of {source.prefix} is unknown, but --reset-position-ids, --reset-attention-mask and "
            "--eod-mask-loss need it; name the tokenizer the data was prepared with (--tokenizer-type, --tokenizer-model)"
        )
    return source.tokenizer.eod


def load_conversation_tokenizer(config: RunConfig, world: World) -> Tokenizer:
    """Loads the tokenizer on every rank; an error on one rank is raised on all."""
    load = partial(configured_tokenizer, config.data, config.model.vocab_size)
    tokenizer = run_on_all_ranks(load, world.all_ranks)
    assert tokenizer is not None, "the rules refuse conversations without a tokenizer"
    return tokenizer


def configured_tokenizer(data: DataConfig, vocab_size: int | None) -> Tokenizer | None:
    """Returns the configured tokenizer, or None."""
    flags = (data.tokenizer_type, data.tokenizer_model, data.vocab_file, data.merge_file)
    if all(flag is None for flag in flags):
        return None
    kind, model, vocab_file, merge_file = flags
    return TokenizerSettings(kind, model, vocab_size, vocab_file, merge_file).load()


def resolve_epochs(
    resolved: Resolved, world: World, folder: Path, display: Display, own_data: bool = False
) -> Resolved:
    """Resolves the run length of `--epochs` by counting the samples of one epoch.

    Tokenized data stays in `folder`, where the run finds it when it opens its data. `own_data` means that
    the program supplies its own datasets, whose length is unknown here.
    """
    config = resolved.config
    if resolved.before_length is None:
        return resolved
    if own_data:
        if is_unset(config.train.train_iters):
            raise AgreedError(
                f"the number of steps of --epochs {config.train.epochs} is unknown, because the program supplies its own data; give --train-iters instead"
            )
        return resolved
    data = config.data
    if not data_paths.is_counted_in_run(data) and (
        not data_paths.training_files_flag(data) or data_paths.why_no_epochs(data)
    ):
        return resolved
    world.status.phase = "opening the data"
    counted = run_on_all_ranks(lambda: _count(config, world, folder, display), world.all_ranks)
    # Nodes with different data are detected later; until then all ranks need the same length, or they
    # would hang.
    samples = broadcast_object(counted, world.all_ranks)
    return run_on_all_ranks(lambda: resolved.with_epoch(samples), world.all_ranks)


def _count(config: RunConfig, world: World, folder: Path, display: Display) -> int:
    if config.data.sft:
        tokenizer = load_conversation_tokenizer(config, world)
        files, _ = tokenize_conversations(config, tokenizer, world, folder, display)
        return count_sequences(config, files)
    if config.data.corpus:
        prefixes = [str(prepare_corpus(config, world, folder, display).prefix)]
        return gpt_dataset.count_epoch_samples(prefixes, config.data.split, config.model.seq_length)
    return gpt_dataset.count_epoch_samples(*data_paths.training_files(config.data), config.model.seq_length)


def prepare_corpus(config: RunConfig, world: World, folder: Path, display: Display) -> PreparedCorpus:
    """Prepares the corpus on local rank 0 of every node; the other ranks wait, then find it prepared."""
    prepare = partial(prepare_python_corpus, folder, config.model.vocab_size, config.data.corpus_bytes)
    prepared = run_on_some_ranks(world.local_rank == 0, lambda: prepare(display.work), world.all_ranks)
    return prepared or prepare()
