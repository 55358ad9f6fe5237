"""Compares an expert layer on several ranks with one process: outputs and all gradients."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pentatron.nn.moe import MoE
from pentatron.parallel.axes import NO_EXPERT_PARALLELISM, ExpertAxis
from pentatron.parallel.collectives import Group
from tests.harness import run_distributed
from tests.nn.mixtures import HIDDEN, layer, stream

LENGTH = 8
DISPATCHERS = ("alltoall", "allgather")


@dataclass(frozen=True)
class Found:
    output: Tensor
    of_input: Tensor
    of_router: Tensor
    of_fc1: Tensor
    of_fc2: Tensor


def inputs(ranks: int) -> Tensor:
    """Returns [rank, sequence, position, hidden]; channel 0 is 1, so that a router can prefer experts."""
    x = stream(2, ranks, 2, LENGTH, HIDDEN)
    x[..., 0] = 1.0
    return x


def prefer(model: MoE, experts: str) -> None:
    """Makes every token choose two of the named experts; without names, the router stays unchanged."""
    if experts:
        with torch.no_grad():
            model.router.weight[:, 0] = -10.0
            model.router.weight[[int(e) for e in experts], 0] = 10.0


def pass_through(model: MoE, x: Tensor, dy: Tensor) -> Found:
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(dy)
    experts = model.experts
    gradients = (
        x.grad,
        model.router.weight.grad,
        experts.linear_fc1.weight.grad,
        experts.linear_fc2.weight.grad,
    )
    assert all(g is not None and torch.isfinite(g).all() for g in gradients)
    return Found(y.detach(), *gradients)  # type: ignore[arg-type]


def on_a_rank(words: str, expert_tp: int, preferred: str) -> Found:
    group = Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    model = layer(words, ExpertAxis(group, expert_tp))
    prefer(model, preferred)
    x, dy = inputs(group.size), stream(3, group.size, 2, LENGTH, HIDDEN)
    return pass_through(model, x[group.rank], dy[group.rank])


def alone(words: str, ranks: int, preferred: str = "") -> Found:
    model = layer(words, NO_EXPERT_PARALLELISM)
    prefer(model, preferred)
    return pass_through(model, inputs(ranks).flatten(0, 1), stream(3, ranks, 2, LENGTH, HIDDEN).flatten(0, 1))


def own_experts(gradient: Tensor, ep_rank: int, ep_size: int) -> Tensor:
    return gradient.chunk(ep_size)[ep_rank]


def compare(words: str, ranks: int, expert_tp: int, preferred: str = "") -> list[Found]:
    found = run_distributed(on_a_rank, world=ranks, words=words, expert_tp=expert_tp, preferred=preferred)
    whole = alone(words, ranks, preferred)
    for name in ("output", "of_input"):
        joined = torch.cat([getattr(part, name) for part in found])
        assert torch.allclose(joined, getattr(whole, name), rtol=1e-4, atol=1e-5), name
    # Every rank has the whole router and sees its own tokens, so that the gradients add up.
    summed = torch.stack([part.of_router for part in found]).sum(0)
    assert torch.allclose(summed, whole.of_router, rtol=1e-4, atol=1e-5)
    for rank, part in enumerate(found):
        ep_rank, number = divmod(rank, expert_tp)
        fc1, fc2 = (own_experts(g, ep_rank, ranks // expert_tp) for g in (whole.of_fc1, whole.of_fc2))
        halves = [half.chunk(expert_tp, 1)[number] for half in fc1.chunk(2, 1)]
        assert torch.allclose(part.of_fc1, torch.cat(halves, 1), rtol=1e-4, atol=1e-5), rank
        assert torch.allclose(part.of_fc2, fc2.chunk(expert_tp, 2)[number], rtol=1e-4, atol=1e-5), rank
    return found


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize(
    ("ranks", "expert_tp"),
    [(2, 1), (2, 2), (4, 2)],
    ids=["2 holders", "expert cut in 2", "2 holders, cut in 2"],
)
def test_spread_experts_compute_what_one_process_does(dispatcher: str, ranks: int, expert_tp: int) -> None:
    compare(f"--moe-token-dispatcher-type {dispatcher}", ranks, expert_tp)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_dropped_tokens(dispatcher: str) -> None:
    """Tokens are dropped per micro-batch, so one process takes the ranks' micro-batches one by one."""
    words = f"--moe-token-dispatcher-type {dispatcher} --moe-expert-capacity-factor 0.5"
    found = run_distributed(on_a_rank, world=2, words=words, expert_tp=1, preferred="")
    model = layer(words)
    x, dy = inputs(2), stream(3, 2, 2, LENGTH, HIDDEN)
    for rank, part in enumerate(found):
        whole = pass_through(model, x[rank], dy[rank])
        assert torch.allclose(part.output, whole.output, rtol=1e-4, atol=1e-5)
        assert torch.allclose(part.of_input, whole.of_input, rtol=1e-4, atol=1e-5)
    fc1 = model.experts.linear_fc1.weight.grad
    assert fc1 is not None
    assert torch.allclose(torch.cat([part.of_fc1 for part in found]), fc1, rtol=1e-4, atol=1e-5)
    kept = layer(words).router(x[0]).kept_TK
    assert kept is not None and 0 < kept.sum() < kept.numel()


