"""The memory of every pipeline rank, part by part: what it holds, what micro-batches leave on it, and what it needs in passing."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from pentatron.layout import schedules
from pentatron.layout.actions import Kind
from pentatron.layout.stages import StagePart
from pentatron.plan import activations
from pentatron.plan.activations import Activations, deferred, kept
from pentatron.plan.shape import Shape
from pentatron.plan.static_memory import Held, held, shards_parameters
from pentatron.settings.run import RunConfig

# What lives on a pipeline rank at once: the schedule's actions, walked through with the bytes of each.


# A step of so many micro-batches for each pipeline rank holds as much as any longer one.
_ENOUGH = 3

# For every stage of a rank, how many micro-batches are kept whole, and how many lie between the halves of their backward.
State = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Peak:
    """The moment at which a rank keeps most."""

    activations: Activations
    micro_batches: int


def peak(shape: Shape, pipeline_rank: int, parts: Mapping[int, StagePart]) -> Peak:
    whole = [kept(shape, part) for part in parts.values()]
    halved = [deferred(shape, part) if shape.config.defers_weight_gradients else 0 for part in parts.values()]

    def of(state: State) -> Activations:
        return Activations(
            sum(n * w.layers + m * h for (n, m), w, h in zip(state, whole, halved)),
            sum(n * w.logits for (n, _), w in zip(state, whole)),
        )

    most = max(_states_of(shape, pipeline_rank), key=lambda state: of(state).total)
    return Peak(of(most), sum(n + m for n, m in most))


def _states_of(shape: Shape, rank: int) -> frozenset[State]:
    if shape.grid.pipeline == 1:
        return frozenset({((1, 0),)})
    if shape.config.parallel.pipeline_schedule == "gpipe":
        return frozenset({((shape.accumulation, 0),)})
    return _states(*_shown(shape), rank)


def _shown(shape: Shape) -> tuple[str, int, int, int, int | None]:
    """A schedule that is long enough to show all that a longer one holds."""
    config, steps = shape.config, shape.accumulation
    ranks, virtual, kind = shape.grid.pipeline, config.virtual_stages, config.parallel.pipeline_schedule
    shown = min(steps, _ENOUGH * ranks + steps % ranks)
    group = config.parallel.microbatch_group_size_per_virtual_pipeline_stage
    if group is not None:
        shown = min(steps, _ENOUGH * group + steps % group)
    grouped = group is not None and schedules.takes_groups(kind, virtual)
    return kind, ranks, virtual, shown, min(group, shown) if grouped and group else None


def received_ahead(shape: Shape, pipeline_rank: int) -> int:
    """For how many messages at once a rank has room made before it computes with them."""
    return _received_ahead(*_shown(shape), pipeline_rank) if shape.grid.pipeline > 1 else 0


@functools.lru_cache(maxsize=1024)
def _received_ahead(
    kind: str, ranks: int, virtual: int, micro_batches: int, group: int | None, rank: int
) -> int:
    schedule = schedules.training_schedule(kind, ranks, virtual, micro_batches, group)
    most = 0
    receives: set[tuple[bool, int, int]] = set()
    for action in schedule.actions[rank]:
        forward = action.kind in (Kind.FORWARD, Kind.RECEIVE_ACTIVATION)
        if action.kind in (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT):
            receives.add((forward, action.stage, action.micro_batch))
        elif action.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT):
            receives.discard((forward, action.stage + (-1 if forward else 1), action.micro_batch))
        most = max(most, len(receives))
    return most


@functools.lru_cache(maxsize=1024)
def _states(
    kind: str, ranks: int, virtual: int, micro_batches: int, group: int | None, rank: int
) -> frozenset[State]:
    """Everything that a rank holds at some time. A micro-batch of a stage is there from its forward to its backward; cut in
    two, what is deferred of it to the second half."""
    schedule = schedules.training_schedule(kind, ranks, virtual, micro_batches, group)
    places = {stage: i for i, stage in enumerate(schedule.placement.stages_of(rank))}
    now = [[0, 0] for _ in places]
    changes = {Kind.FORWARD: (1, 0), Kind.BACKWARD: (-1, 0), Kind.INPUT: (-1, 1), Kind.WEIGHT: (0, -1)}
    found: set[State] = set()
    for action in schedule.actions[rank]:
        if action.kind in changes:
            at = now[places[action.stage]]
            at[0], at[1] = at[0] + changes[action.kind][0], at[1] + changes[action.kind][1]
            found.add(tuple((n, m) for n, m in now))
    return frozenset(found)


_FP32 = 4
# Elements whose gradients torch's update has in fp32 at a time, unless one parameter has more.
_UPDATED_AT_ONCE = 2**25
# A message that is being computed with and one that is on its way, in each direction.
_MESSAGES = 2


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the device of one pipeline rank; `held.in_host` are in the machine's memory.

    `activations` and `logits` are kept between forward and backward, where most of it lives at once, `micro_batches` of them.
    `buffers` are for messages and collectives; `working` is what backward needs for a moment: what runs again and the gradient
    of a matrix, or gradients of the loss and the logits. `graphs` is what comes to that where micro-batches are recorded. `spared` of all
    this never lives at the same time: the gradients of the last backward come while activations go.
    """

    held: Held
    activations: int
    logits: int
    buffers: int
    working: int
    micro_batches: int
    spared: int = 0
    graphs: int = 0

    @property
    def total(self) -> int:
        together = self.held.on_device + self.activations + self.logits + self.buffers + self.working
        return together + self.graphs - self.spared


