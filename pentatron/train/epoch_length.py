"""How long a run with `--epochs` is, where it tokenizes its data itself: the samples of a pass are counted first of all."""

from pathlib import Path

from pentatron.config.data_sources import counted_by_the_run
from pentatron.config.resolve import Resolved
from pentatron.config.run import RunConfig
from pentatron.data.gpt_dataset import documents_of, require_documents
from pentatron.data.indexed import IndexedDataset
from pentatron.data.sampling import epoch_samples
from pentatron.monitor.display import Display
from pentatron.parallel.collectives import broadcast_object, on_some_ranks
from pentatron.parallel.world import World
from pentatron.train.corpus import prepare_corpus
from pentatron.train.datasets import tokenizer_of_conversations
from pentatron.train.sft import count_sequences


def settle_epochs(resolved: Resolved, world: World, folder: Path, display: Display) -> Resolved:
    """The same configuration with its length. The tokens stay in `folder`, where the run finds them when it opens its data."""
    config = resolved.config
    if config.train.epochs is None or not counted_by_the_run(vars(config.data)):
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
    prepared, split = prepare_corpus(config, world, folder, display), config.data.split
    source = IndexedDataset(prepared.prefix, with_sidecar=False)
    documents = documents_of(source, split)[0] or range(0)
    require_documents(source, documents, split, "train")
    return epoch_samples(source.sequence_lengths, documents, config.model.seq_length)
