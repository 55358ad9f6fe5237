"""Compares layers that are split over the tensor axis with whole layers."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pentatron.nn.init import draw_weights
from pentatron.nn.linear import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, even_rows
from pentatron.nn.loss import token_losses
from pentatron.parallel.axes import TensorAxis
from pentatron.parallel.collectives import Group
from pentatron.parallel.sharding import sharded_parameters
from tests.harness import distributed


def axis(sequence_parallel: bool) -> TensorAxis:
    group = Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    return TensorAxis(group, sequence_parallel=sequence_parallel)


def drawn(layer: torch.nn.Module) -> torch.nn.Module:
    draw_weights(sharded_parameters(layer), seed=1, std=0.1)
    return layer


def stream(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@distributed(world=2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column_then_row_is_the_whole_mlp(sequence_parallel: bool) -> None:
    split, alone = axis(sequence_parallel), TensorAxis()

    def pair(where: TensorAxis) -> tuple[torch.nn.Module, torch.nn.Module]:
        column = ColumnParallelLinear(6, 8, even_rows(8, where), True, where)
        return drawn(column), drawn(RowParallelLinear(8, 6, True, where))

    x, dy = stream(1, 2, 4, 6), stream(2, 2, 4, 6)
    ours, theirs = pair(split), pair(alone)
    x_ours = split.own_sequence(x).clone().requires_grad_()
    x_theirs = x.clone().requires_grad_()
    y_ours, y_theirs = ours[1](ours[0](x_ours).tanh()), theirs[1](theirs[0](x_theirs).tanh())
    y_ours.backward(split.own_sequence(dy))
    y_theirs.backward(dy)
    assert torch.allclose(y_ours, split.own_sequence(y_theirs), atol=1e-6)
    assert torch.allclose(x_ours.grad, split.own_sequence(x_theirs.grad), atol=1e-6)
    rank = split.rank
    rows = slice(4 * rank, 4 * rank + 4)
    assert torch.allclose(ours[0].weight.grad, theirs[0].weight.grad[rows], atol=1e-6)
    assert torch.allclose(ours[0].bias.grad, theirs[0].bias.grad[rows], atol=1e-6)
    assert torch.allclose(ours[1].weight.grad, theirs[1].weight.grad[:, rows], atol=1e-6)
    bias_gradient = ours[1].bias.grad
    if sequence_parallel:
        # Each rank saw its own tokens only: its gradient is a part of the sum, as the shard declares.
        assert not torch.allclose(bias_gradient, theirs[1].bias.grad, atol=1e-3)
        dist.all_reduce(bias_gradient)
    assert torch.allclose(bias_gradient, theirs[1].bias.grad, atol=1e-6)


@distributed(world=4)
@pytest.mark.parametrize("vocabulary", [13, 16, 5])
def test_cross_entropy_and_tables_over_a_split_vocabulary(vocabulary: int) -> None:
    """Covers vocabulary shards with padding, without padding, and of padding only."""
    split, alone = axis(False), TensorAxis()
    ours, theirs = (
        drawn(VocabParallelEmbedding(16, vocabulary, 6, split)),
        drawn(VocabParallelEmbedding(16, vocabulary, 6, alone)),
    )
    rows = slice(4 * split.rank, 4 * split.rank + 4)
    assert torch.equal(ours.weight, theirs.weight[rows])
    tokens = torch.randint(0, vocabulary, (2, 5), generator=torch.Generator().manual_seed(3))
    labels, scale = tokens.roll(1, 1), stream(4, 2, 5)
    found, expected = ours(tokens), theirs(tokens)
    assert torch.allclose(found, expected, atol=1e-6)
    losses = token_losses(ours.logits(found * 20), labels, vocabulary, ours.first, split.group)
    logits = F.linear(expected * 20, theirs.weight)[..., :vocabulary]
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 5)
    assert torch.allclose(losses, wanted, atol=1e-5)
    (losses * scale).sum().backward()
    (wanted * scale).sum().backward()
    assert torch.allclose(ours.weight.grad, theirs.weight.grad[rows], atol=1e-5)
    assert ours.weight.grad[max(0, vocabulary - 4 * split.rank) :].abs().sum() == 0


@distributed(world=2)
def test_large_logits_do_not_overflow() -> None:
    split = axis(False)
    logits = torch.full((1, 1, 3), 5e4) + split.rank
    losses = token_losses(logits, torch.tensor([[5]]), 6, 3 * split.rank, split.group)
    assert torch.allclose(losses, F.cross_entropy(torch.tensor([[0.0] * 3 + [1.0] * 3]), torch.tensor([5])))
