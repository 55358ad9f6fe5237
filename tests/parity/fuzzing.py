"""Runs random cases, judges them as parity does, and makes a failing one smaller."""

import dataclasses
import math
import multiprocessing
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import pentatron.compare.trial as trial_module
from pentatron.compare.trial import Trajectory, gap_size, gaps
from pentatron.errors import UserError
from pentatron.train.model import ParallelModel
from tests.harness import run_distributed
from tests.harness.report import RanksFailed
from tests.parity.random_cases import Case, draw, setting_of
from tests.parity.trajectory import on_a_rank, run
from tests.parity.verdicts import disagreements, failures, largest_gap

TIMEOUT = 90.0
# Two experts with scores closer than this may swap when sums are rounded in another order.
TIE = 2e-5
# Half the distance between neighbouring fp32 numbers, relative to them.
ROUNDING = 3e-8
_OTHER_SEEDS = 4


class Margins(TorchFunctionMode):
    """Records the smallest margin between the last chosen and the first rejected score of any `topk`."""

    def __init__(self) -> None:
        super().__init__()
        self.closest = math.inf

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.topk:
            self._look(*args, **kwargs)
        return func(*args, **kwargs)

    def _look(self, scores: torch.Tensor, k: int, dim: int = -1) -> None:
        if k == scores.shape[dim]:
            return
        best = scores.detach().topk(k + 1, dim).values
        chosen, missed = best.select(dim, k - 1), best.select(dim, k)
        # Not ties: scores of 0 (an expert has no tokens left to choose) and of -inf (a group of experts was
        # not chosen).
        real = chosen.isfinite() & missed.isfinite() & chosen.ne(0)
        if real.any():
            self.closest = min(self.closest, float((chosen - missed)[real].min()))


def alone_on_a_rank(words: str) -> tuple[Trajectory, float]:
    """Runs one process; also returns the smallest margin of a choice of experts."""
    with Margins() as margins:
        seen = run(words, 1)
    return seen, margins.closest


@dataclass(frozen=True)
class Outcome:
    """Result of a case; it agrees if neither `refused` nor `failed` is set.

    `refused`: the error of the configuration. `failed`: what went wrong. `share`: the largest gap as a share
    of what is allowed. `ties`: the smallest margin of a choice of experts, for every seed that was rejected
    because of a tie.
    """

    refused: str = ""
    failed: tuple[str, ...] = ()
    share: float = 0.0
    ties: tuple[float, ...] = ()


def judged(case: Case, bug: str = "", timeout: float = TIMEOUT) -> Outcome:
    """Compares a case with one process.

    If experts have almost equal scores, two correct runs may choose different experts and diverge. A case
    that disagrees and has such a tie is therefore run again with another seed, where a real mistake would
    show too.
    """
    try:
        config = case.config()
    except UserError as error:
        return Outcome(refused=str(error))
    # A router with a capacity compares rounded weights, and a weight at a rounding edge may fall on either
    # side.
    in_steps = config.moe.num_experts is not None and config.moe.moe_expert_capacity_factor is not None
    ties: list[float] = []
    while True:
        failed, share, closest = _compared(with_other_seed(case, len(ties)), bug, timeout)
        tie = closest < TIE or (in_steps and closest < math.inf)
        if not failed or not tie or len(ties) == _OTHER_SEEDS:
            return Outcome(failed=failed, share=share, ties=tuple(ties))
        ties.append(closest)


def with_other_seed(case: Case, more: int) -> Case:
    """Returns the same model with other initial weights."""
    seed = case.config().run.seed
    others = tuple(trait for trait in case.traits if not trait.startswith("--seed "))
    return case if more == 0 else Case(case.ranks, (*others, f"--seed {seed + more}"))


def _compared(case: Case, bug: str, timeout: float) -> tuple[tuple[str, ...], float, float]:
    """Returns what failed, the largest gap, and the smallest margin of a choice of experts."""
    try:
        [(expected, closest)] = run_distributed(alone_on_a_rank, 1, timeout=timeout, words=case.reference())
        found = run_distributed(on_a_rank, case.ranks, timeout=timeout, words=case.command, bug=bug)
    except RanksFailed as error:
        return tuple(str(error).strip().splitlines()), math.inf, math.inf
    judgement = gaps(found, expected)
    apart = [f"{place} differs from another rank's" for place in disagreements(found)]
    # A tie does not excuse ranks that raise, hang or hold different copies.
    return (*failures(judgement), *apart), gap_size(largest_gap(judgement)), math.inf if apart else closest


def nudged_on_a_rank(words: str, share: float) -> Trajectory:
    """Runs one process, with every initial weight changed by about this share of itself."""
    reveal = trial_module.perturb_norms_and_biases

    def nudge(model: ParallelModel) -> None:
        reveal(model)
        generator = torch.Generator().manual_seed(1)
        for stage in model.stages.values():
            for weights in stage.parameters():
                weights.data.mul_(1 + share * torch.randn(weights.shape, generator=generator))

    trial_module.perturb_norms_and_biases = nudge
    return run(words, 1)


