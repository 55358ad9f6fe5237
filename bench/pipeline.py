"""Measures the overhead of the pipeline executor against torch.distributed.pipelining.

Both run the same schedule over the same process group in the same processes, in turns. A stage multiplies by
one number, so the time is that of messages, bookkeeping and autograd.

    python bench/pipeline.py --repeats 15
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

sys.path.insert(0, str(Path(__file__).parents[1]))

from pentatron.layout.actions import Kind
from pentatron.layout.ranks import Grid
from pentatron.layout.schedules import training_schedule
from pentatron.parallel.executor import Executor
from pentatron.parallel.messages import open_messages
from pentatron.parallel.world import World, create_groups
from tests.harness import run_distributed
from tests.harness.client import session_zygote

CPU = torch.device("cpu")
# Schedule, ranks, stages per rank.
CASES = (("1f1b", 2, 1), ("interleaved", 2, 2), ("1f1b", 4, 1), ("interleaved", 4, 2))
MICRO_BATCHES = 16
SHAPE = (1, 8)
STEPS = 5


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, values: Tensor) -> Tensor:
        return values * self.factor


class Trivial:
    """Forward of trivial stages, and a sink that ignores their gradients."""

    def __init__(self, stages: dict[int, Scale], last_stage: int) -> None:
        self.stages = stages
        self.last_stage = last_stage
        self.values = torch.ones(SHAPE)

    def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        output: Tensor = self.stages[stage](self.values if received is None else received)
        return output if stage < self.last_stage else output.sum()

    def message_shape(self, stage: int, micro_batch: int) -> tuple[int, ...]:
        return SHAPE

    def begin_backward(self, stage: int, last: bool, kind: Kind) -> None: ...
    def end_backward(self, stage: int, last: bool, kind: Kind) -> None: ...
    def reduce(self, stage: int) -> None: ...


def our_step(world: World, kind: str, virtual: int) -> Callable[[], object]:
    rank, ranks = world.pipeline.rank, world.pipeline.size
    schedule = training_schedule(kind, ranks, virtual, MICRO_BATCHES)
    trivial = Trivial({s: Scale() for s in schedule.placement.stages_of(rank)}, ranks * virtual - 1)
    executor = Executor(open_messages(world, schedule.placement), rank, torch.float32, CPU)
    return lambda: executor.train(schedule, trivial, trivial)


def their_step(world: World, virtual: int) -> Callable[[], object]:
    rank, ranks = world.pipeline.rank, world.pipeline.size
    group, last = world.pipeline.process_group, ranks * virtual - 1
    stages = [PipelineStage(Scale(), s, last + 1, CPU, group=group) for s in range(rank, last + 1, ranks)]
    values = torch.ones(MICRO_BATCHES * SHAPE[0], SHAPE[1])

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output.sum()

    schedule = (
        ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss, scale_grads=False)  # type: ignore[arg-type]
        if virtual > 1
        else Schedule1F1B(stages[0], MICRO_BATCHES, loss, scale_grads=False)
    )
    inputs = (values,) if rank == 0 else ()
    return lambda: schedule.step(*inputs, target=values if rank == ranks - 1 else None)


def milliseconds_per_micro_batch(kind: str, virtual: int, repeats: int) -> tuple[float, float]:
    """Returns the time of ours and of torch in the fastest of `repeats` rounds, as other load only adds."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    world = create_groups(Grid(pipeline=ranks), rank, rank, CPU)
    steps = (our_step(world, kind, virtual), their_step(world, virtual))
    times: tuple[list[float], list[float]] = ([], [])
    for round_number in range(repeats + 1):
        for step, found in zip(steps, times):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(STEPS):
                step()
            dist.barrier()
            if round_number > 0:  # the first round connects the ranks
                found.append(1000 * (time.perf_counter() - began) / (STEPS * MICRO_BATCHES))
    return min(times[0]), min(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Times pipeline overhead per micro-batch against torch.distributed.pipelining."
    )
    parser.add_argument(
        "--repeats", type=int, default=15, metavar="N", help="number of rounds; the fastest counts"
    )
    repeats: int = parser.parse_args().repeats
    print(
        f"milliseconds per micro-batch; torch {torch.__version__}, Python {platform.python_version()}, {MICRO_BATCHES} micro-batches\n"
    )
    print(f"{'schedule':<12}  {'ranks':>5}  {'stages':>6}  {'ours':>8}  {'torch':>8}  {'ratio':>5}")
    for kind, ranks, virtual in CASES:
        found = run_distributed(
            milliseconds_per_micro_batch, ranks, kind=kind, virtual=virtual, repeats=repeats, timeout=300.0
        )
        ours, theirs = found[0]
        print(
            f"{kind:<12}  {ranks:>5}  {ranks * virtual:>6}  {ours:>5.2f} ms  {theirs:>5.2f} ms  {theirs / ours:>4.1f}x",
            flush=True,
        )
    session_zygote().close()


if __name__ == "__main__":
    main()
