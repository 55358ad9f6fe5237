"""The training and validation samples a configuration asks for."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pentatron.config.errors import UserError
from pentatron.config.run import RunConfig
from pentatron.config.training import DataConfig
from pentatron.data.boundaries import boundaries_of
from pentatron.data.corpus import PreparedCorpus, Progress, prepare_python_corpus
from pentatron.data.epochs import EpochShuffle
from pentatron.data.gpt_dataset import GPTDataset, open_splits
from pentatron.data.indexed import IndexedDataset, pair_paths
from pentatron.data.inspect import refuse_other_tokenizer
from pentatron.data.loader import SampleSource
from pentatron.data.synthetic import SyntheticDataset, mock_indexed
from pentatron.data.tokenizer import FileTokenizer, Tokenizer, load_tokenizer
from pentatron.monitor.display import Display
from pentatron.parallel.collectives import on_some_ranks
from pentatron.parallel.world import World


@dataclass(frozen=True)
class Datasets:
    train: SampleSource
    valid: SampleSource | None
    tokenizer: Tokenizer | None
    # Two runs with the same one see the same samples; a resumed run insists on it.
    fingerprint: str


def build_datasets(config: RunConfig, world: World, data_folder: Path, display: Display) -> Datasets:
    data, vocabulary = config.data, config.model.vocab_size
    train_samples, valid_samples = wanted_samples(config)
    length, seed = config.model.seq_length, config.run.seed
    if data.corpus is not None or data.data_path:
        tokenizer: Tokenizer | None
        if data.corpus is not None:
            prepared = _prepare_corpus(config, world, data_folder, display)
            prefix, tokenizer = prepared.prefix, FileTokenizer(prepared.tokenizer_path)
            fingerprint = f"python corpus {prepared.fingerprint}"
        else:
            prefix, tokenizer = Path(data.data_path[0]), configured_tokenizer(data, vocabulary)
            fingerprint = _fingerprint(prefix)
        boundaries = boundaries_of(data, lambda: _end_of_document(prefix, tokenizer))
        sizes = (train_samples, valid_samples, 0)
        splits = open_splits(prefix, data.split, sizes, length, seed, vocabulary, boundaries)
        train, valid = splits[0], splits[1]
        assert train is not None, "the rules refuse a split without a training share"
        if tokenizer is not None and isinstance(train.source, IndexedDataset):
            refuse_other_tokenizer(train.source, tokenizer)
        return Datasets(train, valid, tokenizer, fingerprint)
    assert vocabulary is not None
    if data.mock_data:
        source = mock_indexed(vocabulary)
        ends = boundaries_of(data, lambda: source.eod)
        return Datasets(
            GPTDataset(source, range(len(source)), train_samples, length, seed, boundaries=ends),
            None,
            None,
            f"mock {vocabulary}",
        )
    assert data.dataset_size is not None
    synthetic = SyntheticDataset(data.dataset_size, vocabulary, length, seed)
    # Walks around the same cycle, which training has not seen.
    unseen = SyntheticDataset(max(1, valid_samples), vocabulary, length, seed, first=data.dataset_size)
    fingerprint = f"synthetic {data.dataset_size} {vocabulary}"
    return Datasets(EpochShuffle(synthetic, seed), unseen if valid_samples else None, None, fingerprint)


def wanted_samples(config: RunConfig) -> tuple[int, int]:
    """How many samples training and one validation need."""
    train = config.train
    assert train.train_iters is not None and train.global_batch_size is not None
    valid = train.eval_iters * train.global_batch_size if train.eval_interval else 0
    return max(1, train.train_iters) * train.global_batch_size, valid


def _end_of_document(prefix: Path, tokenizer: Tokenizer | None) -> int:
    """The tokenizer that was named knows, or the one the data was prepared with."""
    if tokenizer is not None:
        return tokenizer.eod
    facts = IndexedDataset(prefix).facts
    known = None if facts is None else facts.tokenizer
    if known is None or known.eod is None:
        raise UserError(
            f"which token ends a document of {prefix} is not known, and --reset-position-ids, --reset-attention-mask and "
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


def _fingerprint(prefix: Path) -> str:
    """The whole index, and the size of the tokens it describes: they may be too many to read before every start."""
    binary, index = pair_paths(prefix)
    if not (binary.exists() and index.exists()):
        return ""
    with index.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{digest} {binary.stat().st_size}"
