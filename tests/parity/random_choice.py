"""Draws values for random cases."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pentatron.settings.run_config import all_settings

Item = TypeVar("Item")

# Probability of a value that may not fit the others.
_CARELESS = 0.02


class Dice:
    def __init__(self, name: str) -> None:
        self.random = random.Random(name)

    def often(self, share: float) -> bool:
        return self.random.random() < share

    def of(self, *options: Item) -> Item:
        return self.random.choice(options)

    def weighted(self, options: Mapping[Item, float]) -> Item:
        return self.random.choices(list(options), list(options.values()))[0]

    def number(self, least: int, most: int) -> int:
        return self.random.randint(least, max(least, most))

    def some(self, options: Sequence[Item], most: int) -> list[Item]:
        """Draws one or several of the options, in their order."""
        chosen = self.random.sample(range(len(options)), self.number(1, min(most, len(options))))
        return [options[i] for i in sorted(chosen)]

    def careless(self) -> bool:
        return self.often(_CARELESS)


def available(name: str) -> list[Any]:
    """Returns the choices of a setting that are built; new ones are drawn as soon as they are built."""
    item = all_settings()[name]
    return [choice for choice in item.choices if not item.refuses(choice)]