@dataclass(frozen=True)
class Memory:
    """Of all pipeline ranks; ranks that share a stage need the same."""

    ranks: tuple[RankMemory, ...]

    @cached_property
    def largest(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def host(self) -> int:
        return max(rank.held.in_host for rank in self.ranks)


def memory_of(config: RunConfig, on_gpu: bool | None = None) -> Memory:
    return memory_of_shape(Shape(config, on_gpu=on_gpu))


def recorded(config: RunConfig) -> RunConfig:
    """The same run with its micro-batches recorded for certain."""
    return dataclasses.replace(config, kernels=dataclasses.replace(config.kernels, cuda_graphs="on"))


def beside_graphs(config: RunConfig) -> int:
    """Bytes that evaluation, the update and first gradients take beside micro-batches that are recorded as CUDA graphs."""
    return memory_of(recorded(config), on_gpu=True).largest.graphs


def largest_of(shape: Shape) -> RankMemory:
    """Of the pipeline rank that needs most, without asking all of a long pipeline."""
    return max((_of_rank(shape, rank) for rank in shape.telling_ranks), key=lambda rank: rank.total)


def memory_of_shape(shape: Shape) -> Memory:
    return Memory(tuple(_of_rank(shape, rank) for rank in range(shape.grid.pipeline)))


def _of_rank(shape: Shape, rank: int) -> RankMemory:
    parts = shape.parts(rank)
    most, between = peak(shape, rank, parts), held(shape, rank)
    working = max(_in_backward(shape, part) for part in parts.values())
    spared = graphs = 0
    if shape.grid.pipeline == 1 and not shards_parameters(shape):
        # Pipelines have gradients of earlier micro-batches when they keep most; torch's shards are there all the time.
        (part,) = parts.values()
        coming = between.gradients - _before_last(shape, between.gradients)
        if shape.recorded:
            # Nothing takes the place of what came before, or of what was kept for backward.
            stays = _rounded_before_sums(shape, between.gradients)
            coming += stays if shape.accumulation == 2 else 0
            graphs = stays + max(_in_update(shape, part), _in_evaluation(shape))
        spared = coming + working - _in_backward(shape, part, coming)
    return RankMemory(
        between,
        most.activations.layers,
        most.activations.logits,
        _messages(shape, rank) + _collectives(shape, rank),
        working,
        most.micro_batches,
        spared,
        graphs,
    )


def _before_last(shape: Shape, gradients: int) -> int:
    """Bytes of gradients that are there when a step's last backward begins: one that comes to another is summed up with it in fp32."""
    if shape.accumulation == 1:
        return 0
    rounded = shape.accumulation == 2 and shape.ranks("replicas") == 1
    return gradients * shape.width // _FP32 if rounded else gradients


def _rounded_before_sums(shape: Shape, gradients: int) -> int:
    """Bytes of a step's first gradients, which are rounded: those that come to them make sums of another size."""
    return gradients * shape.width // _FP32 if shape.accumulation > 1 and shape.width != _FP32 else 0


def _in_evaluation(shape: Shape) -> int:
    """The most that a forward without a backward has at once: the stream, before a norm and behind it, and a layer or the logits."""
    train, size = shape.config.train, shape.config.eval_batch[1]
    if not train.eval_iters or not (train.eval_interval or shape.config.data.test_data_path):
        return 0
    own = shape.alike(
        dataclasses.replace(shape.config, train=dataclasses.replace(train, micro_batch_size=size))
    )
    stream = own.width * own.in_stream * own.hidden
    return 2 * stream + max(activations.in_layer(own), activations.logits_evaluated(own))


def _in_backward(shape: Shape, part: StagePart, coming: int = 0) -> int:
    """The most that a stage's backward needs at once beside what was kept, of which it lets go on its way; `coming` bytes of gradients,
    of all its parameters, stay of it."""
    table = shape.width * shape.words * shape.hidden
    # A table used at both ends has its gradient of the head wait for that of the embedding.
    waiting = table if shape.tied and part.embedding and part.head else 0
    inside = [p.elements for number in part.layers for p in shape.parameters.layer(number)]
    kept = activations.kept(shape, part)
    rate = coming / sum(p.elements for p in shape.parameters.stage(part))
    own_table = shape.words * shape.hidden
    head = rate * own_table if part.head and not (shape.tied and part.embedding) else 0
    of_layer = activations.rerun(shape, part) + shape.width * max(inside, default=0) + waiting
    of_layer += _inside_layer(shape)
    # In the last layer, which comes first, and in the first, when nearly all gradients are there and little else.
    embedded = rate * own_table if part.embedding else 0
    first = 0 if shape.config.recomputed(part) else activations.first_layer(shape, part)
    moments = [of_layer + int(head) - kept.logits, of_layer + int(coming - embedded) + first - kept.total]
    if part.head:
        moments += [activations.loss_in_backward(shape), _of_head(shape, table) - kept.logits]
    if part.embedding:
        # The two are added up into a third.
        moments.append(table + 2 * waiting + int(coming - embedded) - kept.total)
    return max([*moments, coming + _in_update(shape, part) - kept.total])


def _in_update(shape: Shape, part: StagePart) -> int:
    """Gradients that came once are rounded; torch's update wants them in fp32, some at a time."""
    rounded = shape.width != _FP32 and shape.accumulation == 1 and shape.ranks("replicas") == 1
    if not rounded or shape.decisions.update.on:
        return 0
    sizes = [p.elements for p in shape.parameters.stage(part)]
    return _FP32 * max(max(sizes), min(_UPDATED_AT_ONCE, sum(sizes)))


def _inside_layer(shape: Shape) -> int:
    """Gradients on their way through the matrices of an MLP, where a compiler does not let go of what it was given before they are
    made: of the stream, of what lies between and of what goes into that."""
    if not shape.decisions.compilation.on or shape.sparse_layers:
        return 0
    inner = (shape.halves + 2 if shape.halves > 1 else 2) * shape.inner
    return shape.width * (shape.in_stream * shape.hidden + shape.tokens * inner)


def _of_head(shape: Shape, table: int) -> int:
    """While its matrix is differentiated: the gradient of the logits and that of the matrix, of which several chunks make a second.
    A fused loss has the gradient of its input by then. In fp8 there is the gradient of the logits in one byte too, as it is and
    transposed, and so the matrix."""
    rounded = (
        2 * activations.chunk(shape) * shape.words + shape.words * shape.hidden
        if shape.on_gpu and shape.decisions.fp8.head
        else 0
    )
    if not shape.decisions.loss.on:
        return shape.width * shape.tokens * shape.words + table + rounded
    chunks = 2 if activations.chunk(shape) < shape.tokens else 1
    return activations.logits(shape) + chunks * table + shape.width * shape.tokens * shape.hidden + rounded


def _messages(shape: Shape, rank: int) -> int:
    """Beside the usual ones those that come while others are computed with: of groups that are larger than the pipeline."""
    if shape.grid.pipeline == 1:
        return 0
    waiting = max(0, received_ahead(shape, rank) - _MESSAGES)
    return (2 * _MESSAGES + waiting) * shape.width * shape.in_stream * shape.hidden


def _collectives(shape: Shape, rank: int) -> int:
    """What is gathered or summed for others: layers in one piece (ZeRO 3), the stream (sequence parallelism), keys and values
    (context parallelism), tokens on their way to experts."""
    total = 0
    if shards_parameters(shape):
        total += _gathered(shape, rank)
    if shape.sequence_parallel:
        total += shape.width * shape.tokens * shape.hidden
    if shape.grid.context > 1:
        keys_values = 2 * shape.tokens * shape.keys
        whole = shape.grid.context if shape.config.parallel.cp_comm_type in ("all_gather", "allgather") else 2
        total += whole * keys_values * (shape.width + _FP32)
    if shape.sparse_layers and shape.grid.expert * shape.grid.expert_tensor > 1:
        total += 2 * shape.width * shape.rows * shape.hidden
    return total


def _gathered(shape: Shape, rank: int) -> int:
    """ZeRO 3: what a stage has beside its layers, through the step; the layer that computes and the next one; and the
    gradients of one in the model's precision and in fp32."""
    total = layer = 0
    for part in shape.parts(rank).values():
        layers = [sum(p.elements for p in shape.parameters.layer(number)) for number in part.layers]
        total += sum(p.elements for p in shape.parameters.stage(part)) - sum(layers)
        layer = max([layer, *layers])
    return shape.width * (total + 2 * layer) + (shape.width + _FP32) * layer
