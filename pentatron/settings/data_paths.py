"""Parses data paths and blends (`W1 P1 W2 P2`), and determines whether epochs of the data can be counted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pentatron.errors import UserError

if TYPE_CHECKING:
    from pentatron.settings.training import DataConfig

SPLITS = ("train", "valid", "test")
NAMED = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


@dataclass(frozen=True)
class Blend:
    """Prefixes of `.bin/.idx` pairs, and their sampling weights if any are given."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    @classmethod
    def parse(cls, words: Sequence[str], flag: str = "--data-path") -> "Blend":
        """Parses `P1 P2 P3` or `W1 P1 W2 P2`.

        Weights and prefixes alternate if the number of words is even and any word at an even index is a
        number; all words at even indices must then be numbers.
        """
        if not words:
            raise UserError(f"{flag} names no data; give the prefix of a .bin/.idx pair")
        weights = [_number(word) for word in words[::2]]
        if len(words) % 2 or all(weight is None for weight in weights):
            return cls(tuple(words))
        for word, weight in zip(words[::2], weights, strict=True):
            if weight is None:
                mixed = f"mixes prefixes with and without weights ('{word}' is not a weight)"
                raise UserError(f"{flag} {mixed}; give each prefix one, or none")
            if not (math.isfinite(weight) and weight > 0):
                problem = f"the weight {word} must be more than 0"
                raise UserError(f"{flag}: {problem}; leave its prefix out instead")
        return cls(tuple(words[1::2]), tuple(float(word) for word in words[::2]))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def training_files_flag(s: "DataConfig") -> str:
    """Returns the flag that names the `.bin/.idx` training pairs, or an empty string."""
    return "--data-path" if s.data_path else "--train-data-path" if s.train_data_path else ""


def training_files(s: "DataConfig") -> tuple[tuple[str, ...], str | None]:
    """Returns the prefixes of the training pairs and the value of `--split`, None if they are not split."""
    return Blend.parse(s.data_path or s.train_data_path or ()).prefixes, s.split if s.data_path else None


def is_counted_in_run(s: "DataConfig") -> bool:
    """Whether the length of an epoch is known only once the run has tokenized its data."""
    return bool(s.sft or s.corpus)


def why_no_epochs(s: "DataConfig") -> str:
    """Returns why the data has no epoch of a countable length, or an empty string."""
    if is_counted_in_run(s):
        return ""
    if s.mock_data:
        return "mock data has no epochs"
    blend = Blend.parse(s.data_path or s.train_data_path or ("",))
    is_drawn = blend.weights is not None and len(blend.prefixes) > 1
    return "weighted data is sampled by weight, so it has no epochs" if is_drawn else ""
