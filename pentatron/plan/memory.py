"""Peak memory of every pipeline rank: static memory, activations in flight, and temporary buffers."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from pentatron.layout import schedules
from pentatron.layout.actions import Kind
from pentatron.layout.stages import StagePart
from pentatron.plan import activations
from pentatron.plan.activations import Activations
from pentatron.plan.sizes import FP32, PlanSizes, with_values
from pentatron.plan.static_memory import StaticMemory, shards_parameters, static_memory_of
from pentatron.settings.run_config import RunConfig

# A step with this many micro-batches for each pipeline rank reaches the same peak as a longer one.
_PEAK_MICRO_BATCHES = 3
# Elements whose gradients torch's optimizer step converts to fp32 at a time, unless one parameter has more.
_UPDATE_BLOCK = 2**25
# For each direction, one message that is being computed with and one in transit.
_MESSAGES = 2

# For every stage of a rank: micro-batches kept in full, and micro-batches between the halves of a split
# backward.
State = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the device of one pipeline rank; `static.in_host` is in host memory.

    `activations` and `logits` are kept between forward and backward, at the peak, of `micro_batches`
    micro-batches. `buffers` are for messages and collectives. `working` is temporary memory of backward:
    recomputed activations and the gradient of a matrix, or gradients of the loss and the logits. `graphs` is
    the extra memory if micro-batches are captured as CUDA graphs. `not_simultaneous` is the part that never
    coexists: gradients of the last backward are allocated while activations are freed.
    """

    static: StaticMemory
    activations: int
    logits: int
    buffers: int
    working: int
    micro_batches: int
    not_simultaneous: int = 0
    graphs: int = 0

    @property
    def total(self) -> int:
        total = self.static.on_device + self.activations + self.logits + self.buffers + self.working
        return total + self.graphs - self.not_simultaneous


@dataclass(frozen=True)
class Memory:
    """Memory of all pipeline ranks; ranks that share a stage need the same."""

    ranks: tuple[RankMemory, ...]

    @cached_property
    def largest(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.total)


def memory_of(config: RunConfig, on_gpu: bool | None = None) -> Memory:
    """Returns the memory of every pipeline rank for a configuration."""
    return memory_of_sizes(PlanSizes(config, on_gpu=on_gpu))


def bytes_outside_graphs(config: RunConfig) -> int:
    """Returns the bytes that evaluation, the optimizer step and the first gradients need beside captured CUDA
    graphs."""
    return memory_of(with_values(config, cuda_graphs="on"), on_gpu=True).largest.graphs


def peak_rank_memory(sizes: PlanSizes) -> RankMemory:
    """Returns the memory of the rank that needs most, checking only representative ranks of a long
    pipeline."""
    return Memory(tuple(_rank_memory(sizes, rank) for rank in sizes.representative_ranks)).largest


def memory_of_sizes(sizes: PlanSizes) -> Memory:
    return Memory(tuple(_rank_memory(sizes, rank) for rank in range(sizes.grid.pipeline)))


def _peak(sizes: PlanSizes, pipeline_rank: int, parts: Mapping[int, StagePart]) -> tuple[Activations, int]:
    """Returns the largest activations that a rank keeps at a time, and from how many micro-batches."""
    saved = [activations.saved_activations(sizes, part) for part in parts.values()]
    deferred = [0] * len(parts)
    if sizes.config.defers_weight_gradients:
        deferred = [activations.deferred_weight_gradient_inputs(sizes, part) for part in parts.values()]

    def kept_in(state: State) -> Activations:
        layers = sum(n * s.layers + m * d for (n, m), s, d in zip(state, saved, deferred))
        return Activations(layers, sum(n * s.logits for (n, _), s in zip(state, saved)))

    largest = max(_rank_states(sizes, pipeline_rank), key=lambda state: sum(kept_in(state)))
    return kept_in(largest), sum(n + m for n, m in largest)


def _rank_states(sizes: PlanSizes, rank: int) -> frozenset[State]:
    if sizes.grid.pipeline == 1:
        return frozenset({((1, 0),)})
    if sizes.config.parallel.pipeline_schedule == "gpipe":
        return frozenset({((sizes.accumulation, 0),)})
    return _walk(*_shortened_schedule(sizes), rank)[0]


def _shortened_schedule(sizes: PlanSizes) -> tuple[str, int, int, int, int | None]:
    """Returns the arguments of a schedule that is just long enough to reach the peak of the real one."""
    config, steps = sizes.config, sizes.accumulation
    group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage or sizes.grid.pipeline
    return config.schedule_arguments(min(steps, _PEAK_MICRO_BATCHES * group + steps % group))


