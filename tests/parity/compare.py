"""How parity is judged: as `pentatron verify` does."""

from pentatron.train.comparison import (
    GRADIENTS,
    NUMBERS,
    SMALL,
    WEIGHTS,
    Gap,
    assemble,
    failures,
    gaps,
    gathered,
    worst,
)

__all__ = [
    "GRADIENTS",
    "NUMBERS",
    "SMALL",
    "WEIGHTS",
    "Gap",
    "assemble",
    "failures",
    "gaps",
    "gathered",
    "worst",
]
