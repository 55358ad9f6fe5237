"""The words that name data: prefixes with or without weights, and whether passes over them can be counted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pentatron.errors import UserError

if TYPE_CHECKING:
    from pentatron.settings.training import DataConfig

SPLITS = ("train", "valid", "test")
PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path")
NAMED = ("data_path", *PER_SPLIT)


@dataclass(frozen=True)
class Blend:
    """Prefixes of `.bin/.idx` pairs, and the share of each if the user gave any."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    @classmethod
    def parse(cls, words: Sequence[str], flag: str = "--data-path") -> "Blend":
        """`P1 P2 P3` or `W1 P1 W2 P2`: words are weights if every other one is a number, beginning with the first."""
        if not words:
            raise UserError(f"{flag} names no data; give the prefix of a .bin/.idx pair")
        weights = [_number(word) for word in words[::2]]
        if len(words) % 2 or all(weight is None for weight in weights):
            return cls(tuple(words))
        for word, weight in zip(words[::2], weights, strict=True):
            if weight is None:
                raise UserError(
                    f"{flag} mixes prefixes with and without weights ('{word}' stands where a weight should); give each "
                    "prefix one, or none"
                )
            if not (math.isfinite(weight) and weight > 0):
                raise UserError(
                    f"{flag}: the weight {word} must be more than 0; leave its prefix out instead"
                )
        return cls(tuple(words[1::2]), tuple(float(word) for word in words[::2]))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def names_files(s: "DataConfig") -> str:
    """The flag of the `.bin/.idx` pairs to train on; empty if there is none."""
    return "--data-path" if s.data_path else "--train-data-path" if s.train_data_path else ""


def trained_files(s: "DataConfig") -> tuple[tuple[str, ...], str | None]:
    """The prefixes of the pairs to train on, and how their documents are split; None where all of them are for training."""
    prefixes = Blend.parse(s.data_path or s.train_data_path or ()).prefixes
    return prefixes, s.split if s.data_path else None


def counted_by_the_run(s: "DataConfig") -> bool:
    """Whether the samples of one pass over the data are counted by the run, which tokenizes it."""
    return bool(s.sft or s.corpus)


def without_epochs(s: "DataConfig") -> str:
    """Why the samples of one pass over the data cannot be counted, or an empty text."""
    if counted_by_the_run(s):
        return ""
    if s.mock_data:
        return "mock data has no epochs"
    blend = Blend.parse(s.data_path or s.train_data_path or ("",))
    if blend.weights is not None and len(blend.prefixes) > 1:
        return "data with weights is drawn by its shares and has no epochs"
    return ""