def test_both_dispatchers_agree() -> None:
    ways = [
        run_distributed(
            on_a_rank, world=2, words=f"--moe-token-dispatcher-type {d}", expert_tp=1, preferred=""
        )
        for d in DISPATCHERS
    ]
    for one, other in zip(*ways, strict=True):
        # The dispatchers sum over ranks in different orders; experts compute the same.
        assert torch.allclose(one.output, other.output, rtol=1e-5, atol=1e-6)
        assert torch.allclose(one.of_input, other.of_input, rtol=1e-5, atol=1e-6)
        assert torch.allclose(one.of_router, other.of_router, rtol=1e-4, atol=1e-6)
        assert torch.allclose(one.of_fc1, other.of_fc1, rtol=1e-4, atol=1e-6)
        assert torch.allclose(one.of_fc2, other.of_fc2, rtol=1e-4, atol=1e-6)


# --- experts without tokens ---


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("expert_tp", [1, 2])
def test_a_rank_without_tokens(dispatcher: str, expert_tp: int) -> None:
    """Experts 0 to 3 are on the first expert rank; the other one has none but takes part in collectives."""
    found = compare(f"--moe-token-dispatcher-type {dispatcher}", 2 * expert_tp, expert_tp, preferred="123")
    for idle in found[expert_tp:]:
        assert idle.of_fc1.eq(0).all() and idle.of_fc2.eq(0).all()
    for busy in found[:expert_tp]:
        assert busy.of_fc1[0].eq(0).all(), "expert 0 is not among the preferred"
        assert busy.of_fc1[1:].abs().amax((1, 2)).min() > 0


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_an_expert_without_tokens_on_one_process(dispatcher: str) -> None:
    whole = alone(f"--moe-token-dispatcher-type {dispatcher}", 1, preferred="256")
    busy = whole.of_fc1.abs().amax((1, 2)) > 0
    assert busy.nonzero().flatten().tolist() == [2, 5, 6]
    assert whole.of_fc2[~busy].eq(0).all()


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_every_token_dropped_by_an_expert_gives_nothing(dispatcher: str) -> None:
    """All tokens choose two experts with a small capacity; the output of dropped tokens is exactly zero."""
    words = f"--moe-token-dispatcher-type {dispatcher} --moe-expert-capacity-factor 0.25"
    model = layer(words)
    prefer(model, "25")
    x = inputs(1)[0]
    routing = model.router(x)
    assert routing.kept_TK is not None
    dropped = ~routing.kept_TK.any(1)
    assert dropped.sum() >= 14
    assert model(x).flatten(0, 1)[dropped].eq(0).all()
