"""Costs of a layout against formulas: collectives of a step, and bytes of optimizer and gradients."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from pentatron.compare.trial import micro_batches
from pentatron.layout.actions import Kind
from pentatron.layout.check import check
from pentatron.layout.stages import StagePart
from pentatron.optim.build import build_optimizer
from pentatron.parallel.messages import ANNOUNCEMENT_TAG
from pentatron.settings.run_config import RunConfig
from pentatron.train.model import build_parallel_model, model_dtype
from pentatron.train.step import train_step
from tests.harness import run_distributed
from tests.parity.cases import FAMILIES, SHAPE
from tests.parity.trajectory import here
from tests.support import LLAMA, resolved

# Old and new names of torch, mapped to one.
NAMES = {
    "all_reduce": "all-reduce",
    "all_gather_single": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_single": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "batch_isend_irecv": "ring pass",
    "isend": "send",
    "irecv": "receive",
}


def count_collectives() -> Counter[str]:
    """Counts this process's calls of torch.distributed from now on, except announcements of a step."""
    seen: Counter[str] = Counter()
    for name, kind in NAMES.items():
        if hasattr(dist, name):
            setattr(dist, name, counting(getattr(dist, name), kind, seen))
    return seen


def counting(real: Callable[..., Any], kind: str, seen: Counter[str]) -> Callable[..., Any]:
    def counted(*words: Any, **named: Any) -> Any:
        if named.get("tag") != ANNOUNCEMENT_TAG:
            seen[kind] += 1
        return real(*words, **named)

    return counted


def step_on_a_rank(words: str) -> Counter[str]:
    config = resolved(words, dist.get_world_size()).config
    world = here(config)
    model = build_parallel_model(config, world)
    optimizer = build_optimizer(
        model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config)
    )
    batches = micro_batches(config, world, 0)
    chunk = [next(batches) for _ in range(config.accumulation)]
    seen = count_collectives()
    train_step(model, optimizer, chunk, 1e-3, step=0)
    return Counter(dict(seen))


def expected(config: RunConfig, rank: int) -> Counter[str]:
    """Returns the collectives of one step on one rank, by formula."""
    grid, at, micro_batches = config.grid, config.grid.coordinates(rank), config.accumulation
    total: Counter[str] = Counter()
    parts = [config.stages[s] for s in config.placement.stages_of(at.pipeline)]
    layers = sum(len(part.layers) for part in parts)
    first, last = any(p.embedding for p in parts), any(p.head for p in parts)
    tied = not config.model.untie_embeddings_and_output_weights
    sp = config.parallel.sequence_parallel
    if grid.tensor > 1:
        if sp:
            # Each layer gathers twice and scatters twice; the backward of one is the other.
            crossings = 4 * layers + first + last
            total += Counter(
                {"all-gather": crossings * micro_batches, "reduce-scatter": crossings * micro_batches}
            )
        else:
            total["all-reduce"] += (4 * layers + first + last) * micro_batches
        total += Counter({kind: n * micro_batches for kind, n in recomputed(config, parts).items()})
        # The largest logit, then the two sums of the cross entropy.
        total["all-reduce"] += 2 * last * micro_batches
        # Norms are at the end of a bucket: if it is partitioned, in the share of the last replica.
        last_replica = at.data == grid.data - 1 and at.context == grid.context - 1
        # ZeRO 3 shards each parameter, so that every rank has a part of each norm.
        holds_norms = config.parallel.zero_stage in (0, 3) or last_replica
        total["all-reduce"] += (sp or config.model.qk_layernorm) and holds_norms
        total["all-reduce"] += grid.kv_copies > 1
    if grid.pipeline > 1:
        # The two ends of a folded pipeline are on one rank and share one parameter.
        total["all-reduce"] += tied and first != last
        where = config.placement.rank_of
        # Both ways over every boundary between two ranks; a folded pipeline turns within its last rank.
        boundaries = [
            pair for pair in itertools.pairwise(where) if at.pipeline in pair and len(set(pair)) > 1
        ]
        messages = len(boundaries) * micro_batches
        total += Counter({"send": messages, "receive": messages})
    if grid.context > 1:
        match config.parallel.cp_comm_type:
            case "p2p":
                # Keys and values pass all other ranks in forward and backward, their gradients go all the way
                # round.
                total["ring pass"] += (2 * (grid.context - 1) + grid.context) * layers * micro_batches
            case "all_gather":
                total["all-gather"] += 2 * layers * micro_batches
                total["reduce-scatter"] += layers * micro_batches
            case "a2a":
                total["all-to-all"] += 4 * layers * micro_batches
    if grid.data * grid.context > 1:
        # One bucket for each stage, and one for an embedding that is tied to another stage's head.
        apart = tied and grid.pipeline > 1 and first != last
        shared = tied and grid.pipeline > 1 and first and last
        buckets = len(parts) + apart
        total["all-reduce"] += 1
        match config.parallel.zero_stage:
            case 0:
                total["all-reduce"] += buckets + shared
            case 1:
                total += Counter({"reduce-scatter": buckets + shared, "all-gather": buckets + shared})
            case 2:
                # A parameter that two stages share is reduced once, after both.
                total["reduce-scatter"] += buckets * micro_batches + shared
                total["all-gather"] += buckets + shared
            case 3:
                total += sharded(config, parts)
    total["all-reduce"] += 1
    return +total


