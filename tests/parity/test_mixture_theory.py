"""Costs of experts against formulas: collectives, exchanged rows, and bytes on a rank."""

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from pentatron.compare.trial import micro_batches
from pentatron.optim.optimizer import Optimizer
from pentatron.settings.run_config import RunConfig
from pentatron.train.model import build_parallel_model, model_dtype
from pentatron.train.step import train_step
from tests.harness import run_distributed
from tests.parity.cases import MIXTURES, SHAPE
from tests.parity.test_theory import LARGE, bytes_on_a_rank, parameters_of, step_on_a_rank
from tests.parity.trajectory import here
from tests.support import resolved

TP, CP, EP = "--tensor-model-parallel-size", "--context-parallel-size", "--expert-model-parallel-size"
ETP, GATHER = "--expert-tensor-parallel-size", "--moe-token-dispatcher-type allgather"


def expected(config: RunConfig) -> Counter[str]:
    """Returns the collectives of one step of a model in one stage."""
    grid, moe, batches = config.grid, config.moe, config.accumulation
    sparse = len(config.layers_with_experts)
    layers, shared = config.model.num_layers, moe.moe_shared_expert_intermediate_size is not None
    total: Counter[str] = Counter()
    if grid.expert * grid.expert_tensor > 1:
        if moe.moe_token_dispatcher_type == "alltoall":
            # One for the sizes; four for tokens there and back, in forward and backward.
            total["all-to-all"] += 5 * sparse * batches
        else:
            # All-gather: tokens, weights and choices in forward, gradients of the output in backward.
            # Reduce-scatter: the output in forward, gradients of tokens and weights in backward.
            total += Counter({"all-gather": 4 * sparse * batches, "reduce-scatter": 3 * sparse * batches})
    if grid.tensor * grid.context > 1:
        counted = {"aux_loss", "seq_aux_loss"} & set(moe.moe_router_load_balancing_type)
        total["all-reduce"] += len(counted) * sparse * batches
    if grid.tensor > 1:
        # Attention and dense or shared MLPs; experts take tokens as they are.
        crossings = 2 * layers + 2 * (layers - sparse) + 2 * sparse * shared + 2
        total += Counter({"all-gather": crossings * batches, "reduce-scatter": crossings * batches})
        # Two of the cross entropy, and once a step the gradients that are partial over tensor ranks.
        total["all-reduce"] += 2 * batches + 1
    if grid.context > 1:
        total["ring pass"] += (2 * (grid.context - 1) + grid.context) * layers * batches
    replicas, copies = grid.data * grid.context, grid.expert_data
    for ranks in (replicas, copies):
        if ranks > 1:
            match config.parallel.zero_stage:
                case 0:
                    total["all-reduce"] += 1
                case 1:
                    total += Counter({"reduce-scatter": 1, "all-gather": 1})
                case 2:
                    total += Counter({"reduce-scatter": batches, "all-gather": 1})
    # Valid tokens over the replicas; loss, norm and load over all ranks.
    total["all-reduce"] += (replicas > 1) + 1
    return +total


@pytest.mark.parametrize(
    ("family", "ranks", "words"),
    [
        ("mixtral", 2, f"{EP} 2"),
        ("qwen2-moe", 2, f"{EP} 2 {GATHER}"),
        ("qwen3-moe", 4, f"{EP} 2 --zero-stage 1"),
        ("sigmoid", 4, f"{EP} 4 --zero-stage 2"),
        ("mixtral", 4, f"{EP} 2 --zero-stage 2 {GATHER}"),
        ("qwen2-moe", 2, f"{TP} 2 {ETP} 1 {EP} 2"),
        ("qwen3-moe", 4, f"{TP} 2 {EP} 2"),
        ("mixtral", 2, f"{CP} 2 {EP} 2"),
    ],
)
def test_collectives_are_those_of_the_theory(family: str, ranks: int, words: str) -> None:
    command = f"{SHAPE} {MIXTURES[family]} --micro-batch-size 2 {words}"
    config = resolved(command, ranks).config
    for rank, seen in enumerate(run_distributed(step_on_a_rank, ranks, words=command)):
        assert +seen == expected(config), f"rank {rank}"


