"""What ranks have to say, each sentence once."""

from collections.abc import Sequence

from pentatron.layout.ranks import ranks_in_words
from pentatron.parallel.collectives import gather_objects
from pentatron.parallel.world import World


def of_all_ranks(own: Sequence[str], world: World) -> list[str]:
    """The sentences of every rank, with the ranks that say it where not all do; every rank must ask."""
    by: dict[str, list[int]] = {}
    for rank, sentences in enumerate(gather_objects(list(own), world.everyone)):
        for sentence in dict.fromkeys(sentences):
            by.setdefault(sentence, []).append(rank)
    everyone = world.everyone.size
    return [s if len(ranks) == everyone else f"{s} ({ranks_in_words(ranks)})" for s, ranks in by.items()]
