"""Words for a failed distributed test: the rank that caused it first, then the others, then what they
printed."""

import linecache
import re
from collections.abc import Sequence
from pathlib import Path

from tests.harness.messages import Outcome

# One line of a stack as faulthandler writes it, innermost frame first.
STACK_LINE = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
# Gloo announces every group it connects; nobody debugging a test needs to know.
GLOO_CHATTER = re.compile(r"^\[Gloo\] Rank \d+ is connected to .*\n?", re.MULTILINE)
HARNESS_DIRECTORY = str(Path(__file__).parent)
OUTPUT_LIMIT = 100_000  # characters of output shown per rank


class RanksFailed(AssertionError):
    """At least one rank of a distributed run did not return. The message tells which, and how."""


def failure_text(outcomes: Sequence[Outcome]) -> str:
    """The whole message; its first line names the rank that most likely caused the failure."""
    failed = sorted((outcome for outcome in outcomes if not outcome.ok), key=suspicion)
    # Such a traceback only repeats that another rank is gone, so one rank's is enough, and only if nothing
    # else is known.
    told = [outcome for outcome in failed if not outcome.peer_lost] or failed[:1]
    paragraphs = outcome_paragraphs(told, world=len(outcomes))
    bereft = [outcome.rank for outcome in failed if outcome not in told]
    if bereft:
        paragraphs.append(f"lost the connection to another rank: rank {listed(bereft)}")
    returned = [outcome.rank for outcome in outcomes if outcome.ok]
    if returned:
        paragraphs.append(f"returned normally: rank {listed(returned)}")
    paragraphs += [output_text(outcome) for outcome in outcomes]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def outcome_paragraphs(outcomes: Sequence[Outcome], world: int) -> list[str]:
    """One paragraph per rank; the same traceback or stack is printed once."""
    paragraphs: list[str] = []
    first_with: dict[str, int] = {}
    for outcome in outcomes:
        details = details_text(outcome)
        first = first_with.setdefault(details, outcome.rank)
        if first != outcome.rank:
            details = f"(as rank {first})"
        paragraphs.append(f"rank {outcome.rank} of {world} {outcome.headline}\n{details}".rstrip())
    return paragraphs


def listed(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in sorted(ranks))


def suspicion(outcome: Outcome) -> tuple[bool, float]:
    """Sorts the likeliest cause first.

    A rank that misses a peer, or waits for one, suffers from what another did. Of the rest, the earliest: a
    rank notes the time of its exception before its connections close, hence before any other rank can fail
    because of
    it.
    """
    waits = outcome.unfinished and stands_in_collective(outcome.stack)
    return outcome.peer_lost or waits, outcome.at


def stands_in_collective(stack: str) -> bool:
    """Whether the main thread, which faulthandler puts last, waits for other ranks."""
    frames = list(STACK_LINE.finditer(stack.rpartition("hread 0x")[2]))
    if not frames:
        return False
    return "torch/distributed/" in frames[0]["file"] or ".wait(" in source_line(frames[0])


def details_text(outcome: Outcome) -> str:
    if outcome.traceback:
        return outcome.traceback
    return readable_stack(outcome.stack) or "(it left no Python stack)"


def readable_stack(stack: str) -> str:
    """A faulthandler stack with its source lines and without the harness's own frames."""
    lines: list[str] = []
    for line in stack.partition("\nExtension modules:")[0].splitlines():
        frame = STACK_LINE.fullmatch(line)
        if frame is None:
            lines.append(line)
        elif not frame["file"].startswith((HARNESS_DIRECTORY, "<frozen")):
            lines.append(line)
            lines.append(f"    {source_line(frame)}")
    return "\n".join(lines)


def source_line(frame: re.Match[str]) -> str:
    return linecache.getline(frame["file"], int(frame["line"])).strip()


def output_text(outcome: Outcome) -> str:
    output = GLOO_CHATTER.sub("", outcome.output)
    if not output.strip():
        return ""
    cut = ""
    if len(output) > OUTPUT_LIMIT:
        cut = f"[rank {outcome.rank}] ... the first {len(output) - OUTPUT_LIMIT} characters left out ...\n"
        output = output[-OUTPUT_LIMIT:]
    prefixed = "\n".join(f"[rank {outcome.rank}] {line}" for line in output.splitlines())
    return f"output of rank {outcome.rank}:\n{cut}{prefixed}"