def sensitivity(case: Case) -> float:
    """Returns the gap caused by rounding the initial weights, as a share of what is allowed.

    If it is far above 1, the model amplifies rounding errors so much that no correct layout can agree.
    """
    one, other = (
        run_distributed(nudged_on_a_rank, 1, timeout=TIMEOUT, words=case.reference(), share=share)
        for share in (0.0, ROUNDING)
    )
    return gap_size(largest_gap(gaps(other, one[0])))


@dataclass
class Tally:
    """Counts of the cases run so far."""

    run: int = 0
    refused: int = 0
    # Cases that were run again, with the smallest margin for each seed.
    ties: dict[int, tuple[float, ...]] = field(default_factory=dict)
    failures: list[tuple[int, Case, Outcome]] = field(default_factory=list)
    share: float = 0.0

    def count(self, number: int, case: Case, outcome: Outcome) -> None:
        if outcome.refused:
            self.refused += 1
            return
        self.run += 1
        if outcome.ties:
            self.ties[number] = outcome.ties
        if outcome.failed:
            self.failures.append((number, case, outcome))
        else:
            self.share = max(self.share, outcome.share)

    def in_words(self) -> str:
        agree = self.run - len(self.failures)
        words = f"{agree} agree, {len(self.failures)} fail, {self.refused} refused"
        ties = f", {len(self.ties)} asked again because of a tie" if self.ties else ""
        return f"{words}{ties}; largest gap {self.share:.0%} of what is allowed"


@dataclass(frozen=True)
class Campaign:
    """A series of random cases.

    `wanted`: number of cases to run, without refused ones. `seconds`: time after which no further case is
    run. `only`: text that a case must contain.
    """

    seed: int
    wanted: int
    seconds: float = math.inf
    only: str = ""
    keep_going: bool = False
    bug: str = ""
    jobs: int = 1

    def cases(self) -> Iterator[tuple[int, Case]]:
        number = 0
        while True:
            case = draw(self.seed, number)
            if self.only in case.words:
                yield number, case
            number += 1

    def run(self, tally: Tally, tell: Callable[[Tally, float], None]) -> None:
        """Runs cases, and calls `tell` after each with the seconds since the start."""
        started = time.monotonic()
        for number, case, outcome in self._outcomes():
            tally.count(number, case, outcome)
            passed = time.monotonic() - started
            tell(tally, passed)
            stop = bool(outcome.failed) and not self.keep_going
            if stop or tally.run >= self.wanted or passed >= self.seconds:
                return

    def _outcomes(self) -> Iterator[tuple[int, Case, Outcome]]:
        """Yields outcomes in the order of the cases, even if several run in parallel."""
        if self.jobs == 1:
            for number, case in self.cases():
                yield number, case, judged(case, self.bug)
            return
        pool = ProcessPoolExecutor(self.jobs, mp_context=multiprocessing.get_context("spawn"))
        waiting: deque[tuple[int, Case, Future[Outcome]]] = deque()
        try:
            for number, case in self.cases():
                waiting.append((number, case, pool.submit(judged, case, self.bug)))
                if len(waiting) > 2 * self.jobs:
                    first, of_first, outcome = waiting.popleft()
                    yield first, of_first, outcome.result()
        finally:
            pool.shutdown(cancel_futures=True)


def replay_command(case: Case) -> str:
    # With `=`, because argparse would take a single flag for one of the script.
    return f"python scripts/fuzz.py --ranks {case.ranks} --case={shlex.quote(case.words)}"


def shrunk(case: Case, still_fails: Callable[[Case], bool], seconds: float) -> Case:
    """Removes traits as long as the case fails without them, for at most `seconds`."""
    until = time.monotonic() + seconds
    smaller: Case | None = case
    while smaller is not None:
        case = smaller
        smaller = next(
            (c for c in _smaller(case) if time.monotonic() < until and still_fails(c)),
            None,
        )
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Yields smaller cases: without a section, then without a trait, then on fewer ranks.

    Removing a parallel size divides the number of ranks by it.
    """
    sections = {trait: setting.section for trait in case.traits if (setting := setting_of(trait)) is not None}
    for section in ("moe", "memory"):
        kept = tuple(trait for trait in case.traits if sections.get(trait) != section)
        if len(kept) < len(case.traits):
            yield Case(case.ranks, tuple(t for t in kept if not t.startswith("--expert-")))
    for i, trait in enumerate(case.traits):
        kept = (*case.traits[:i], *case.traits[i + 1 :])
        _, _, value = trait.partition("parallel-size ")
        if value.isdigit() and not trait.startswith("--expert-") and case.ranks % int(value) == 0:
            yield Case(case.ranks // int(value), kept)
        yield Case(case.ranks, kept)
    for ranks in range(case.ranks - 1, 0, -1):
        if case.ranks % ranks == 0:
            yield dataclasses.replace(case, ranks=ranks)
