"""Runs a few training steps on a GPU or CPU, also with planted mistakes, and compares two runs."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from pentatron.compare.trial import Trajectory, UnevenMasks, gaps, perturb_norms_and_biases, train_and_record
from pentatron.nn.router import Router
from pentatron.optim.build import build_optimizer
from pentatron.parallel.sharding import sharded_parameters
from pentatron.parallel.world import single_process
from pentatron.settings.run_config import RunConfig
from pentatron.train.model import ParallelModel, build_parallel_model, model_dtype
from tests.parity.bf16 import ALLOWED, KINDS, distance
from tests.parity.verdicts import failures, largest_gap
from tests.support import resolved

# Small planted mistakes, each of which must exceed the tolerance.
ONE_WEIGHT, ROPE_BASE, LOSS_MASK = "one weight", "rope base + 1 %", "loss mask ignored"
# In bf16, a change of one weight among many is lost in rounding.
ONE_MATRIX = "one matrix + 20 %"


@dataclass(frozen=True)
class Found:
    """Result of a comparison.

    `share` is the largest gap in units of the tolerance, `controls` the same for each planted mistake.
    `left_out` is the reason if the check could not run.
    """

    share: float
    controls: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    left_out: str = ""

    @property
    def passes(self) -> bool:
        return bool(self.left_out) or (self.share <= 1 and all(share > 1 for share in self.controls.values()))

    @property
    def complaint(self) -> str:
        missed = [name for name, share in self.controls.items() if not share > 1]
        seen = "" if self.share <= 1 else f"{self.share:.3g} times what is allowed"
        return ", ".join([*([seen] if seen else []), *(f"control not noticed: {name}" for name in missed)])


Rows = dict[str, Found]


def trial(words: str, device: str, mistake: str = "") -> Trajectory:
    """Runs the training steps of these flags, with a planted mistake if one is named."""
    more = " --rotary-base 10100" if mistake == ROPE_BASE else ""
    return trial_of(resolved(f"{words}{more}").config, device, mistake)


def trial_of(config: RunConfig, device: str, mistake: str = "") -> Trajectory:
    world = single_process(torch.device(device))
    model = build_parallel_model(config, world)
    perturb_norms_and_biases(model)
    _change(model, mistake)
    optimizer = build_optimizer(
        model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config)
    )
    with unmasked() if mistake == LOSS_MASK else contextlib.nullcontext():
        return train_and_record(config, world, model, optimizer)


@torch.no_grad()
def _change(model: ParallelModel, mistake: str) -> None:
    if mistake not in (ONE_WEIGHT, ONE_MATRIX):
        return
    matrices = [
        h.parameter.data for h in sharded_parameters(*model.stages.values()) if h.parameter.dim() == 2
    ]
    chosen = matrices[len(matrices) // 2]
    if mistake == ONE_WEIGHT:
        chosen[0, 0] += chosen.std()
    else:
        chosen *= 1.2


def unmasked() -> Any:
    """Patches the samples so that the loss counts every label."""
    as_they_are = UnevenMasks.__getitem__

    def everything_counts(samples: UnevenMasks, index: int) -> dict[str, Any]:
        sample = as_they_are(samples, index)
        return {**sample, "loss_mask": np.ones_like(sample["loss_mask"])}

    return mock.patch.object(UnevenMasks, "__getitem__", everything_counts)


@functools.cache
def reference(words: str, device: str = "cpu") -> Trajectory:
    return trial(words, device)


def mistakes_of(words: str, half: bool = False) -> tuple[str, ...]:
    rotated = (ROPE_BASE,) if "rope" in words and not half else ()
    return (ONE_MATRIX if half else ONE_WEIGHT, *rotated, LOSS_MASK)


# Any rounding changes experts whose scores are nearly tied, and the two runs then diverge. A case is repeated
# with other weights only if a comparison of experts, token by token, shows this.
_SEEDS = ("", "--seed 77", "--seed 78")
# The flags and the device of a run.
Run = tuple[str, str]


def choices(words: str, device: str) -> list[Tensor]:
    """Returns the experts of every token, for each router and step."""
    seen: list[Tensor] = []
    best = Router._best

    def watched(router: Router, scores_BSE: Tensor) -> Tensor:
        chosen = best(router, scores_BSE)
        seen.append(chosen.detach().sort(-1).values.cpu())
        return chosen

    with mock.patch.object(Router, "_best", watched):
        trial(words, device)
    return seen


def sent_elsewhere(one: Run, other: Run) -> int:
    """Counts the tokens that go to other experts in the other run."""
    pairs = zip(choices(*one), choices(*other), strict=True)
    return sum(int(a.ne(b).any(-1).sum()) for a, b in pairs)


def _asked_again(
    measure: Callable[[str], Found], words: str, runs: Callable[[str], tuple[Run, Run]]
) -> Found:
    """Measures a case, and repeats it with other seeds if tokens went to other experts.

    `runs` returns the two compared runs for a seed.
    """
    found, notes = measure(_SEEDS[0]), list[str]()
    for before, seed in itertools.pairwise(_SEEDS):
        if found.passes or "--num-experts" not in words:
            break
        elsewhere = sent_elsewhere(*runs(before))
        if not elsewhere:
            notes.append("every token went to the same experts")
            break
        notes.append(f"{found.share:.0%}, with {elsewhere} tokens sent elsewhere: asked again with {seed}")
        found = measure(seed)
    return replace(found, note="; ".join(filter(None, [*notes, found.note])))


def exactly(name: str, words: str, more: str, device: str, other: str, other_words: str) -> Rows:
    """Compares a run in fp32 with another, tensor by tensor, as layouts with one process."""
    return {
        name: _asked_again(
            lambda seed: _exactly(f"{words} {seed}", more, device, other, other_words),
            words,
            lambda seed: ((f"{words} {seed} {more}", device), (f"{words} {seed} {other_words}", other)),
        )
    }


def _exactly(words: str, more: str, device: str, other: str, other_words: str) -> Found:
    expected = reference(f"{words} {other_words}", other)

    def judged(mistake: str = "") -> tuple[float, str]:
        found = gaps([trial(f"{words} {more}", device, mistake)], expected)
        # The number of tokens that count must not be what reveals a mistake.
        found = [gap for gap in found if not (mistake and gap.what.startswith("tokens"))]
        return largest_gap(found).ratio, largest_gap(found).what if failures(found) else ""

    share, note = judged()
    return Found(share, {m: judged(m)[0] for m in mistakes_of(words)}, note)


def roughly(
    name: str, words: str, half: str, more: str, device: str, other: str, other_words: str, kernel: str = ""
) -> Rows:
    """Compares a run in half precision with another by their distances from fp32.

    The result is the ratio of the distances, as a share of the allowed ratio. `kernel` has flags that the
    other run needs in half precision and cannot have in fp32.
    """
    return {
        name: _asked_again(
            lambda seed: _roughly(f"{words} {seed}", half, more, device, other, other_words, kernel),
            words,
            lambda seed: (
                (f"{words} {seed} {half} {more}", device),
                (f"{words} {seed} {half} {other_words} {kernel}", other),
            ),
        )
    }


def _roughly(
    words: str, half: str, more: str, device: str, other: str, other_words: str, kernel: str
) -> Found:
    exact = reference(f"{words} {other_words}", other)
    rounded = reference(f"{words} {half} {other_words} {kernel}", other)
    own = {kind: distance([rounded], exact, kind) for kind in KINDS}

    def judged(mistake: str = "") -> tuple[float, str]:
        found = trial(f"{words} {half} {more}", device, mistake)
        far = {kind: distance([found], exact, kind) / own[kind] for kind in KINDS}
        kind = max(far, key=lambda k: far[k])
        return far[kind] / ALLOWED, kind if far[kind] > ALLOWED else ""

    share, note = judged()
    return Found(share, {m: judged(m)[0] for m in mistakes_of(words, half=True)}, note)


def same_structure(config: RunConfig, device: str) -> Found:
    """Compares a small model of a preset's structure on the device with the CPU."""
    found = gaps([trial_of(config, device)], trial_of(config, "cpu"))
    return Found(largest_gap(found).ratio, note=largest_gap(found).what if failures(found) else "")
