"""Reduction of gradients over replicas: sums, collectives, open buckets, and missing gradients."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pentatron.parallel.collectives as collectives
import pentatron.parallel.reduction as reduction_module
from pentatron.layout.ranks import Grid
from pentatron.models.causal_lm import build_model
from pentatron.optim.optimizer import Optimizer
from pentatron.parallel.reduction import ScatterBuffers, ShardedReduction
from pentatron.parallel.world import World, single_process
from tests.harness import distributed, run_distributed
from tests.optim.tiny import (
    OPTIM,
    Prescribed,
    collected,
    fill,
    global_norm,
    here,
    network,
    one_step,
    parallel,
    rows,
    trajectory,
)
from tests.support import LLAMA, resolved

WAYS = [(zero, grad, param) for zero in (0, 1, 2) for grad in (False, True) for param in (False, True)]
SHAPES = {"a": (3, 5), "b": (7,), "c": (4, 4), "d": (9,), "e": (5, 5)}


def prescribed() -> Prescribed:
    return fill(Prescribed({n: (s, rows(s, (0, 0, s[0], ("tensor",), ()))) for n, s in SHAPES.items()}))


def gradients(rank: int, number: int) -> dict[str, Tensor]:
    """Draws small integers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    return {n: torch.randint(-9, 10, s, generator=generator).float() for n, s in SHAPES.items()}


def backward(model: Prescribed, optimizer: Optimizer, passes: list[dict[str, Tensor]]) -> None:
    optimizer.zero_gradients()
    for number, wanted in enumerate(passes, 1):
        optimizer.begin_backward(0, number == len(passes))
        model(wanted).backward()
        optimizer.end_backward(0, number == len(passes))
    optimizer.reduce(0)
    optimizer.finish_reduction()


# Every way of reducing and gathering against one process.


def every_way(ways: list[Any], count: int) -> dict[Any, Any]:
    world = here(Grid(data=dist.get_world_size()))
    return {way: trajectory(world, parallel(*way), count, steps=3) for way in ways}


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    assert found["norms"] == pytest.approx(expected["norms"], rel=tolerance)
    for kind in ("weights", "gradients", "state"):
        assert found[kind].keys() == expected[kind].keys()
        for name, value in found[kind].items():
            assert torch.allclose(value, expected[kind][name], atol=tolerance, rtol=0), (kind, name)
    assert torch.allclose(found["output"], expected["output"], atol=1e-5)


def equal(found: dict[str, Any], other: dict[str, Any]) -> bool:
    return found["norms"] == other["norms"] and all(
        torch.equal(value, other[kind][name])
        for kind in ("weights", "gradients", "state")
        for name, value in found[kind].items()
    )


@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (2, 3), (4, 3)])
def test_every_way_equals_one_process_and_the_others(ranks: int, count: int) -> None:
    reference = trajectory(single_process(), parallel(), count, steps=3)
    assert min(reference["norms"]) > OPTIM.clip_grad, "clipping must be active"
    ways = WAYS if ranks == 2 else [way for way in WAYS if way[1] == way[2]]
    results = run_distributed(every_way, ranks, ways=ways, count=count)
    for found in results:
        for way in ways:
            assert_close(found[way], reference)
            # ZeRO 2 sums over the replicas before it sums over micro-batches, the other stages after.
            like = (2, False, False) if way[0] == 2 and count > 1 else (0, False, False)
            assert equal(found[way], found[like]), way
            assert equal(found[way], results[0][way]), "ranks must stay bitwise equal"


@pytest.mark.parametrize("way", WAYS)
def test_one_process_is_the_same_in_every_way(way: tuple[int, bool, bool]) -> None:
    assert equal(trajectory(single_process(), parallel(*way)), trajectory(single_process(), parallel()))


@pytest.mark.parametrize("bucket", [1, 25, 10_000])
def test_the_size_of_buckets_changes_nothing(bucket: int) -> None:
    reference = trajectory(single_process(), parallel(), 2)
    assert_close(trajectory(single_process(), parallel(2, bucket=bucket), 2), reference)


