"""Compares the optimizer with torch's AdamW, DDP and FSDP2; tests its checkpoints and memory."""

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pentatron.layout.ranks import Grid
from pentatron.optim.optimizer import Optimizer
from pentatron.optim.update_rules import clip_factor, squared_norm
from pentatron.parallel.sharding import region
from pentatron.parallel.world import World, single_process
from tests.harness import distributed, run_distributed
from tests.optim.tiny import (
    CPU,
    OPTIM,
    RATE,
    Linear,
    assembled,
    data,
    fill,
    here,
    loss_of,
    micro_batches,
    network,
    one_step,
    parallel,
    trajectory,
)

STEPS = 5


def torchs_adamw(model: nn.Module) -> torch.optim.AdamW:
    decays = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [{"params": decays, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-6,
    )


def torchs_step(
    model: nn.Module, adam: torch.optim.AdamW, step: int, count: int = 1, rank: int = 0, ranks: int = 1
) -> float:
    """Runs the step of `one_step` with torch alone.

    DDP and FSDP2 average over ranks, so the loss is multiplied by their number to get the sum.
    """
    adam.zero_grad()
    for x, y in micro_batches(step, count, rank, ranks):
        (loss_of(model, x, y) * ranks).backward()
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for group in adam.param_groups:
        group["lr"] = RATE / (step + 1)
    adam.step()
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def assert_agree(found: dict[str, Any], model: nn.Module, norms: list[float], tolerance: float) -> None:
    assert found["norms"] == pytest.approx(norms, rel=tolerance)
    for name, p in model.named_parameters():
        for kind, value in (("weights", p), ("gradients", p.grad)):
            mine = found[kind][name if kind == "weights" else f"gradients/{name}"]
            if kind == "gradients":
                # torch has clipped its gradients already.
                mine = mine * min(1.0, OPTIM.clip_grad / (norms[-1] + 1e-6))
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert torch.allclose(mine, whole, atol=tolerance, rtol=0), (kind, name)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_five_steps_equal_torchs_adamw_with_clipping_and_selective_decay(zero: int) -> None:
    twin = network()
    adam = torchs_adamw(twin)
    norms = [torchs_step(twin, adam, step, count=2) for step in range(STEPS)]
    assert min(norms) > 0.5, "clipping must be active"
    assert_agree(trajectory(single_process(), parallel(zero), 2), twin, norms, 1e-6)


def against_ddp_and_fsdp2(zero: int, overlap: bool) -> None:
    world = here(Grid(data=dist.get_world_size()))
    rank, ranks = world.replicas.rank, world.replicas.size
    found = trajectory(world, parallel(zero, overlap, overlap))
    mesh = init_device_mesh("cpu", (ranks,))
    replicated = network()
    sharded = network()
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    for oracle in (DistributedDataParallel(replicated), sharded):
        adam = torchs_adamw(oracle)
        norms = [torchs_step(oracle, adam, step, 1, rank, ranks) for step in range(STEPS)]
        assert_agree(found, replicated if oracle is not sharded else sharded, norms, 1e-5)


@pytest.mark.parametrize(("zero", "overlap"), [(0, False), (1, True), (2, True), (3, False)])
def test_ddp_and_fsdp2_agree(zero: int, overlap: bool) -> None:
    run_distributed(against_ddp_and_fsdp2, 2, zero=zero, overlap=overlap)


def changed(**settings: float) -> dict[str, Any]:
    return trajectory(single_process(), parallel(), optim=dataclasses.replace(OPTIM, **settings))


def test_the_comparison_sees_weight_decay() -> None:
    first, second = changed()["weights"], changed(weight_decay=0.0)["weights"]
    assert not torch.allclose(first["0.weight"], second["0.weight"], atol=1e-6)


def test_vectors_do_not_decay() -> None:
    """Epsilon exceeds every gradient, so that only weight decay changes weights."""
    start = dict(network().named_parameters())
    found = changed(adam_eps=1e9, weight_decay=0.3)["weights"]
    for name, p in start.items():
        assert torch.allclose(found[name], p, atol=1e-7) == (p.dim() == 1), name


def test_clip_of_zero_never_clips() -> None:
    clipped, free = changed(), changed(clip_grad=0.0)
    assert clipped["norms"][0] == free["norms"][0]
    for name in network().state_dict():
        moments = [found["state"][f"exp_avg/{name}"].norm() for found in (free, clipped)]
        assert moments[0] > 1.5 * moments[1], name


def test_clipping_scales_down_to_the_limit_and_never_up() -> None:
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    norm = math.sqrt(float(squared_norm(gradients, CPU)))
    assert norm == pytest.approx(5.0)
    assert clip_factor(norm, 10.0) == 1.0
    assert clip_factor(norm, 1.0) * norm == pytest.approx(1.0, rel=1e-5)
    assert float(squared_norm([], CPU)) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_padding_between_parameters_stays_zero(zero: int, dtype: torch.dtype) -> None:
    model = network()
    optimizer = Optimizer({0: model}, single_process(), OPTIM, parallel(zero), dtype)
    for step in range(3):
        one_step(model, optimizer, step, count=2)
    for bucket in optimizer._buckets:
        padding = torch.ones(bucket.size, dtype=torch.bool)
        for slot in bucket.plan.slots:
            slot.span.of(padding).fill_(False)
        assert padding.any(), "the network must have some"
        for flat in (bucket.weights, bucket.master):
            assert flat[padding].abs().sum() == 0 and flat[~padding].abs().sum() > 0


# bf16: the model has the rounded master weights, which move by steps that bf16 cannot represent.


@pytest.mark.parametrize(("zero", "param"), [(0, False), (1, True), (2, False)])
@distributed(world=2)
def test_bf16_weights_are_the_rounded_master_of_all_ranks(zero: int, param: bool) -> None:
    found = trajectory(
        here(Grid(data=2)), parallel(zero, param=param), 3, steps=3, dtype=torch.bfloat16, optim=OPTIM
    )
    for name, weight in found["weights"].items():
        master = found["state"][f"weights/{name}"]
        assert master.dtype == torch.float32 and weight.dtype == torch.bfloat16
        assert torch.equal(weight, master.bfloat16()), name
        assert not torch.equal(weight.float(), master)


def test_small_steps_in_bf16_are_kept_by_the_master() -> None:
    model = network()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optim = dataclasses.replace(OPTIM, weight_decay=0.0)
    optimizer = Optimizer({0: model}, single_process(), optim, parallel(), torch.bfloat16)
    for _ in range(20):
        one_step(model, optimizer, 0, rate=1e-5)
    master = {f.tensor: f.values for f in optimizer.fragments(owned_only=False)}
    moved = [(master[f"weights/{n}"].flatten() - w.flatten()).abs().mean() for n, w in start.items()]
    assert all(1e-4 < m < 3e-4 for m in moved), "twenty steps of 1e-5"


def test_bf16_stays_near_fp32() -> None:
    exact = trajectory(single_process(), parallel(), 2)
    rounded = trajectory(single_process(), parallel(2), 2, dtype=torch.bfloat16)
    assert rounded["norms"] == pytest.approx(exact["norms"], rel=0.02)


# Saving in one layout and loading in another.


def saved(zero: int, dtype: torch.dtype) -> tuple[list[Any], list[Any], dict[str, Tensor]]:
    """Runs two steps; returns what this rank saves, all it holds, and the weights after a third step."""
    world = here(Grid(data=dist.get_world_size())) if dist.is_initialized() else single_process()
    model = network()
    optimizer = Optimizer({0: model}, world, OPTIM, parallel(zero), dtype)
    for step in range(2):
        one_step(model, optimizer, step)
    owned, kept = (
        [(f.tensor, f.shape, f.start, f.values.clone()) for f in optimizer.fragments(owned_only=only)]
        for only in (True, False)
    )
    one_step(model, optimizer, 2)
    return owned, kept, {name: p.detach().clone() for name, p in model.named_parameters()}


def resumed(
    zero: int, param: bool, state: dict[str, Tensor], dtype: torch.dtype, updates: int = 2
) -> dict[str, dict[str, Tensor]]:
    """Returns the weights after loading, and after one more step."""
    world = here(Grid(data=dist.get_world_size())) if dist.is_initialized() else single_process()
    model = fill(network(), seed=77)
    optimizer = Optimizer({0: model}, world, OPTIM, parallel(zero, param=param, bucket=33), dtype)
    for fragment in optimizer.fragments(owned_only=False):
        fragment.values.copy_(region(state[fragment.tensor], fragment.start, tuple(fragment.values.shape)))
    optimizer.after_load(updates)
    loaded = {name: p.detach().clone() for name, p in model.named_parameters()}
    one_step(model, optimizer, 2)
    optimizer.wait_for_weights()
    return {"loaded": loaded, "next": {name: p.detach().clone() for name, p in model.named_parameters()}}


def ranks_or_none(function: Any, ranks: int, **arguments: Any) -> list[Any]:
    return [function(**arguments)] if ranks == 1 else run_distributed(function, ranks, **arguments)


LAYOUTS = [(1, 0), (2, 0), (2, 1), (4, 1), (2, 2)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("ranks", "zero"), LAYOUTS)
def test_state_saved_in_one_layout_loads_in_another(ranks: int, zero: int, dtype: torch.dtype) -> None:
    everyone = ranks_or_none(saved, ranks, zero=zero, dtype=dtype)
    state = assembled(itertools.chain.from_iterable(owned for owned, _, _ in everyone))
    assert {name.split("/")[0] for name in state} == {"weights", "exp_avg", "exp_avg_sq"}
    other_ranks, other_zero = LAYOUTS[(LAYOUTS.index((ranks, zero)) + 2) % len(LAYOUTS)]
    found = ranks_or_none(
        resumed, other_ranks, zero=other_zero, param=other_zero > 0, state=state, dtype=dtype
    )
    for rank in found:
        for name, weight in rank["loaded"].items():
            assert torch.equal(weight, state[f"weights/{name}"].to(dtype)), name
        for name, weight in rank["next"].items():
            expected = everyone[0][2][name]
            assert torch.allclose(weight, expected, atol=1e-6 if dtype == torch.float32 else 5e-3), name


def test_the_writing_is_shared_even_where_everyone_holds_everything() -> None:
    everyone = run_distributed(saved, 4, zero=0, dtype=torch.float32)
    elements = sum(p.numel() for p in network().parameters())
    for owned, kept, _ in everyone:
        assert sum(values.numel() for *_, values in kept) == 3 * elements
        # A quarter each, apart from the padding of such small buckets.
        assert 0 < sum(values.numel() for *_, values in owned) < 3 * elements / 2


def test_resume_in_the_same_layout_is_bitwise_equal() -> None:
    [(owned, _, after)] = ranks_or_none(saved, 1, zero=1, dtype=torch.float32)
    state = assembled(owned)
    found = resumed(zero=1, param=False, state=state, dtype=torch.float32)
    assert all(torch.equal(found["next"][name], weight) for name, weight in after.items())
    forgotten = resumed(zero=1, param=False, state=state, dtype=torch.float32, updates=0)
    assert not all(torch.equal(forgotten["next"][name], weight) for name, weight in after.items())


def unpublished() -> list[bool]:
    """Planted bug: without `after_load`, other ranks' shares of the weights are not updated."""
    state = {
        f"{kind}/{n}": torch.ones_like(p)
        for kind in ("weights", "exp_avg", "exp_avg_sq")
        for n, p in network().named_parameters()
    }
    Optimizer.after_load = lambda self, updates: None  # type: ignore[method-assign]
    found = resumed(zero=1, param=False, state=state, dtype=torch.float32)
    return [bool((weight == 1).all()) for weight in found["loaded"].values()]


def test_a_load_that_is_not_published_would_be_seen() -> None:
    for rank in run_distributed(unpublished, 2):
        assert not all(rank)


# Memory.

WIDTH = 48


def larger() -> nn.Sequential:
    return fill(nn.Sequential(*(Linear(WIDTH, WIDTH) for _ in range(24))))


def occupied(zero: int, dtype: torch.dtype) -> dict[str, int]:
    world = here(Grid(data=dist.get_world_size())) if dist.is_initialized() else single_process()
    model = larger()
    optimizer = Optimizer({0: model}, world, OPTIM, parallel(zero, bucket=5_000), dtype)
    x = torch.randn(2, WIDTH, dtype=dtype)
    optimizer.zero_gradients()
    optimizer.begin_backward(0, last=True)
    model(x).float().sum().backward()
    optimizer.end_backward(0, last=True)
    optimizer.reduce(0)
    optimizer.finish_reduction()
    optimizer.step(1e-3, 1.0)
    assert all(p.grad is None for p in model.parameters())
    assert not [t for r in optimizer._reductions.values() for t in r.memory()], "nothing outlives the step"
    return optimizer.bytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 4])