def sharded(config: RunConfig, parts: list[StagePart]) -> Counter[str]:
    """Returns the collectives of ZeRO 3.

    Every layer is gathered in forward and in backward, where its gradients are reduce-scattered. Other
    parameters of a stage are gathered once a step.
    """
    layers, beside = sum(len(p.layers) for p in parts), sum(p.embedding or p.head for p in parts)
    micro_batches = config.accumulation
    return Counter(
        {
            "all-gather": 2 * layers * micro_batches + beside,
            "reduce-scatter": (layers + beside) * micro_batches,
            # Between groups of replicas, for each stage.
            "all-reduce": len(parts) * (config.grid.instances > 1),
        }
    )


def recomputed(config: RunConfig, parts: list[StagePart]) -> Counter[str]:
    """Returns the collectives that recompute repeats, up to the last tensor that backward needs."""
    memory, sp = config.memory, config.parallel.sequence_parallel
    layers = [len(part.layers) for part in parts]
    if memory.recompute_granularity == "selective":
        # Only the MLP has collectives: its input is gathered again, its output is not needed.
        return Counter({"all-gather": sum(layers)} if sp and "mlp" in memory.recompute_modules else {})
    each = memory.recompute_num_layers
    if memory.recompute_granularity is None or each is None:
        return Counter()
    covered = sum(layers) if memory.recompute_method == "uniform" else sum(min(n, each) for n in layers)
    chunks = sum(-(-n // each) for n in layers) if memory.recompute_method == "uniform" else covered
    # The output of a chunk's last layer is not needed, unless dropout follows, which saves its keys.
    leaving = 2 * covered - (chunks if config.model.hidden_dropout == 0 else 0)
    if sp:
        return Counter({"all-gather": 2 * covered, "reduce-scatter": leaving})
    return Counter({"all-reduce": leaving})


ZERO3 = "--zero-stage 3"
TP, SP, PP = "--tensor-model-parallel-size", "--sequence-parallel", "--pipeline-model-parallel-size"
CP = "--context-parallel-size"
VIRTUAL = "--virtual-pipeline-model-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method"
SELECTIVE = "--recompute-granularity selective --recompute-modules"


@pytest.mark.parametrize(
    ("family", "ranks", "words"),
    [
        ("llama", 2, ""),
        ("llama", 2, "--zero-stage 1"),
        ("gpt", 2, "--zero-stage 2"),
        ("llama", 2, f"{TP} 2"),
        ("qwen3", 2, f"{TP} 2"),
        ("gpt", 2, f"{TP} 2 {SP}"),
        ("qwen2.5", 4, f"{TP} 4"),
        ("llama", 2, f"{PP} 2"),
        ("qwen2.5", 4, f"{PP} 2 --zero-stage 1"),
        ("gpt", 2, f"{PP} 2 {VIRTUAL}"),
        ("qwen3", 4, f"{TP} 2 {SP} {PP} 2 --pipeline-schedule gpipe"),
        ("qwen2.5", 8, f"{TP} 2 {SP} {PP} 2 --zero-stage 2"),
        ("qwen2.5", 4, f"{PP} 2 --zero-stage 2 --pipeline-schedule zero-bubble"),
        (
            "llama",
            4,
            f"{PP} 2 --zero-stage 2 --overlap-grad-reduce --pipeline-schedule zbv --micro-batch-size 1",
        ),
        ("qwen2.5", 2, f"{PP} 2 --pipeline-schedule zbv"),
        ("qwen2.5", 4, f"{PP} 2 --pipeline-schedule dualpipev --zero-stage 1 --micro-batch-size 1"),
        ("gpt", 4, f"{PP} 2 --pipeline-schedule zbv --zero-stage 2 --micro-batch-size 1"),
        ("llama", 2, f"{CP} 2"),
        ("gpt", 4, f"{CP} 4 --zero-stage 1"),
        ("qwen3", 2, f"{CP} 2 --cp-comm-type all_gather --zero-stage 2"),
        ("qwen2.5", 2, f"{CP} 2 --cp-comm-type a2a"),
        ("gpt", 4, f"{CP} 2 {PP} 2 --cp-comm-type a2a"),
        ("qwen3", 8, f"{TP} 2 {SP} {CP} 2 --zero-stage 1"),
        ("llama", 2, ZERO3),
        ("qwen2.5", 4, f"{ZERO3} --num-distributed-optimizer-instances 2"),
        ("qwen3", 4, f"{TP} 2 {SP} {ZERO3}"),
        ("qwen2.5", 4, f"{PP} 2 {ZERO3}"),
        ("gpt", 4, f"{PP} 2 {VIRTUAL} {ZERO3}"),
        ("llama", 4, f"{PP} 2 --pipeline-schedule gpipe {ZERO3}"),
        ("llama", 4, f"{CP} 2 {ZERO3}"),
        ("llama", 2, f"{ZERO3} {FULL} uniform --recompute-num-layers 1"),
        ("llama", 2, f"{TP} 2 {FULL} uniform --recompute-num-layers 1"),
        ("gpt", 2, f"{TP} 2 {SP} {FULL} uniform --recompute-num-layers 3"),
        ("llama", 2, f"{TP} 2 {SP} {FULL} block --recompute-num-layers 3"),
        ("llama", 2, f"{PP} 2 {FULL} uniform --recompute-num-layers 1"),
        ("llama", 2, f"{TP} 2 {SP} {SELECTIVE} core_attn mlp layernorm"),
        ("qwen2.5", 8, f"{TP} 2 {SP} {PP} 2 --zero-stage 2 {FULL} uniform --recompute-num-layers 2"),
        (
            "llama",
            4,
            f"{TP} 2 {PP} 2 --pipeline-schedule zero-bubble {FULL} uniform --recompute-num-layers 1",
        ),
        ("gpt", 4, f"{TP} 2 {SP} {PP} 2 --pipeline-schedule zbv {SELECTIVE} mlp layernorm"),
    ],
)
def test_collectives_are_those_of_the_theory(family: str, ranks: int, words: str) -> None:
    command = f"{SHAPE} {FAMILIES[family]} --micro-batch-size 2 {words}"
    config = resolved(command, ranks).config
    for rank, seen in enumerate(run_distributed(step_on_a_rank, ranks, words=command)):
        assert +seen == expected(config, rank), f"rank {rank}"


def layer_runs_on_a_rank(words: str) -> list[int]:
    """Returns how often each of this rank's layers starts to run in a step."""
    config = resolved(words, dist.get_world_size()).config
    world = here(config)
    model = build_parallel_model(config, world)
    optimizer = build_optimizer(
        model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config)
    )
    chunk = list(itertools.islice(micro_batches(config, world, 0), config.accumulation))
    seen: Counter[int] = Counter()
    layers = [layer for stage in model.stages.values() for layer in stage.layers.values()]
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda module, inputs, number=number: seen.update([number]))
    train_step(model, optimizer, chunk, 1e-3, step=0)
    return [seen[number] for number in range(len(layers))]


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize(
    ("words", "runs"), [("", 1), (f"{FULL} uniform --recompute-num-layers 2", 2), (f"{SELECTIVE} mlp", 1)]
)
def test_a_pipeline_runs_no_layer_more_often_than_recompute_needs(
    words: str, runs: int, schedule: str
) -> None:
    command = (
        f"{SHAPE} {FAMILIES['llama']} --micro-batch-size 2 {PP} 2 --pipeline-schedule {schedule} {words}"
    )
    for seen in run_distributed(layer_runs_on_a_rank, 2, words=command):
        assert seen == [runs * 4] * len(seen) and seen, "four micro-batches"


