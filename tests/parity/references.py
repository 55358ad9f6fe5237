"""Runs a layout and its reference on one process, for the tests of the net.

Not in a test module: a rank would import it, and computing its list of cases takes longer than a run.
"""

import functools

from pentatron.compare.trial import Trajectory
from tests.harness import run_distributed
from tests.parity.cases import LAYOUTS, MIXTURES, Layout
from tests.parity.mixtures import MIXTURE_LAYOUTS
from tests.parity.trajectory import on_a_rank, run

TIMEOUT = 180.0
# The third step is the first whose gradients depend on a second update, which uses the moments of the first.
# All planted bugs are detected by then. `make parity` runs five steps.
SHORT = "--train-iters 3"
BY_NAME = {layout.name: layout for layout in LAYOUTS}
MIXTURES_BY_NAME = {layout.name: layout for layout in MIXTURE_LAYOUTS}


def named(layout: str, family: str) -> Layout:
    return (MIXTURES_BY_NAME if family in MIXTURES else BY_NAME)[layout]


@functools.cache
def on_one_process(words: str) -> Trajectory:
    return run(words, 1)


def reference(layout: Layout, family: str) -> Trajectory:
    """Runs the layout's model on one process."""
    return on_one_process(f"{layout.alone(family)} {SHORT}")


def spread(layout: Layout, family: str, bug: str = "") -> list[Trajectory]:
    return run_distributed(
        on_a_rank, layout.ranks, timeout=TIMEOUT, words=f"{layout.command(family)} {SHORT}", bug=bug
    )
