"""Runs `pentatron train FLAGS...` with faults planted in its workers.

`python -m tests.faults.entry FAULT... -- FLAGS...`; a FAULT is a word of `Fault.word`.
"""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from pentatron.cli.main import train_program
from pentatron.settings.entry_points import TRAIN
from tests.faults.injection import ALONE, Fault, Injector

if TYPE_CHECKING:
    from pentatron.train.model import Program

RESTART = ("-m", "tests.faults.entry")


def take_arguments(words: Sequence[str]) -> "tuple[list[str], Program]":
    middle = list(words).index("--")
    faults = [Fault.parse(word) for word in words[:middle]]
    Injector(faults, int(os.environ.get("RANK", ALONE))).install()
    # None is the configured program, which a launcher need not import.
    return list(words[middle + 1 :]), cast("Program", None)


if __name__ == "__main__":
    sys.exit(train_program(take_arguments, TRAIN, RESTART))
