"""Compares layouts of processes that share the GPU, over NCCL or gloo, with one process on it."""

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pentatron.compare.trial import GRADIENT_TOLERANCES, Trajectory, gaps, gather_tensors
from tests.cuda import on_ranks
from tests.cuda.trials import Found, Rows
from tests.harness import GLOO, NCCL, run_distributed
from tests.harness.report import RanksFailed
from tests.megatron import objectives as user_losses
from tests.parity.bugs import BUGS
from tests.parity.cases import FAMILIES, LAYOUTS, MIXTURES, Layout
from tests.parity.judge import Task, judged
from tests.parity.mixtures import MIXTURE_LAYOUTS
from tests.parity.trajectory import run
from tests.parity.verdicts import disagreements, failures, largest_gap

TIMEOUT = 220.0
Cases = Sequence[tuple[str, str]]
# Every layout, with the families in turn.
EVERY = [
    (layout.name, family)
    for layouts, families in ((LAYOUTS, FAMILIES), (MIXTURE_LAYOUTS, MIXTURES))
    for layout, family in zip(layouts, itertools.cycle(families))
]
# One layout of each axis, for checks that compile again in every layout.
EACH_AXIS = (
    ("tp2 sp", "qwen3"),
    ("dp2 zero1 overlap", "llama"),
    ("dp2 zero3", "qwen2.5"),
    ("pp2", "llama"),
    ("cp2 all_gather", "qwen3"),
    ("ep2", "qwen3-moe"),
)


@functools.cache
def named(layout: str, family: str) -> Layout:
    return next(x for x in (MIXTURE_LAYOUTS if family in MIXTURES else LAYOUTS) if x.name == layout)


def of_size(ranks: int) -> Cases:
    return [case for case in EVERY if named(*case).ranks == ranks]


def in_batches(cases: Cases, count: int) -> list[Cases]:
    """Deals cases out in turn, so that similar layouts get into different batches."""
    return [cases[n::count] for n in range(count)]


@functools.cache
def alone(words: str, device: str) -> Trajectory:
    return run(words, 1, device)


def experts_in_pipelines(ranks: int) -> Cases:
    """Returns every layout of experts with a pipeline: each schedule, both dispatchers."""
    return [case for case in of_size(ranks) if case[1] in MIXTURES and "pp2" in case[0]]


def over_nccl(cases: Cases, more: str, device: str) -> Rows:
    """Runs layouts over NCCL, or over gloo in a rehearsal on a CPU."""
    rows = layouts(cases, more, device, NCCL if device == "cuda" else GLOO)
    return {f"{name}, NCCL": row for name, row in rows.items()}


def layouts(cases: Cases, more: str, device: str, backend: str = GLOO) -> Rows:
    commands = {case: f"{named(*case).command(case[1])} {more}" for case in cases}
    ranks = named(*cases[0]).ranks
    try:
        found = run_distributed(
            on_ranks.several,
            ranks,
            timeout=TIMEOUT,
            backend=backend,
            commands=list(commands.values()),
            device=device,
        )
    except RanksFailed as error:
        if len(cases) == 1:
            return {_shown(*cases[0]): Found(float("inf"), note=str(error).strip().splitlines()[-1])}
        # Runs the cases one by one, to find the failed one and the results of the others.
        return {name: row for case in cases for name, row in layouts([case], more, device, backend).items()}
    by_layout = zip(*found)
    return {_shown(*case): _judged(case, more, device, seen) for case, seen in zip(commands, by_layout)}


def _judged(case: tuple[str, str], more: str, device: str, seen: Iterable[Trajectory]) -> Found:
    ranks = list(seen)
    found = gaps(ranks, alone(f"{named(*case).alone(case[1])} {more}", device))
    if unequal := disagreements(ranks):
        return Found(float("inf"), note=f"copies differ: {unequal[0]}")
    return Found(largest_gap(found).ratio, note=largest_gap(found).what if failures(found) else "")


def _shown(layout: str, family: str) -> str:
    return f"{layout} ({family})"


def objectives(layout: str, device: str) -> Rows:
    """Compares loss functions of users on ranks over NCCL with a plain loop on the GPU."""
    ranks, words, context = user_losses.LAYOUTS[layout]
    found = run_distributed(
        user_losses.several,
        ranks,
        timeout=TIMEOUT,
        backend=NCCL if device == "cuda" else GLOO,
        words=f"{words} --micro-batch-size 2",
        cases=user_losses.CASES,
        device=device,
    )
    rows: Rows = {}
    for case, seen in zip(user_losses.CASES, zip(*found), strict=True):
        gradients, _, _ = user_losses.plain_loop(2, *case, context, device=device)
        gap = user_losses.distance(
            gather_tensors([trajectory for trajectory, _, _ in seen], "gradients 1"), gradients
        )
        rows[f"{case[0]} ({case[1]}), {layout}"] = Found(gap / GRADIENT_TOLERANCES[1])
    return rows


def smallest_bugs(count: int) -> list[str]:
    """Returns planted bugs of layouts with two processes, each of another layout."""
    by_layout: dict[str, str] = {}
    for bug, (_, family, layout) in BUGS.items():
        if named(layout, family).ranks == 2:
            by_layout.setdefault(layout, bug)
    return list(by_layout.values())[:count]


def planted_bug(bug: str, more: str, device: str) -> Rows:
    """Returns the gap of a planted bug as a control; the share of a sound process is 0."""
    _, family, layout = BUGS[bug]
    case = named(layout, family)
    with_more = replace(case, both=f"{case.both} {more}")
    cell = judged(Task(with_more, family, device, bug))
    return {f"{bug} ({layout}, {family})": Found(0.0, {bug: largest_gap(cell.judged).ratio})}