def deferred_on_a_rank(words: str) -> int:
    """Returns the most elements kept for deferred weight gradients in one step."""
    config = resolved(words, dist.get_world_size()).config
    world = here(config)
    model = build_parallel_model(config, world)
    optimizer = build_optimizer(
        model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config)
    )
    batches = micro_batches(config, world, 0)
    most = 0
    end = optimizer.end_backward

    def counting_end(stage: int, last: bool, kind: Kind) -> None:
        nonlocal most
        most = max(most, model.executor.deferred.elements)
        end(stage, last, kind)

    optimizer.end_backward = counting_end  # type: ignore[method-assign,assignment]
    train_step(model, optimizer, [next(batches) for _ in range(config.accumulation)], 1e-3, step=0)
    return most


@pytest.mark.parametrize(
    "words",
    [
        f"{PP} 2",
        f"{TP} 2 {SP} {PP} 2",
        f"{TP} 2 {PP} 2",
        # Recompute does not change the number.
        f"{PP} 2 {FULL} uniform --recompute-num-layers 2",
        f"{TP} 2 {SP} {PP} 2 {SELECTIVE} core_attn mlp layernorm",
    ],
)
def test_memory_held_for_deferred_weight_gradients(words: str) -> None:
    """Between its halves a backward keeps each linear layer's input and the gradient of its output."""
    command = f"{SHAPE} {FAMILIES['llama']} --micro-batch-size 1 {words} --pipeline-schedule zero-bubble"
    ranks = 2 if TP not in words else 4
    config = resolved(command, ranks).config
    m, tensor = config.model, config.grid.tensor
    assert m.num_attention_heads and m.num_query_groups and m.kv_channels
    assert m.ffn_hidden_size and m.padded_vocab_size
    attention = (2 * m.num_attention_heads + 2 * m.num_query_groups) * m.kv_channels
    layer = 4 * m.hidden_size + (attention + 3 * m.ffn_hidden_size) // tensor
    head = m.hidden_size + m.padded_vocab_size // tensor
    deferred = check(config.schedule(config.accumulation)).deferred
    for rank, most in enumerate(run_distributed(deferred_on_a_rank, ranks, words=command)):
        at = config.grid.coordinates(rank).pipeline
        part = config.stages[at]
        of_one = m.seq_length * (len(part.layers) * layer + part.head * head)
        assert most == deferred[at] * of_one, f"rank {rank}"


