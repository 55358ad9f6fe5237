"""Steps in small layouts do not deadlock under the rules of NCCL.

The rules are one order of calls per communicator, one queue per GPU, and hosts that synchronise the device.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist

from pentatron.compare.trial import micro_batches
from pentatron.layout import schedules
from pentatron.optim.build import build_optimizer
from pentatron.parallel.messages import Messages, open_channels
from pentatron.train import model as model_module
from pentatron.train.model import build_parallel_model, model_dtype
from pentatron.train.step import evaluate, train_step
from tests.harness import run_distributed
from tests.layout.one_ahead import one_ahead
from tests.parallel.recorded_calls import Call, Recorder, problem_of
from tests.parity.trajectory import here
from tests.support import LLAMA, resolved


def recorded(words: str, bug: str = "") -> list[Call]:
    """Records two steps and an evaluation on this rank, with pipeline channels as for NCCL."""
    config = resolved(words, dist.get_world_size()).config
    if "one channel for all" not in bug:
        model_module.open_messages = lambda world, placement: Messages(  # type: ignore[assignment]
            world.pipeline, open_channels(world, placement) if world.pipeline.size > 1 else None
        )
    if "receives one computation ahead" in bug:
        honest = schedules.add_communication
        schedules.add_communication = lambda *words: one_ahead(honest(*words))
    world = here(config)
    recorder = Recorder()
    recorder.install()
    model = build_parallel_model(config, world)
    optimizer = build_optimizer(
        model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config)
    )
    drawn = micro_batches(config, world, 0)
    recorder.on = True
    for step in range(2):
        chunk = list(itertools.islice(drawn, config.accumulation))
        train_step(model, optimizer, chunk, 1e-3, step=step)
    evaluate(model, chunk, len(chunk))
    recorder.on = False
    return recorder.calls


FOLDED = "--num-layers 8 --pipeline-model-parallel-size 4 --micro-batch-size 1 --pipeline-schedule"
OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather --use-distributed-optimizer"
LAYOUTS = {
    "tensor, sequence, data": (
        4, f"--tensor-model-parallel-size 2 --sequence-parallel {OVERLAPPED}"),
    "ring, data": (4, f"--context-parallel-size 2 --cp-comm-type p2p {OVERLAPPED}"),
    "ring of three": (3, "--context-parallel-size 3 --seq-length 24 --cp-comm-type p2p --overlap-grad-reduce"),
    "context by heads": (2, "--context-parallel-size 2 --cp-comm-type a2a"),
    "pipeline, data": (
        4, "--pipeline-model-parallel-size 2 --micro-batch-size 1 --overlap-grad-reduce"),
    "large groups": (
        2, "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --micro-batch-size 1 "
        "--microbatch-group-size-per-virtual-pipeline-stage 5"),
    "zbv": (4, f"{FOLDED} zbv"),
    "dualpipev": (4, f"{FOLDED} dualpipev"),
    "experts": (
        4, f"--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall {OVERLAPPED}"),
    **{
        f"experts, {name}": (
            4, f"--num-layers 4 --num-experts 4 --expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 1 {words}")
        for name, words in {
            "1f1b": "--overlap-grad-reduce",
            "1f1b, gather": "--moe-token-dispatcher-type allgather",
            "gpipe": "--pipeline-schedule gpipe",
            "interleaved": "--num-layers-per-virtual-pipeline-stage 1",
            "zero-bubble": "--pipeline-schedule zero-bubble",
            "zbv": "--pipeline-schedule zbv",
            "dualpipev": "--pipeline-schedule dualpipev --moe-token-dispatcher-type allgather",
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_ends_under_the_rules_of_nccl(name: str) -> None:
    ranks, words = LAYOUTS[name]
    records = run_distributed(recorded, ranks, words=f"{LLAMA} {words}", timeout=240.0)
    assert all(len(record) > 10 for record in records), "something was recorded"
    assert problem_of(records) is None
    assert any(call.synchronises for call in records[0])
    assert problem_of(records, synchronising=True) is None


@pytest.mark.parametrize(
    ("name", "bug", "synchronising"),
    [
        ("pipeline, data", "one channel for all, receives one computation ahead", False),
        ("large groups", "receives one computation ahead", False),
        ("pipeline, data", "receives one computation ahead", True),
        ("experts, 1f1b", "receives one computation ahead", True),
    ],
)
def test_deadlocks_that_gloo_tolerates_are_found(name: str, bug: str, synchronising: bool) -> None:
    ranks, words = LAYOUTS[name]
    records = run_distributed(recorded, ranks, words=f"{LLAMA} {words}", bug=bug, timeout=240.0)
    assert problem_of(records, synchronising) is not None


ALL = (0, 1)


def calls(*told: tuple[str, ...]) -> list[Call]:
    """Builds the calls of one rank.

    `("c", "what")` is a call on the communicator c; `("c", "what", "wait")` is waited for at once.
    """
    found: list[Call] = []
    for communicator, what, *wait in told:
        found.append(Call(len(found), (communicator,), ALL, what, connected=communicator != "new"))
        if wait:
            found.append(Call(len(found), waits=len(found) - 1))
    return found


@pytest.mark.parametrize(
    ("records", "words"),
    [
        # Both ranks send first, and receive on the same communicator.
        (
            [calls(("c", "to 1", "wait"), ("c", "to 0")), calls(("c", "to 0", "wait"), ("c", "to 1"))],
            "call 0",
        ),
        # Two communicators in different orders, with a wait after the first call.
        ([calls(("c", "x", "wait"), ("d", "y")), calls(("d", "y", "wait"), ("c", "x"))], "rank 0"),
        # Two sends on each rank, before any receive.
        ([calls(*(("c", "x"),) * 2, ("d", "y")), calls(*(("d", "y"),) * 2, ("c", "x"))], "rank 0"),
        # The hosts connect at the first call, although it is not waited for.
        ([calls(("new", "x"), ("d", "y", "wait")), calls(("d", "y", "wait"), ("new", "x"))], "rank 0"),
        # One rank leaves a call out.
        ([calls(("c", "x", "wait")), []], "rank 0"),
        # The same number of calls, with different sizes.
        ([calls(("c", "sum 3")), calls(("c", "sum 4"))], "call 0 of"),
    ],
)
def test_hanging_orders_are_found(records: Sequence[Any], words: str) -> None:
    problem = problem_of(records)
    assert problem is not None and problem.startswith(words)


def test_the_judge_lets_good_ones_go() -> None:
    one = calls(("c", "x"), ("d", "y", "wait"), ("c", "z", "wait"))
    assert problem_of([one, one]) is None
    # Started in different orders and waited for later.
    waits = [Call(2, waits=0), Call(3, waits=1)]
    assert (
        problem_of([[*calls(("c", "x"), ("d", "y")), *waits], [*calls(("d", "y"), ("c", "x")), *waits]])
        is None
    )
