"""Failure message of a distributed test: first the rank that caused it, then the others, then output."""

import linecache
import re
from collections.abc import Sequence
from pathlib import Path

from tests.harness.messages import Outcome

# One line of a stack as faulthandler writes it, innermost frame first.
STACK_LINE = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
# Gloo prints a line for every group that it connects, which does not help to debug a test.
GLOO_CHATTER = re.compile(r"^\[Gloo\] Rank \d+ is connected to .*\n?", re.MULTILINE)
HARNESS_DIRECTORY = str(Path(__file__).parent)
OUTPUT_LIMIT = 100_000  # characters of output shown per rank


class RanksFailed(AssertionError):
    """Raised if a rank of a distributed run did not return; the message names the rank and the reason."""


def failure_text(outcomes: Sequence[Outcome]) -> str:
    """Returns the message; its first line names the rank that most likely caused the failure."""
    failed = sorted((outcome for outcome in outcomes if not outcome.ok), key=suspicion)
    # A traceback about a lost peer only repeats that another rank is gone: one is shown, and only if there is
    # nothing else.
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
    """Returns one paragraph per rank; equal tracebacks or stacks are printed once."""
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
    """Sort key: the most likely cause comes first.

    A rank that lost a peer, or waits for one, suffers from another rank's failure. Of the rest, the earliest
    failed first: a rank notes the time of its exception before its connections close, hence before any other
    rank can fail because of it.
    """
    waits = outcome.unfinished and stands_in_collective(outcome.stack)
    return outcome.peer_lost or waits, outcome.at


def stands_in_collective(stack: str) -> bool:
    """Whether the main thread, which faulthandler prints last, waits for other ranks."""
    frames = list(STACK_LINE.finditer(stack.rpartition("hread 0x")[2]))
    if not frames:
        return False
    return "torch/distributed/" in frames[0]["file"] or ".wait(" in source_line(frames[0])


def details_text(outcome: Outcome) -> str:
    if outcome.traceback:
        return outcome.traceback
    return readable_stack(outcome.stack) or "(it left no Python stack)"


def readable_stack(stack: str) -> str:
    """Returns a faulthandler stack with source lines and without frames of the harness."""
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