# Large enough that rounding up to whole shares is less than a percent.
LARGE = (
    f"{LLAMA} --num-layers 4 --hidden-size 96 --num-attention-heads 8 --kv-channels 16 --ffn-hidden-size 256 "
    f"--group-query-attention --num-query-groups 2 --seq-length 16 --vocab-size 512 --micro-batch-size 1 "
    f"--untie-embeddings-and-output-weights"
)
BUCKET = 20_000


def bytes_on_a_rank(words: str) -> dict[str, int]:
    config = resolved(words, dist.get_world_size()).config
    world = here(config)
    model = build_parallel_model(config, world)
    optimizer = build_optimizer(
        model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config)
    )
    chunk = list(itertools.islice(micro_batches(config, world, 0), config.accumulation))
    train_step(model, optimizer, chunk, 1e-3, step=0)
    return optimizer.bytes()


def parameters_of(config: RunConfig, rank: int) -> float:
    """Returns the number of parameters of a rank, from the sizes of the architecture."""
    m, grid = config.model, config.grid
    assert (
        m.num_attention_heads
        and m.num_query_groups
        and m.kv_channels
        and m.ffn_hidden_size
        and m.padded_vocab_size
    )
    key_value = 2 * m.num_query_groups * m.kv_channels * m.hidden_size * grid.kv_copies
    attention = 2 * m.num_attention_heads * m.kv_channels * m.hidden_size + key_value
    mlp = 3 * m.ffn_hidden_size * m.hidden_size
    layer = (attention + mlp) / grid.tensor + 2 * m.hidden_size
    table = m.padded_vocab_size * m.hidden_size / grid.tensor
    parts = [config.stages[s] for s in config.placement.stages_of(grid.coordinates(rank).pipeline)]
    return sum(len(p.layers) * layer + p.embedding * table + p.head * (table + m.hidden_size) for p in parts)