def exchanged_on_a_rank(words: str) -> tuple[int, int]:
    """Returns the rows of hidden states that this rank sends to and receives from others in a step."""
    config = resolved(words, dist.get_world_size()).config
    world = here(config)
    model = build_parallel_model(config, world)
    optimizer = Optimizer(model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config))
    batches = micro_batches(config, world, 0)
    chunk = [next(batches) for _ in range(config.accumulation)]
    exchange, sent, received = dist.all_to_all_single, 0, 0

    def counting(into: Any, given: Any, into_sizes: Any, given_sizes: Any, group: Any) -> Any:
        nonlocal sent, received
        if given_sizes is not None:
            me = dist.get_rank(group)
            sent += sum(n for rank, n in enumerate(given_sizes) if rank != me)
            received += sum(n for rank, n in enumerate(into_sizes) if rank != me)
            assert given.shape[1] == config.model.hidden_size
        return exchange(into, given, into_sizes, given_sizes, group=group)

    dist.all_to_all_single = counting
    train_step(model, optimizer, chunk, 1e-3, step=0)
    return sent, received


@pytest.mark.parametrize(
    ("ranks", "words", "cut", "always_elsewhere"), [(2, f"{EP} 2", 1, False), (2, f"{ETP} 2", 2, True)]
)
def test_every_chosen_token_travels_there_and_back_and_so_does_its_gradient(
    ranks: int, words: str, cut: int, always_elsewhere: bool
) -> None:
    command = f"{SHAPE} {MIXTURES['mixtral']} --micro-batch-size 2 {words}"
    config = resolved(command, ranks).config
    tokens = config.train.global_batch_size * config.model.seq_length  # type: ignore[operator]
    pairs = tokens * config.moe.moe_router_topk * config.model.num_layers
    found = run_distributed(exchanged_on_a_rank, ranks, words=command)
    sent, received = (sum(rank[i] for rank in found) for i in (0, 1))
    assert sent == received
    if always_elsewhere:
        # One of the two ranks that share an expert is always remote: each pair sends a row four times.
        assert sent == 4 * pairs
    else:
        # About half of the pairs stay on their rank.
        assert 0.3 * 4 * pairs < sent < 0.7 * 4 * pairs and sent % 2 == 0
    assert cut == config.grid.expert_tensor


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, f"{EP} 2"),
        (4, f"{EP} 2 --zero-stage 1"),
        (4, f"{EP} 2 --zero-stage 2"),
        (4, f"{TP} 2 {EP} 2 --zero-stage 1"),
        (2, f"{TP} 2 {ETP} 1 {EP} 2"),
    ],
)
def test_bytes_per_rank_are_those_of_the_formulas(ranks: int, words: str) -> None:
    bucket = 20_000
    experts = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128"
    command = f"{LARGE} {experts} {words} --ddp-bucket-size {bucket} --global-batch-size 8"
    config = resolved(command, ranks).config
    m, moe, grid = config.model, config.moe, config.grid
    assert m.ffn_hidden_size and moe.num_experts and moe.moe_ffn_hidden_size and m.padded_vocab_size
    sparse = m.num_layers * 3 * moe.num_experts * moe.moe_ffn_hidden_size * m.hidden_size
    sparse //= grid.expert * grid.expert_tensor
    zero, replicas = config.parallel.zero_stage, grid.data * grid.context
    for rank, held in enumerate(run_distributed(bytes_on_a_rank, ranks, words=command)):
        mlps = m.num_layers * 3 * m.ffn_hidden_size * m.hidden_size / grid.tensor
        routers = m.num_layers * moe.num_experts * m.hidden_size
        dense = parameters_of(config, rank) - mlps + routers
        assert held["parameters"] == pytest.approx(4 * (dense + sparse), rel=0.01)
        shares = dense / replicas + sparse / grid.expert_data if zero else dense + sparse
        assert held["moments"] == pytest.approx(8 * shares, rel=0.01)
        if zero == 2:
            largest = max(bucket, m.padded_vocab_size * m.hidden_size, sparse / m.num_layers)
            # A bucket of experts and one of dense layers fill at the same time.
            assert 4 * shares * 0.99 <= held["gradients"] <= 4 * shares * 1.01 + 2 * 4 * largest * 1.01
        else:
            assert held["gradients"] == pytest.approx(4 * (dense + sparse), rel=0.01)