@functools.lru_cache(maxsize=1024)
def _walk(
    kind: str, ranks: int, virtual: int, micro_batches: int, group: int | None, rank: int
) -> tuple[frozenset[State], int]:
    """Walks through a schedule: returns all combinations of micro-batches that a rank keeps at some time, and
    the largest number of received messages that wait for their computation.

    A micro-batch of a stage is kept from its forward to its backward; if its backward is split, the inputs of
    its weight gradients are kept to the second half.
    """
    schedule = schedules.training_schedule(kind, ranks, virtual, micro_batches, group)
    counts = dict.fromkeys(schedule.placement.stages_of(rank), (0, 0))
    changes = {Kind.FORWARD: (1, 0), Kind.BACKWARD: (-1, 0), Kind.INPUT: (-1, 1), Kind.WEIGHT: (0, -1)}
    states: set[State] = set()
    waiting: set[tuple[bool, int, int]] = set()
    most_waiting = 0
    for action in schedule.actions[rank]:
        forward = action.kind in (Kind.FORWARD, Kind.RECEIVE_ACTIVATION)
        if action.kind in (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT):
            waiting.add((forward, action.stage, action.micro_batch))
        elif action.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT):
            waiting.discard((forward, action.stage + (-1 if forward else 1), action.micro_batch))
        most_waiting = max(most_waiting, len(waiting))
        if action.kind in changes:
            kept, deferred = counts[action.stage]
            counts[action.stage] = kept + changes[action.kind][0], deferred + changes[action.kind][1]
            states.add(tuple(counts.values()))
    return frozenset(states), most_waiting


def _rank_memory(sizes: PlanSizes, rank: int) -> RankMemory:
    parts = sizes.parts(rank)
    (saved, micro_batches), static = _peak(sizes, rank, parts), static_memory_of(sizes, rank)
    working = max(_backward_peak(sizes, part) for part in parts.values())
    not_simultaneous = graphs = 0
    if sizes.grid.pipeline == 1 and not shards_parameters(sizes):
        # A pipeline has accumulated gradients at its peak already, and ZeRO 3 allocates its shards for the
        # whole run.
        (part,) = parts.values()
        new_gradients = static.gradients - _accumulated_gradients(sizes, static.gradients)
        if sizes.requires_graphs:
            # The memory pool of a graph is not reused outside it. The fp32 sums cannot reuse the first
            # gradients either, which are in the model's precision.
            rounded = sizes.accumulation > 1 and sizes.element_bytes != FP32
            first_gradients = static.gradients * sizes.element_bytes // FP32 if rounded else 0
            new_gradients += first_gradients if sizes.accumulation == 2 else 0
            graphs = first_gradients + max(_update_copies(sizes, part), _evaluation_peak(sizes))
        not_simultaneous = new_gradients + working - _backward_peak(sizes, part, new_gradients)
    buffers = _messages(sizes, rank) + _collectives(sizes, rank)
    return RankMemory(static, *saved, buffers, working, micro_batches, not_simultaneous, graphs)


def _accumulated_gradients(sizes: PlanSizes, gradients: int) -> int:
    """Returns the bytes of gradients that are allocated when the last backward of a step begins; accumulated
    gradients are in fp32."""
    if sizes.accumulation == 1:
        return 0
    rounded = sizes.accumulation == 2 and sizes.ranks("replicas") == 1
    return gradients * sizes.element_bytes // FP32 if rounded else gradients


def _evaluation_peak(sizes: PlanSizes) -> int:
    """Returns the peak of an evaluation forward: hidden states before and after a norm, and a layer or the
    logits."""
    train, size = sizes.config.train, sizes.config.eval_batch[1]
    if not train.eval_iters or not (train.eval_interval or sizes.config.data.test_data_path):
        return 0
    evaluation = sizes.with_config(with_values(sizes.config, micro_batch_size=size))
    # Everything that a dense layer could save for backward.
    layer = activations.layer_activations(evaluation, sparse=False, modules=frozenset())
    return 2 * evaluation.hidden_states + max(layer, activations.evaluation_loss_bytes(evaluation))


def _backward_peak(sizes: PlanSizes, part: StagePart, added: int = 0) -> int:
    """Returns the peak of temporary memory in a stage's backward, less the saved activations it has freed by
    then.

    `added` is the number of bytes of gradients that this backward allocates and that stay.
    """
    table_elements = sizes.local_vocab_size * sizes.hidden
    table = sizes.element_bytes * table_elements
    # With a tied embedding, the gradient of the output layer is kept until that of the embedding exists.
    both_tables = sizes.tied and part.embedding and part.head
    waiting_table = table if both_tables else 0
    layer_parameters = [p.elements for number in part.layers for p in sizes.parameters.layer(number)]
    saved = activations.saved_activations(sizes, part)
    rate = added / sum(p.elements for p in sizes.parameters.stage(part))
    of_head = rate * table_elements if part.head and not both_tables else 0
    of_embedding = rate * table_elements if part.embedding else 0
    in_layer = activations.recompute_peak(sizes, part) + sizes.element_bytes * max(
        layer_parameters, default=0
    )
    in_layer += waiting_table + _compiled_mlp_gradients(sizes)
    # The peak is in the last layer, when all activations are saved, or in the first, when all gradients
    # exist.
    first = 0 if sizes.config.recomputed(part) else activations.layers_activations(sizes, part.layers[:1])
    in_first = in_layer + int(added - of_embedding) + first - sum(saved)
    peaks = [in_layer + int(of_head) - saved.logits, in_first]
    if part.head:
        peaks.append(activations.loss_backward_bytes(sizes))
        peaks.append(_output_layer_gradients(sizes, table) - saved.logits)
    if part.embedding:
        # Adding both gradients of a tied embedding allocates a third tensor.
        peaks.append(table + 2 * waiting_table + int(added - of_embedding) - sum(saved))
    return max(*peaks, added + _update_copies(sizes, part) - sum(saved))


