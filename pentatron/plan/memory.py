"""The memory of every pipeline rank, part by part: what it holds, what micro-batches leave on it, and what it needs in passing."""

from dataclasses import dataclass
from functools import cached_property

from pentatron.config.run import RunConfig
from pentatron.layout.stages import StagePart
from pentatron.plan import activations
from pentatron.plan.held import Held, held, shards_parameters
from pentatron.plan.schedule import peak
from pentatron.plan.shape import Shape

_FP32 = 4
# A message that is being computed with and one that is on its way, in each direction.
_MESSAGES = 2


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the device of one pipeline rank; `held.host` are in the machine's memory.

    `activations` and `logits` are kept between forward and backward, where most of it lives at once, `micro_batches` of them.
    `buffers` are for messages and collectives; `working` is what backward needs for a moment: what runs again and the gradient
    of a matrix, or gradients of the loss and the logits.
    """

    held: Held
    activations: int
    logits: int
    buffers: int
    working: int
    micro_batches: int

    @property
    def total(self) -> int:
        return self.held.on_device + self.activations + self.logits + self.buffers + self.working


@dataclass(frozen=True)
class Memory:
    """Of all pipeline ranks; ranks that share a stage need the same."""

    ranks: tuple[RankMemory, ...]

    @cached_property
    def largest(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def host(self) -> int:
        return max(rank.held.host for rank in self.ranks)


def memory_of(config: RunConfig, on_gpu: bool = False) -> Memory:
    return memory_of_shape(Shape(config, on_gpu=on_gpu))


def largest_of(shape: Shape) -> RankMemory:
    """Of the pipeline rank that needs most, without asking all of a long pipeline."""
    return max((_of_rank(shape, rank) for rank in shape.telling_ranks), key=lambda rank: rank.total)


def memory_of_shape(shape: Shape) -> Memory:
    return Memory(tuple(_of_rank(shape, rank) for rank in range(shape.grid.pipeline)))


def _of_rank(shape: Shape, rank: int) -> RankMemory:
    parts = shape.parts(rank)
    most = peak(shape, rank, parts)
    return RankMemory(
        held(shape, rank),
        most.activations.layers,
        most.activations.logits,
        _messages(shape) + _collectives(shape, rank),
        max(_in_backward(shape, part) for part in parts.values()),
        most.micro_batches,
    )


def _in_backward(shape: Shape, part: StagePart) -> int:
    """The most that a stage's backward needs at once beside what was kept, of which it lets go on its way."""
    table = shape.width * shape.words * shape.hidden
    # A table used at both ends has its gradient of the head wait for that of the embedding.
    waiting = table if shape.tied and part.embedding and part.head else 0
    inside = [p.elements for number in part.layers for p in shape.layer(number)]
    moments = [activations.rerun(shape, part) + shape.width * max(inside, default=0) + waiting]
    kept = activations.kept(shape, part)
    if part.head:
        moments += [activations.loss_in_backward(shape), _of_head(shape, table) - kept.logits]
    if part.embedding:
        # The two are added up into a third.
        moments.append(table + 2 * waiting - kept.total)
    return max(moments)


def _of_head(shape: Shape, table: int) -> int:
    """While its matrix is differentiated: the gradient of the logits and that of the matrix, of which several chunks make a second.
    A fused loss has the gradient of its input by then."""
    if not shape.fused_loss:
        return shape.width * shape.tokens * shape.words + table
    chunks = 2 if activations.chunk(shape) < shape.tokens else 1
    return activations.logits(shape) + chunks * table + shape.width * shape.tokens * shape.hidden


def _messages(shape: Shape) -> int:
    if shape.grid.pipeline == 1:
        return 0
    return 2 * _MESSAGES * shape.width * shape.in_stream * shape.hidden


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
        layers = [sum(p.elements for p in shape.layer(number)) for number in part.layers]
        total += sum(p.elements for p in shape.stage(part)) - sum(layers)
        layer = max([layer, *layers])
    return shape.width * (total + 2 * layer) + (shape.width + _FP32) * layer
