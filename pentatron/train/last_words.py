"""What a run failed with, as the last line of its log: who looks back at it finds the reason there, not only on a terminal."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from pentatron.errors import AgreedError, UserError
from pentatron.monitor.report import FAILED
from pentatron.monitor.terminal import append_line
from pentatron.train.interrupt import StoppedEarly
from pentatron.train.run_folder import RunFolder

if TYPE_CHECKING:
    from pentatron.parallel.world import World

# The sentence for an error, or None where this rank has nothing to say of it.
Sentence = Callable[[BaseException], str | None]


def sentence_of(error: BaseException) -> str | None:
    """An error of the user's as it is, another by its name; an end that somebody asked for is none."""
    if isinstance(error, UserError):
        return str(error)
    if not isinstance(error, Exception):
        return None
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def write_last_words(folder: RunFolder, world: "World", error: BaseException, sentence: Sentence) -> None:
    """Into the log of the run's folder, which must be ours. What all ranks say alike, the first writes."""
    if isinstance(error, StoppedEarly):
        if world.is_first:
            append_line(folder.log, str(error))
        return
    agreed = isinstance(error, AgreedError)
    text = sentence(error) if world.is_first or not agreed else None
    if text is None:
        return
    of_rank = "" if agreed or world.everyone.size == 1 else f"rank {world.everyone.rank}: "
    # A full disk may be what the run failed with.
    append_line(folder.log, f"{FAILED}{of_rank}{' '.join(text.split())}")