def with_bug(bug: str, zero: int, param: bool = False) -> dict[str, Any]:
    plant(bug)
    return trajectory(here(Grid(data=dist.get_world_size())), parallel(zero, param=param), 2)


def plant(bug: str) -> None:
    """Plants a bug in the optimizer of this process."""
    if bug == "no gather":
        Optimizer._update_model_weights = lambda self, rounded=False: None  # type: ignore[method-assign]
    if bug == "no reduction":
        collectives.dist.all_reduce = lambda *a, **k: SimpleNamespace(  # type: ignore[assignment]
            wait=lambda: None
        )
    if bug == "share of another rank":
        real = collectives._SCATTER_NAME

        def shifted(part: Tensor, whole: Tensor, **options: Any) -> Any:
            return getattr(dist, real)(part, whole.roll(part.numel()), **options)

        collectives.dist.shifted = shifted  # type: ignore[attr-defined]
        collectives._SCATTER_NAME = "shifted"


@pytest.mark.parametrize(
    ("bug", "zero"), [("no gather", 1), ("no gather", 2), ("no reduction", 0), ("share of another rank", 1)]
)
def test_planted_bugs_are_caught(bug: str, zero: int) -> None:
    reference = trajectory(single_process(), parallel(), 2)
    found = run_distributed(with_bug, 2, bug=bug, zero=zero)
    with pytest.raises(AssertionError):
        for rank in found:
            assert_close(rank, reference)


# Which collectives, how many, in which order.