def test_memory_follows_the_formulas(ranks: int, zero: int, dtype: torch.dtype) -> None:
    elements = sum(p.numel() for p in larger().parameters())
    per_rank = elements / (ranks if zero else 1)
    one_bucket = 2 * (WIDTH * WIDTH + WIDTH)
    expected = {
        "parameters": elements * dtype.itemsize,
        # Without replicas, gradients keep the dtype in which autograd returns them.
        "gradients": elements * dtype.itemsize
        if ranks == 1
        else 4 * (elements if zero < 2 else elements / ranks + one_bucket),
        "master": 4 * per_rank if dtype == torch.bfloat16 else 0,
        "moments": 8 * per_rank,
    }
    for found in ranks_or_none(occupied, ranks, zero=zero, dtype=dtype):
        assert found.keys() == expected.keys()
        for kind, number in expected.items():
            assert found[kind] == pytest.approx(number, rel=0.01), kind


# Several stages on one rank.


def staged(world: World, zero: int, overlap: bool) -> dict[str, Tensor]:
    """Trains the network as two stages of one rank with interleaved backward passes."""
    model = network()
    chunks = {0: model[:2], 3: model[2:]}
    optimizer = Optimizer(chunks, world, OPTIM, parallel(zero, overlap, overlap), torch.float32)
    for step in range(3):
        optimizer.zero_gradients()
        batches = list(micro_batches(step, 2, world.replicas.rank, world.replicas.size))
        for number, (x, y) in enumerate(batches):
            last = number == len(batches) - 1
            between = chunks[0](x)
            entry = between.detach().requires_grad_()
            loss = loss_of(chunks[3], entry, y)
            optimizer.begin_backward(3, last)
            loss.backward()
            optimizer.end_backward(3, last)
            optimizer.begin_backward(0, last)
            between.backward(entry.grad)
            optimizer.end_backward(0, last)
        for stage in (3, 0):
            optimizer.reduce(stage)
        optimizer.finish_reduction()
        total = optimizer.squared_norm()
        if world.all_ranks.size > 1:
            dist.all_reduce(total)
        optimizer.step(RATE / (step + 1), math.sqrt(float(total)))
    optimizer.wait_for_weights()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def staged_on_ranks(zero: int, overlap: bool) -> dict[str, Tensor]:
    return staged(here(Grid(data=dist.get_world_size())), zero, overlap)


@pytest.mark.parametrize(("zero", "overlap"), [(0, True), (1, False), (2, False), (2, True)])
def test_several_stages_on_a_rank_equal_one(zero: int, overlap: bool) -> None:
    expected = trajectory(single_process(), parallel(), 2, steps=3)["weights"]
    for found in (
        staged(single_process(), zero, overlap),
        *run_distributed(staged_on_ranks, 2, zero=zero, overlap=overlap),
    ):
        assert all(torch.allclose(w, expected[name], atol=1e-6) for name, w in found.items())


def test_micro_batches_of_all_ranks_are_the_whole_batch() -> None:
    x, y = data(0)
    whole = [torch.cat(parts) for parts in zip(*(b for r in range(4) for b in micro_batches(0, 3, r, 4)))]
    assert torch.equal(whole[0], x) and torch.equal(whole[1], y)