def _update_copies(sizes: PlanSizes, part: StagePart) -> int:
    """Returns the bytes of the fp32 copies of gradients in the model's precision that torch's optimizer step
    makes."""
    rounded = sizes.element_bytes != FP32 and sizes.accumulation == 1 and sizes.ranks("replicas") == 1
    if not rounded or sizes.decisions.optimizer.fused:
        return 0
    counts = [p.elements for p in sizes.parameters.stage(part)]
    return FP32 * max(max(counts), min(_UPDATE_BLOCK, sum(counts)))


def _compiled_mlp_gradients(sizes: PlanSizes) -> int:
    """Returns the bytes of gradients inside the backward of a compiled MLP, which does not free its inputs
    before its outputs exist: of the hidden states, of the FFN activations and of the inputs of the activation
    function."""
    if not sizes.decisions.compilation.on or sizes.sparse_layers:
        return 0
    inner = (sizes.fc1_matrices + 2 if sizes.fc1_matrices > 1 else 2) * sizes.inner
    return sizes.hidden_states + sizes.element_bytes * sizes.tokens * inner


def _output_layer_gradients(sizes: PlanSizes, table: int) -> int:
    """Returns the bytes while the output layer is differentiated: the gradient of the logits and of the
    matrix, which is allocated twice if there are several chunks. A fused loss has the gradient of its input
    by then. In fp8, the gradient of the logits and the matrix exist in one byte per element too, the former
    also transposed."""
    chunk, fp8 = activations.loss_chunk(sizes), 0
    if sizes.on_gpu and sizes.decisions.fp8.head:
        fp8 = 2 * chunk * sizes.local_vocab_size + sizes.local_vocab_size * sizes.hidden
    if not sizes.decisions.loss.on:
        return sizes.element_bytes * sizes.tokens * sizes.local_vocab_size + table + fp8
    tables = 2 * table if chunk < sizes.tokens else table
    input_gradient = sizes.element_bytes * sizes.tokens * sizes.hidden
    return activations.loss_activations(sizes) + tables + input_gradient + fp8


def _messages(sizes: PlanSizes, rank: int) -> int:
    """Returns the bytes of send and receive buffers. Schedules whose groups are larger than the pipeline
    receive more messages ahead of their use."""
    if sizes.grid.pipeline == 1:
        return 0
    prefetched = max(0, _walk(*_shortened_schedule(sizes), rank)[1] - _MESSAGES)
    return (2 * _MESSAGES + prefetched) * sizes.hidden_states


def _collectives(sizes: PlanSizes, rank: int) -> int:
    """Returns the bytes of buffers of collectives: gathered parameters (ZeRO 3), hidden states (sequence
    parallelism), keys and values (context parallelism), dispatched tokens (expert parallelism)."""
    total = _gathered_parameters(sizes, rank) if shards_parameters(sizes) else 0
    if sizes.sequence_parallel:
        total += sizes.element_bytes * sizes.tokens * sizes.hidden
    if sizes.grid.context > 1:
        gathers = sizes.config.parallel.cp_comm_type in ("all_gather", "allgather")
        copies = sizes.grid.context if gathers else 2
        total += copies * 2 * sizes.tokens * sizes.keys * (sizes.element_bytes + FP32)
    if sizes.sparse_layers and sizes.grid.expert * sizes.grid.expert_tensor > 1:
        total += 2 * sizes.element_bytes * sizes.dispatched_rows * sizes.hidden
    return total


def _gathered_parameters(sizes: PlanSizes, rank: int) -> int:
    """Returns the bytes that ZeRO 3 gathers: parameters outside the layers for the whole step, the current
    and the next layer, and the gradients of one layer in the model's precision and in fp32."""
    outside_layers = largest = 0
    for part in sizes.parts(rank).values():
        layers = [sum(p.elements for p in sizes.parameters.layer(number)) for number in part.layers]
        outside_layers += sum(p.elements for p in sizes.parameters.stage(part)) - sum(layers)
        largest = max([largest, *layers])
    return sizes.element_bytes * (outside_layers + 2 * largest) + (sizes.element_bytes + FP32) * largest
