"""Compares planned traffic with the tensors that a step sends, and planned bubbles with the checker."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from pentatron.compare.trial import micro_batches
from pentatron.layout.check import check
from pentatron.optim.build import build_optimizer
from pentatron.parallel.messages import ANNOUNCEMENT_TAG
from pentatron.plan.sizes import PlanSizes
from pentatron.plan.timing import bubble_of, rank_traffic
from pentatron.train.model import build_parallel_model, model_dtype
from pentatron.train.step import train_step
from tests.harness import run_distributed
from tests.parity.trajectory import here
from tests.plan.cases import CP, EP, EXPERTS, GQA, PP, SHAPE, SP, TP
from tests.support import LLAMA, resolved


def nbytes(tensor: Any) -> float:
    return float(tensor.numel() * tensor.element_size())


def ring(ranks: int) -> float:
    return (ranks - 1) / ranks


# Bytes that a rank sends in each collective, by tensor size and group size.
SENT: dict[str, Callable[[tuple[Any, ...], int], float]] = {
    "all_reduce": lambda words, ranks: 2 * ring(ranks) * nbytes(words[0]),
    "all_gather_into_tensor": lambda words, ranks: ring(ranks) * nbytes(words[0]),
    "all_gather_single": lambda words, ranks: ring(ranks) * nbytes(words[0]),
    "reduce_scatter_tensor": lambda words, ranks: ring(ranks) * nbytes(words[1]),
    "reduce_scatter_single": lambda words, ranks: ring(ranks) * nbytes(words[1]),
    "all_to_all_single": lambda words, ranks: ring(ranks) * nbytes(words[1]),
    "isend": lambda words, ranks: nbytes(words[0]),
    "batch_isend_irecv": lambda words, ranks: sum(
        nbytes(op.tensor) for op in words[0] if "isend" in op.op.__name__
    ),
}


def sent_by_a_rank(words: str) -> float:
    config = resolved(words, dist.get_world_size()).config
    world = here(config)
    model = build_parallel_model(config, world)
    optimizer = build_optimizer(
        model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config)
    )
    chunk = list(itertools.islice(micro_batches(config, world, 0), config.accumulation))
    total = 0.0

    def counting(
        real: Callable[..., Any], sent: Callable[[tuple[Any, ...], int], float]
    ) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            nonlocal total
            if named.get("tag") != ANNOUNCEMENT_TAG:
                tensors = given or (named.get("output_tensor"), named.get("input_tensor"))
                total += sent(tensors, dist.get_world_size(named.get("group")))
            return real(*given, **named)

        return counted

    for name, sent in SENT.items():
        if hasattr(dist, name):
            setattr(dist, name, counting(getattr(dist, name), sent))
    train_step(model, optimizer, chunk, 1e-3, step=0)
    return total


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        (f"{TP}", 0.01),
        (f"{TP} {SP} --bf16 --recompute-granularity full", 0.01),
        (f"{GQA} {CP}", 0.01),
        (f"{CP} --cp-comm-type a2a --zero-stage 1", 0.01),
        (f"{PP} --virtual-pipeline-model-parallel-size 2", 0.01),
        ("--zero-stage 2 --bf16", 0.01),
        ("--zero-stage 3", 0.01),
        (f"{EXPERTS} {EP}", 0.1),
    ],
)
def test_rank_sends_the_planned_bytes(words: str, allowed: float) -> None:
    command = f"{SHAPE} {LLAMA} {words}"
    config = resolved(command, 2).config
    found = run_distributed(sent_by_a_rank, 2, words=command)
    planned = [
        rank_traffic(PlanSizes(config), config.grid.coordinates(rank).pipeline).total for rank in (0, 1)
    ]
    assert sum(planned) == pytest.approx(sum(found), rel=allowed)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero-bubble", "zbv"])
@pytest.mark.parametrize(("ranks", "steps"), [(2, 8), (4, 8), (4, 6), (4, 32)])
def test_bubbles_are_those_of_the_checker(schedule: str, ranks: int, steps: int) -> None:
    virtual = "--virtual-pipeline-model-parallel-size 2" if schedule == "interleaved" else ""
    words = f"--pipeline-model-parallel-size {ranks} --pipeline-schedule {schedule} {virtual} --num-layers 8"
    config = resolved(f"{words} --micro-batch-size 1 --global-batch-size {steps}", ranks).config
    assert bubble_of(PlanSizes(config)) == pytest.approx(check(config.schedule(steps)).bubble, abs=0.02)


def test_traffic_lies_on_the_axis_that_is_divided() -> None:
    for words, axis in (
        (TP, "tensor"),
        (PP, "pipeline"),
        ("", "data"),
        (f"{EXPERTS} {EP} {TP} --expert-tensor-parallel-size 1", "expert"),
    ):
        config = resolved(f"{SHAPE} {LLAMA} {words}", 2).config
        found = rank_traffic(PlanSizes(config), 0)
        assert getattr(found, axis) > 0
        also = {"tensor"} if TP in words else set()
        others = {"tensor", "pipeline", "context", "expert", "data"} - {axis} - also
        assert not any(getattr(found, other) for other in others), words
