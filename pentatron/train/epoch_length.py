"""How long a run with `--epochs` is, where it tokenizes its data itself, or its ranks must agree: the samples of a pass are counted first of all."""

from pathlib import Path

from pentatron.config.blend import counted_by_the_run, names_files, trained_files, without_epochs
from pentatron.config.resolve import Resolved
from pentatron.config.run import RunConfig
from pentatron.config.settings import unset
from pentatron.data.epoch_of_files import samples_of_files
from pentatron.errors import AgreedError
from pentatron.monitor.display import Display
from pentatron.parallel.collectives import broadcast_object, on_some_ranks
from pentatron.parallel.world import World
from pentatron.train.corpus import prepare_corpus
from pentatron.train.datasets import tokenizer_of_conversations
from pentatron.train.sft import count_sequences


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