@pytest.mark.parametrize("precision", ["", "--bf16"])
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, ""),
        (2, ""),
        (2, "--zero-stage 1"),
        (4, "--zero-stage 2"),
        (4, f"{TP} 4 {SP}"),
        (4, f"{TP} 2 {PP} 2"),
        (8, f"{TP} 2 {PP} 2 --zero-stage 1"),
        (8, f"{PP} 2 {VIRTUAL} --zero-stage 2"),
        (4, f"{CP} 2 --zero-stage 1"),
        (4, f"{CP} 4 --zero-stage 2"),
        (2, ZERO3),
        (4, f"{TP} 2 {SP} {ZERO3}"),
        (8, f"{PP} 2 {VIRTUAL} {ZERO3} --num-distributed-optimizer-instances 2"),
    ],
)
def test_bytes_per_rank_are_those_of_the_formulas(ranks: int, words: str, precision: str) -> None:
    command = f"{LARGE} {words} {precision} --ddp-bucket-size {BUCKET}"
    # Two micro-batches: the bytes do not grow with more of them.
    batch = 2 * resolved(f"{command} --global-batch-size 8", ranks).config.grid.data
    command = f"{command} --global-batch-size {batch}"
    config = resolved(command, ranks).config
    assert config.accumulation == 2
    zero, replicas = config.parallel.zero_stage, config.grid.data * config.grid.context
    shares = replicas if zero else 1
    for rank, held in enumerate(run_distributed(bytes_on_a_rank, ranks, words=command)):
        elements = parameters_of(config, rank)
        if zero == 3:
            # Shards are fp32 in every precision; weights are rounded when they are gathered.
            share = 4 * elements / (replicas / config.grid.instances)
            expected = {"parameters": share, "gradients": share, "master": 0, "moments": 2 * share}
            assert held == pytest.approx(expected, rel=0.01)
            continue
        assert held["parameters"] == pytest.approx((2 if precision else 4) * elements, rel=0.01)
        assert held["moments"] == pytest.approx(8 * elements / shares, rel=0.01)
        assert held["master"] == pytest.approx(4 * elements / shares if precision else 0, rel=0.01)
        if zero == 2:
            largest = max(
                BUCKET, config.model.padded_vocab_size * config.model.hidden_size / config.grid.tensor
            )
            kept = 4 * elements / replicas
            assert kept * 0.99 <= held["gradients"] <= kept * 1.01 + 4 * largest * 1.01
        else:
            assert held["gradients"] == pytest.approx(4 * elements, rel=0.01)
