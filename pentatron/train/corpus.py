"""The corpus that a configuration with `--corpus` asks for."""

from pathlib import Path

from pentatron.config.run import RunConfig
from pentatron.data.corpus import PreparedCorpus, Progress, prepare_python_corpus
from pentatron.monitor.display import Display
from pentatron.parallel.collectives import on_some_ranks
from pentatron.parallel.world import World


def prepare_corpus(config: RunConfig, world: World, folder: Path, display: Display) -> PreparedCorpus:
    """The first rank of every machine prepares; the others wait and then find it ready."""
    vocabulary = config.model.vocab_size

    def prepare(progress: Progress | None = None) -> PreparedCorpus:
        return prepare_python_corpus(folder, vocabulary, config.data.corpus_bytes, progress)

    first_here = world.local_rank == 0
    return on_some_ranks(first_here, lambda: prepare(display.work), world.everyone) or prepare()
