"""The training and validation samples a configuration asks for, and their order."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pentatron.config.data_sources import Blend
from pentatron.config.errors import UserError
from pentatron.config.run import RunConfig
from pentatron.config.training import DataConfig
from pentatron.data.blending import Member, SampleRecipe, build_blend
from pentatron.data.boundaries import Boundaries, Sample, boundaries_of
from pentatron.data.corpus import PreparedCorpus, Progress, prepare_python_corpus
from pentatron.data.epochs import EpochShuffle
from pentatron.data.gpt_dataset import documents_of, require_documents
from pentatron.data.index_cache import IndexCache
from pentatron.data.indexed import IndexedDataset, pair_paths
from pentatron.data.inspect import refuse_other_tokenizer
from pentatron.data.loader import SampleSource
from pentatron.data.sampling import SPLIT_NAMES, parse_split, split_ranges
from pentatron.data.synthetic import SyntheticDataset, mock_indexed
from pentatron.data.tokenizer import FileTokenizer, Tokenizer, load_tokenizer
from pentatron.monitor.display import Display
from pentatron.parallel.collectives import on_some_ranks
from pentatron.parallel.world import World
from pentatron.train.sft import build_conversations
from pentatron.train.state import TrainState

# As Megatron splits its mock data, whatever --split says.
_MOCK_SPLIT = "1,1,1"
# A smaller order takes less time to build than files take to be made.
_WORTH_A_FILE = 1 << 20


class TrainingSamples(Protocol):
    """Samples that know which dataset each of them comes from."""

    def __getitem__(self, index: int) -> Sample: ...

    def origins(self, samples: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]: ...


@dataclass(frozen=True)
class Datasets:
    """`names`: of the datasets that training draws from."""

    train: TrainingSamples
    valid: SampleSource | None
    tokenizer: Tokenizer | None
    names: tuple[str, ...]

    def drawn(self, first: int, stop: int) -> Counter[str]:
        """How many of the training samples from `first` on come from each dataset."""
        counts = np.bincount(self.train.origins(np.arange(first, stop)), minlength=len(self.names)).tolist()
        found: Counter[str] = Counter()
        for name, count in zip(self.names, counts, strict=True):
            # One corpus may have been named twice.
            found[name] += count
        return found


Order = Callable[[Sequence[int], IndexCache], tuple[TrainingSamples, SampleSource | None]]


@dataclass(frozen=True)
class OpenedData:
    """Data that was found and checked. `order` lays its samples out, for the numbers that the order was built for."""

    order: Order
    tokenizer: Tokenizer | None
    names: tuple[str, ...]
    # Two runs with the same one see the same samples; a resumed run insists on it.
    fingerprint: str
    # Whether the order depends on the number of samples it is built for.
    depends_on_length: bool = True


def open_data(config: RunConfig, world: World, data_folder: Path, display: Display) -> OpenedData:
    data = config.data
    if data.sft:
        return _open_conversations(config, world, data_folder, display)
    if data.corpus is not None:
        prepared = _prepare_corpus(config, world, data_folder, display)
        tokenizer = FileTokenizer(prepared.tokenizer_path)
        blend = Blend((str(prepared.prefix),))
        return _open_files(
            config, (blend, blend), tokenizer, f"python corpus {prepared.fingerprint}", data.split
        )
    if data.data_path or data.train_data_path:
        configured = configured_tokenizer(data, config.model.vocab_size)
        train = Blend.parse(data.data_path or data.train_data_path)
        valid = Blend.parse(data.valid_data_path) if data.valid_data_path else None
        blends = (train, train) if data.data_path else (train, valid)
        return _open_files(
            config, blends, configured, _fingerprint_of(blends), data.split if data.data_path else None
        )
    return _open_mock(config) if data.mock_data else _open_synthetic(config)


def arrange(
    opened: OpenedData, config: RunConfig, world: World, state: TrainState, folder: Path, display: Display
) -> Datasets:
    """The samples in the order that the run began with, or in a new one that is noted in its state.

    The first rank of every machine builds; the others wait and find what it left, or build the same in memory.
    """
    wanted, _ = wanted_samples(config)
    longer = not state.ordered_for or wanted > state.ordered_for[-1]
    if longer and state.ordered_for and opened.depends_on_length:
        display.say(
            f"note: samples were ordered for a run of {state.ordered_for[-1]}; they keep that order, and further epochs are "
            f"appended as far as {wanted} need them"
        )
    if longer:
        state.ordered_for = [*state.ordered_for, wanted]
    named = config.data.data_cache_path
    place = Path(named) if named is not None else folder / "order"
    least = 0 if named is not None else _WORTH_A_FILE

    def lay_out(builds: bool) -> tuple[TrainingSamples, SampleSource | None]:
        cache = IndexCache(place, builds, least, lambda text: display.say(f"note: {text}"))
        return opened.order(state.ordered_for, cache)

    train, valid = on_some_ranks(world.local_rank == 0, lambda: lay_out(True), world.everyone) or lay_out(
        False
    )
    datasets = Datasets(train, valid, opened.tokenizer, opened.names)
    if set(state.drawn) != set(opened.names) or sum(state.drawn.values()) != state.consumed_samples:
        state.drawn = dict(datasets.drawn(0, state.consumed_samples))
    return datasets


def _open_files(
    config: RunConfig,
    blends: tuple[Blend, Blend | None],
    tokenizer: Tokenizer | None,
    fingerprint: str,
    split: str | None,
) -> OpenedData:
    """With a `split` both blends read their part of the same files."""
    _, valid_samples = wanted_samples(config)
    sources: dict[str, IndexedDataset] = {}
    boundaries: dict[str, Boundaries | None] = {}
    members: list[list[Member] | None] = []
    for name, blend, size in zip(SPLIT_NAMES, blends, (1, valid_samples), strict=False):
        if blend is None or size == 0 or (split is not None and not _share(split, name)):
            members.append(None)
            continue
        members.append([])
        for prefix in blend.prefixes:
            if prefix not in sources:
                sources[prefix] = IndexedDataset(prefix, config.model.vocab_size)
                if tokenizer is not None:
                    refuse_other_tokenizer(sources[prefix], tokenizer)
                boundaries[prefix] = _boundaries(config.data, sources[prefix], tokenizer)
            members[-1].append(_part(sources[prefix], split, name, boundaries[prefix]))  # type: ignore[union-attr]
    train, valid = members
    assert train is not None, "the rules refuse a split without a training share"
    # A split with files of its own and only one of them has nothing to weigh.
    weights = [
        None if blend is None or (split is None and len(blend.prefixes) == 1) else blend.weights
        for blend in blends
    ]
    return OpenedData(
        lambda numbers, cache: _laid_out(config, (train, valid), weights, numbers, cache),
        tokenizer,
        blends[0].prefixes,
        fingerprint,
    )


def _share(split: str, name: str) -> float:
    return parse_split(split)[SPLIT_NAMES.index(name)]


def _part(source: IndexedDataset, split: str | None, name: str, boundaries: Boundaries | None) -> Member:
    if split is None:
        return Member(source, range(len(source)), boundaries)
    documents = documents_of(source, split)[SPLIT_NAMES.index(name)]
    assert documents is not None
    require_documents(source, documents, split, name)
    return Member(source, documents, boundaries)


def _boundaries(data: DataConfig, source: IndexedDataset, tokenizer: Tokenizer | None) -> Boundaries | None:
    return boundaries_of(data, lambda: _end_of_document(source, tokenizer))


def _laid_out(
    config: RunConfig,
    members: tuple[list[Member], list[Member] | None],
    weights: Sequence[Sequence[float] | None],
    numbers: Sequence[int],
    cache: IndexCache,
) -> tuple[TrainingSamples, SampleSource | None]:
    data, (_, valid_samples) = config.data, wanted_samples(config)
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
        once = build_blend(members[0], weights[0], numbers[:1] if weights[0] else None, recipe)
        train = EpochShuffle(once, config.run.seed)
    else:
        train = build_blend(members[0], weights[0], numbers, recipe)
    if members[1] is None or not valid_samples:
        return train, None
    if config.train.full_validation:
        return train, build_blend(members[1], None, None, recipe)
    # Always the same samples, however long the run is: losses of several validations can then be compared.
    return train, build_blend(members[1], weights[1], [valid_samples], recipe)


def _open_conversations(config: RunConfig, world: World, folder: Path, display: Display) -> OpenedData:
    tokenizer = configured_tokenizer(config.data, config.model.vocab_size)
    assert tokenizer is not None, "the rules refuse conversations without a tokenizer"
    cache = config.data.data_cache_path
    place = folder if cache is None else Path(cache)
    validates = wanted_samples(config)[1] > 0
    train, valid, fingerprint = build_conversations(config, tokenizer, world, place, display, validates)
    names = config.data.data_path
    return OpenedData(lambda _, __: (train, valid), tokenizer, names, fingerprint, depends_on_length=False)


def _open_mock(config: RunConfig) -> OpenedData:
    vocabulary = config.model.vocab_size
    assert vocabulary is not None
    source = mock_indexed(vocabulary)
    train, valid, _ = split_ranges(parse_split(_MOCK_SPLIT), len(source))
    assert train is not None and valid is not None
    ends = boundaries_of(config.data, lambda: source.eod)
    members = [Member(source, train, ends)], [Member(source, valid, ends)]
    return OpenedData(
        lambda numbers, cache: _laid_out(config, members, (None, None), numbers, cache),
        None,
        ("mock",),
        f"mock {vocabulary}",
    )


def _open_synthetic(config: RunConfig) -> OpenedData:
    data, vocabulary, seed = config.data, config.model.vocab_size, config.run.seed
    length, (_, valid_samples) = config.model.seq_length, wanted_samples(config)
    assert data.dataset_size is not None and vocabulary is not None
    synthetic = SyntheticDataset(data.dataset_size, vocabulary, length, seed)
    # Walks around the same cycle, which training has not seen.
    unseen = SyntheticDataset(max(1, valid_samples), vocabulary, length, seed, first=data.dataset_size)
    valid = unseen if valid_samples else None
    return OpenedData(
        lambda numbers, cache: (EpochShuffle(synthetic, seed), valid),
        None,
        ("synthetic",),
        f"synthetic {data.dataset_size} {vocabulary}",
        depends_on_length=False,
    )


def wanted_samples(config: RunConfig) -> tuple[int, int]:
    """How many samples training and one validation need."""
    train = config.train
    assert train.train_iters is not None and train.global_batch_size is not None
    valid = train.eval_iters * train.global_batch_size if train.eval_interval else 0
    return max(1, train.train_iters) * train.global_batch_size, valid


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


def configured_tokenizer(data: DataConfig, vocab_size: int | None) -> Tokenizer | None:
    """The tokenizer the user named, if any."""
    named = (data.tokenizer_type, data.tokenizer_model, data.vocab_file, data.merge_file)
    if all(name is None for name in named):
        return None
    return load_tokenizer(
        data.tokenizer_type, data.tokenizer_model, vocab_size, data.vocab_file, data.merge_file
    )


def _prepare_corpus(config: RunConfig, world: World, folder: Path, display: Display) -> PreparedCorpus:
    """The first rank of every machine prepares; the others wait and then find it ready."""
    vocabulary = config.model.vocab_size
    assert vocabulary is not None

    def prepare(progress: Progress | None = None) -> PreparedCorpus:
        return prepare_python_corpus(folder, vocabulary, config.data.corpus_bytes, progress)

    first_here = world.local_rank == 0
    prepared = on_some_ranks(first_here, lambda: prepare(display.work), world.everyone) or prepare()
    display.say(
        f"corpus: Python's standard library, {prepared.documents} files, {prepared.bytes / 1e6:.1f} MB, "
        f"{prepared.tokens:,} tokens, vocabulary {vocabulary}"
    )
    return prepared


def _fingerprint_of(blends: tuple[Blend, Blend | None]) -> str:
    """Of one corpus that of its files; of several, of all of them and their weights."""
    train, valid = blends
    if train.weights is None and len(train.prefixes) == 1 and valid == train:
        return _fingerprint(Path(train.prefixes[0]))
    named = [
        [list(blend.weights or ()), [_fingerprint(Path(prefix)) for prefix in blend.prefixes]]
        for blend in blends
        if blend is not None
    ]
    return f"blend {hashlib.sha256(json.dumps(named).encode()).hexdigest()}"


def _fingerprint(prefix: Path) -> str:
    """The whole index, and the size of the tokens it describes: they may be too many to read before every start."""
    binary, index = pair_paths(prefix)
    if not (binary.exists() and index.exists()):
        return ""
    with index.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{digest} {binary.stat().st_size}"