class Recorder:
    """Replaces torch.distributed in `collectives`, and records the names and sizes of collectives."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(dist, name)
        if name not in ("all_reduce", collectives._SCATTER_NAME, collectives._GATHER_NAME):
            return real

        def noted(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, max(t.numel() for t in arguments if isinstance(t, Tensor))))
            return real(*arguments, **options)

        return noted


def recorded() -> Recorder:
    recorder = Recorder()
    collectives.dist = recorder  # type: ignore[assignment]
    return recorder


@distributed(world=2)
def test_collectives_are_as_many_as_theory_says() -> None:
    world = here(Grid(data=2))
    recorder = recorded()
    scatter, gather = collectives._SCATTER_NAME, collectives._GATHER_NAME
    for zero, grad, param in WAYS:
        model = network()
        optimizer = Optimizer({0: model}, world, OPTIM, parallel(zero, grad, param), torch.float32)
        buckets = len(optimizer._buckets)
        assert buckets == 5
        recorder.calls.clear()
        one_step(model, optimizer, 0, count=3)
        found = Counter(name for name, _ in recorder.calls)
        expected = {
            0: {"all_reduce": buckets + 1},
            1: {scatter: buckets, gather: buckets, "all_reduce": 1},
            2: {scatter: 3 * buckets, gather: buckets, "all_reduce": 1},
        }
        assert found == expected[zero], "the one all-reduce more is the norm's"
        moved = sum(size for name, size in recorder.calls if name != "all_reduce" or size > 1)
        elements = sum(bucket.size for bucket in optimizer._buckets)
        assert moved == elements * {0: 1, 1: 2, 2: 4}[zero]
        optimizer.wait_for_weights()


@distributed(world=2)
def test_overlapped_reduction_starts_in_the_last_backward_pass_only() -> None:
    world = here(Grid(data=2))
    recorder = recorded()
    for zero, grad in ((0, False), (0, True), (1, True), (2, True)):
        model = prescribed()
        optimizer = Optimizer({0: model}, world, OPTIM, parallel(zero, grad, bucket=30), torch.float32)
        buckets = len(optimizer._buckets)
        started = []
        for last in (False, True):
            recorder.calls.clear()
            optimizer.begin_backward(0, last)
            model(gradients(0, 0)).backward()
            started.append(len(recorder.calls))
            optimizer.end_backward(0, last)
        expected = {(0, False): [0, 0], (0, True): [0, buckets], (1, True): [0, buckets]}
        assert started == expected.get((zero, grad), [buckets, buckets])
        optimizer.reduce(0)
        optimizer.finish_reduction()


@pytest.mark.parametrize("zero", [0, 1, 2])
@distributed(world=2)
def test_ranks_whose_gradients_come_in_another_order_or_not_at_all_agree(zero: int) -> None:
    """Rank 1 computes gradients in the opposite order.

    Rank 0 has no gradient of two parameters in the first pass, rank 1 in the second.
    """
    world = here(Grid(data=2))
    rank = world.all_ranks.rank
    recorder = recorded()
    model = prescribed()
    optimizer = Optimizer({0: model}, world, OPTIM, parallel(zero, grad=True, bucket=8), torch.float32)
    passes = [gradients(rank, 0), gradients(rank, 1)]
    for lacking in ("c", "e"):
        passes[rank].pop(lacking)
    if rank == 1:
        passes = [dict(reversed(p.items())) for p in passes]
    backward(model, optimizer, passes)
    sizes: list[Any] = [None, None]
    dist.all_gather_object(sizes, recorder.calls)
    assert sizes[0] == sizes[1] and len(sizes[0]) >= len(SHAPES)
    expected = {n: torch.zeros(s) for n, s in SHAPES.items()}
    for of in (0, 1):
        for number in (0, 1):
            for name, gradient in gradients(of, number).items():
                expected[name] += 0 if of == number and name in ("c", "e") else gradient
    found = collected(optimizer.gradients(owned_only=True), world)
    for name, value in expected.items():
        assert torch.equal(found[f"gradients/{name}"], value), name


@pytest.mark.parametrize(("zero", "grad"), [(0, True), (1, True), (2, False)])
def test_a_gradient_after_its_bucket_was_reduced_is_refused(zero: int, grad: bool) -> None:
    model = prescribed()
    optimizer = Optimizer({0: model}, single_process(), OPTIM, parallel(zero, grad), torch.float32)
    optimizer.zero_gradients()
    optimizer.begin_backward(0, last=True)
    model(gradients(0, 0)).backward()
    with pytest.raises(AssertionError, match="after its bucket was reduced"):
        model(gradients(0, 0)).backward()


def test_a_stage_that_was_never_reduced_is_noticed() -> None:
    model = prescribed()
    optimizer = Optimizer({0: model}, single_process(), OPTIM, parallel(), torch.float32)
    model(gradients(0, 0)).backward()
    with pytest.raises(AssertionError, match="never reduced"):
        optimizer.finish_reduction()


# ZeRO 2: how many buckets are open at once.


class CountingBuffers(ScatterBuffers):
    """Counts the buffers in use, including those whose reduction is still running."""

    open_now = most_open = 0

    def take(self) -> Tensor:
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        return super().take()

    def finish(self) -> None:
        self.open_now -= self._running is not None
        super().finish()


def peak_of_open_buckets(world: World, grad: bool, passes: list[dict[str, Tensor]] | None = None) -> int:
    """Runs one step of the network, or a backward of `passes`; returns the most open buckets."""
    reduction_module.ScatterBuffers = CountingBuffers  # type: ignore[misc]
    model = prescribed() if passes else network()
    optimizer = Optimizer({0: model}, world, OPTIM, parallel(2, grad, bucket=8), torch.float32)
    reduction = optimizer._reductions[0,]
    assert isinstance(reduction, ShardedReduction) and len(reduction.buckets) >= 5
    if passes:
        assert isinstance(model, Prescribed)
        backward(model, optimizer, passes)
    else:
        one_step(model, optimizer, 0, count=3)
    buffers = reduction.buffers
    assert isinstance(buffers, CountingBuffers)
    # An update releases the buffers; without one, as many remain as were open at once.
    assert buffers.open_now == 0 and len(buffers.made) == (buffers.most_open if passes else 0)
    return buffers.most_open


def open_buckets(backwards: bool) -> list[int]:
    world = here(Grid(data=2))
    wanted = gradients(0, 0)
    wrong_order = [dict(reversed(wanted.items()))] if backwards else None
    return [peak_of_open_buckets(world, grad, wrong_order) for grad in (False, True)]


def test_one_bucket_is_open_or_two_while_one_is_reduced() -> None:
    assert run_distributed(open_buckets, 2, backwards=False) == [[1, 2]] * 2


@pytest.mark.parametrize("words", ["", LLAMA, f"{LLAMA} --untie-embeddings-and-output-weights"])
@distributed(world=2)
def test_a_language_model_has_one_bucket_open(words: str) -> None:
    reduction_module.ScatterBuffers = CountingBuffers  # type: ignore[misc]
    config = resolved(words).config
    model = build_model(config.model, 1, torch.device("cpu"))
    world = here(Grid(data=2))
    optimizer = Optimizer({0: model}, world, OPTIM, parallel(2, bucket=500), torch.float32)
    optimizer.begin_backward(0, last=True)
    tokens = torch.arange(32).view(2, 16)
    model(tokens, torch.arange(16).expand(2, -1), tokens).sum().backward()
    reduction = optimizer._reductions[0,]
    assert isinstance(reduction, ShardedReduction) and isinstance(reduction.buffers, CountingBuffers)
    assert reduction._next == len(reduction.buckets) > 10
    assert reduction.buffers.most_open == 1


def test_the_count_sees_gradients_that_come_in_the_wrong_order() -> None:
    assert min(run_distributed(open_buckets, 2, backwards=True)[0]) > 2


# Precision, NaN and inf.


@pytest.mark.parametrize("zero", [0, 1, 2])
@distributed(world=2)
def test_bf16_gradients_are_summed_in_fp32(zero: int) -> None:
    """Sums 64 micro-batches, each below the resolution of bf16 in the sum of the others."""
    world = here(Grid(data=2))
    model = prescribed()
    optimizer = Optimizer({0: model}, world, OPTIM, parallel(zero), torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    first = {n: torch.full(s, 64.0) for n, s in SHAPES.items()}
    small = {n: torch.full(s, 2.0**-5) for n, s in SHAPES.items()}
    backward(model, optimizer, [first, *[small] * 64])
    for name, value in collected(optimizer.gradients(owned_only=True), world).items():
        assert torch.equal(value, torch.full_like(value, 2 * (64 + 2))), name


def test_bf16_alone_would_lose_them() -> None:
    total = torch.tensor(64.0, dtype=torch.bfloat16)
    for _ in range(64):
        total += torch.tensor(2.0**-5, dtype=torch.bfloat16)
    assert total == 64


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@distributed(world=2)
def test_a_bad_gradient_on_one_rank_reaches_every_rank(zero: int, bad: float) -> None:
    world = here(Grid(data=2))
    model = prescribed()
    optimizer = Optimizer({0: model}, world, OPTIM, parallel(zero, bucket=30), torch.float32)
    before = collected(optimizer.fragments(owned_only=True), world)
    wanted = gradients(0, 0)
    if world.all_ranks.rank == 1:
        wanted["d"][8] = bad
    backward(model, optimizer, [wanted])
    norm = global_norm(optimizer)
    assert norm != norm or norm == float("inf")
    with pytest.raises(AssertionError, match="NaN or inf gradients"):
        optimizer.step(1e-2, norm)
    for name, value in collected(optimizer.fragments(owned_only=True), world).items():
        assert torch.equal(value, before[name])
    backward(model, optimizer, [gradients(0, 0)])
    assert global_norm(optimizer) < 1e6, "the bad number must not outlive its step"


def every_way_on_a_gpu() -> dict[Any, Any]:
    """Runs every way on ranks that share one GPU over gloo."""
    world = here(Grid(data=dist.get_world_size()), torch.device("cuda", 0))
    return {way: trajectory(world, parallel(*way), 3, steps=3) for way in WAYS}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_computes_the_same() -> None:
    reference = trajectory(single_process(), parallel(), 3, steps=3)
    alone = trajectory(single_process(torch.device("cuda", 0)), parallel(2, True, True), 3, steps=3)
    assert_close(alone, reference, 1e-5)
    for found in run_distributed(every_way_on_a_gpu, 2):
        for way in WAYS:
            assert_close(found[way], reference, 1e-5)
