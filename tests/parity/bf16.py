"""Layouts in bf16 and fp16, judged by their error relative to that of one process."""

import functools
from dataclasses import replace

from pentatron.compare.trial import STEPS, Trajectory, gather_tensors
from tests.harness import run_distributed
from tests.parity.cases import LAYOUTS, MIXTURES
from tests.parity.mixtures import MIXTURE_LAYOUTS
from tests.parity.trajectory import on_a_rank, run

KINDS = ("gradients 1", f"gradients {STEPS}", "weights")
# The largest allowed error of a layout relative to fp32, as a multiple of that of one process.
ALLOWED = 1.6
BF16_CASES = (
    ("dp2 zero1 overlap", "llama"),
    ("tp2 sp pp2 virtual2", "qwen2.5"),
    ("pp2 gpipe dp2 zero2", "gpt"),
    ("cp4", "llama"),
    ("cp2 all_gather dp2 zero2", "qwen3"),
    ("pp2 zbv dp2 zero1", "llama"),
    ("pp2 dp2 zero3", "qwen2.5"),
    ("ep2", "mixtral"),
    ("tp2 dp2 ep2", "qwen3-moe"),
)


# An initial loss scale without overflows, which are tested elsewhere.
FP16 = "--fp16 --initial-loss-scale 65536"
FP16_CASES = (
    ("dp2 zero1 overlap", "llama"),
    ("tp2 sp pp2 virtual2 full", "qwen2.5"),
    ("cp2 all_gather dp2 zero2", "qwen3"),
    ("pp2 zbv", "llama"),
    ("pp2 dp2 zero3", "gpt"),
    ("ep2", "mixtral"),
)


@functools.cache
def on_one_process(words: str) -> Trajectory:
    return run(words, 1)


def distance(found: list[Trajectory], exact: Trajectory, kind: str) -> float:
    """Returns the relative difference from fp32 of all tensors of a kind together."""
    tensors, expected = gather_tensors(found, kind), gather_tensors([exact], kind)
    apart = sum(float((tensors[name] - value).square().sum()) for name, value in expected.items())
    return float((apart / sum(float(value.square().sum()) for value in expected.values())) ** 0.5)


def excess(layout: str, family: str, bug: str = "", half: str = "--bf16") -> dict[str, float]:
    """Returns for every kind of tensor the error of a layout as a multiple of that of one process."""
    among = MIXTURE_LAYOUTS if family in MIXTURES else LAYOUTS
    case = next(x for x in among if x.name == layout)
    words = f"{replace(case, scaled=False).command(family)} {half}"
    found = run_distributed(on_a_rank, case.ranks, timeout=180.0, words=words, bug=bug)
    exact = on_one_process(case.alone(family))
    rounded = on_one_process(f"{case.alone(family)} {half}")
    return {kind: distance(found, exact, kind) / distance([rounded], exact, kind) for kind in KINDS}
