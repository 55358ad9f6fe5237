"""The sizes a plan calculates with: of the model, of one rank's share of it, and of what a micro-batch brings to a rank."""

from dataclasses import dataclass, field
from functools import cached_property

from pentatron.layout.actions import Placement
from pentatron.layout.ranks import Axis, Grid
from pentatron.layout.stages import StagePart
from pentatron.settings.decision_types import Decisions, DeviceFacts
from pentatron.settings.decisions import decide
from pentatron.settings.parameters import ModelParameters, halves_of, is_tied
from pentatron.settings.run import RunConfig

_OF_A_DIVISION = (
    "grid",
    "stages",
    "placement",
    "sparse_layers",
    "telling_ranks",
    "parameters",
)


@dataclass(frozen=True)
class Shape:
    """A configuration in short names. Widths are those of one rank."""

    config: RunConfig
    # What `pentatron.plan.static_memory` found of each pipeline rank, so that it is packed once.
    buckets: dict[int, dict[tuple[int, ...], list[tuple[Axis, int]]]] = field(default_factory=dict)
    # Some settings mean one thing on a GPU and another on a CPU. None: a device that does what a CPU does, and what only
    # a GPU does where it is asked for.
    on_gpu: bool | None = None

    def alike(self, config: RunConfig) -> "Shape":
        """Of a configuration that divides the same model in the same way; what follows from that is not worked out again."""
        made = Shape(config, self.buckets, self.on_gpu)
        made.__dict__.update({name: self.__dict__[name] for name in _OF_A_DIVISION if name in self.__dict__})
        return made

    @cached_property
    def decisions(self) -> Decisions:
        kinds = {True: "cuda", False: "cpu", None: ""}
        return decide(self.config, DeviceFacts(kinds[self.on_gpu]))

    @cached_property
    def grid(self) -> Grid:
        return self.config.grid

    @cached_property
    def stages(self) -> tuple[StagePart, ...]:
        return self.config.stages

    @cached_property
    def placement(self) -> Placement:
        return self.config.placement

    @cached_property
    def accumulation(self) -> int:
        return self.config.accumulation

    def parts(self, pipeline_rank: int) -> dict[int, StagePart]:
        """The stages of a rank by their numbers."""
        return {number: self.stages[number] for number in self.placement.stages_of(pipeline_rank)}

    @cached_property
    def telling_ranks(self) -> tuple[int, ...]:
        """The pipeline ranks of which one needs, and one sends, most: the first, which keeps most micro-batches, the first of those
        with most layers, and the last, which has the head. In a folded pipeline, all."""
        ranks = self.grid.pipeline
        if self.config.parallel.pipeline_schedule not in ("1f1b", "gpipe", "interleaved"):
            return tuple(range(ranks))
        layers = [sum(len(part.layers) for part in self.parts(rank).values()) for rank in range(ranks)]
        return tuple(sorted({0, min(1, ranks - 1), layers.index(max(layers)), ranks - 1}))

    @cached_property
    def sparse_layers(self) -> frozenset[int]:
        return frozenset(self.config.layers_with_experts)

    @cached_property
    def parameters(self) -> ModelParameters:
        """What a rank holds of each part of the model."""
        return ModelParameters(self.config.model, self.config.moe, self.sparse_layers, self.grid)

    @cached_property
    def width(self) -> int:
        """Bytes of a number of the model: of its weights and of most activations."""
        precision = self.config.precision
        return 2 if precision.bf16 or precision.fp16 else 4

    @property
    def recorded(self) -> bool:
        """Micro-batches, for certain, as CUDA graphs: by default they are where there is room, so that no run needs more for it."""
        return bool(self.on_gpu) and self.decisions.graphs.required

    @cached_property
    def fp8_layers(self) -> range:
        """Layers whose matrices keep their inputs in one byte a number."""
        return self.decisions.fp8.layers if self.on_gpu else range(0)

    @property
    def hidden(self) -> int:
        return self.config.model.hidden_size

    @property
    def head(self) -> int:
        return self.parameters.attention.head

    @property
    def heads(self) -> int:
        return self.parameters.attention.heads

    @property
    def groups(self) -> int:
        """Key/value heads of a rank; where there are fewer than ranks, neighbours have the same one."""
        return self.parameters.attention.groups

    @cached_property
    def queries(self) -> int:
        """Width of a rank's queries, and of what its heads found."""
        return self.heads * self.head

    @cached_property
    def keys(self) -> int:
        return self.groups * self.head

    @cached_property
    def inner(self) -> int:
        return self.parameters.mlp.inner

    @property
    def halves(self) -> int:
        """A gated MLP has two matrices before its activation."""
        return halves_of(self.config.model)

    @cached_property
    def words(self) -> int:
        return self.parameters.table[0]

    @property
    def tied(self) -> bool:
        return is_tied(self.config.model)

    @property
    def sequence_parallel(self) -> bool:
        return self.config.parallel.sequence_parallel and self.grid.tensor > 1

    @cached_property
    def tokens(self) -> int:
        """Of one micro-batch, those that a rank's attention and MLP see."""
        return self.config.train.micro_batch_size * self.config.model.seq_length // self.grid.context

    @cached_property
    def in_stream(self) -> int:
        """Of one micro-batch, those of which a rank holds the stream between layers."""
        return self.tokens // self.grid.tensor if self.sequence_parallel else self.tokens

    # --- experts ---

    @property
    def expert_inner(self) -> int:
        return self.parameters.experts.inner

    @property
    def shared_inner(self) -> int:
        shared = self.parameters.shared_expert
        return 0 if shared is None else shared.inner

    @cached_property
    def rows(self) -> int:
        """Pairs of token and expert that come to one rank, if all experts are equally busy."""
        chosen = self.in_stream * self.config.moe.moe_router_topk * self.grid.expert_tensor
        limit = self.config.moe.moe_expert_capacity_factor
        return chosen if limit is None else int(chosen * min(1.0, limit))

    def ranks(self, axis: Axis) -> int:
        """How many ranks hold the same of a parameter with copies on this axis."""
        return self.grid.expert_data if axis == "expert_data" else self.grid.data * self.grid.context
