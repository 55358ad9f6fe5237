"""Sizes that the planner computes with: of the model, of one rank's shard of it, and of a micro-batch."""

from dataclasses import dataclass, field
from functools import cached_property

from pentatron.layout.actions import Placement
from pentatron.layout.ranks import Axis, Grid
from pentatron.layout.stages import StagePart
from pentatron.settings.decision_types import Decisions, DeviceFacts
from pentatron.settings.decisions import decide
from pentatron.settings.parameters import ModelParameters, is_tied, matrices_before_activation
from pentatron.settings.run_config import RunConfig

# Cached properties that depend only on the division of the model over ranks.
_DIVISION_PROPERTIES = ("grid", "stages", "placement", "sparse_layers", "representative_ranks", "parameters")


@dataclass(frozen=True)
class Shape:
    """A configuration with short names for derived sizes, and what is computed from it only once.

    Widths are those of one rank. `on_gpu` None assumes neither: the device behaves as a CPU, and GPU-only
    features count if they are requested.
    """

    config: RunConfig
    # Filled by `pentatron.plan.static_memory`, so that each pipeline rank is packed once.
    buckets: dict[int, dict[tuple[int, ...], list[tuple[Axis, int]]]] = field(default_factory=dict)
    on_gpu: bool | None = None

    def with_config(self, config: RunConfig) -> "Shape":
        """Returns the shape of a configuration with the same division of the model, sharing everything cached
        about it."""
        shape = Shape(config, self.buckets, self.on_gpu)
        shape.__dict__.update(
            {name: self.__dict__[name] for name in _DIVISION_PROPERTIES if name in self.__dict__}
        )
        return shape

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
        """Returns the stages of a pipeline rank by stage number."""
        return {number: self.stages[number] for number in self.placement.stages_of(pipeline_rank)}

    @cached_property
    def representative_ranks(self) -> tuple[int, ...]:
        """The pipeline ranks among which are those that need most memory and send most: the first, which
        keeps most micro-batches, the second, the first of those with most layers, and the last, which has the
        output layer. All ranks if the pipeline is folded."""
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
        """Parameters of a rank's shard of each part of the model."""
        return ModelParameters(self.config.model, self.config.moe, self.sparse_layers, self.grid)

    @cached_property
    def width(self) -> int:
        """Bytes per element of weights and of most activations."""
        precision = self.config.precision
        return 2 if precision.bf16 or precision.fp16 else 4

    @property
    def recorded(self) -> bool:
        """Whether CUDA graphs are required. By default they are used only if there is memory for them, so
        that a run never needs more because of them."""
        return bool(self.on_gpu) and self.decisions.graphs.required

    @cached_property
    def fp8_layers(self) -> range:
        """Layers whose linear layers save their inputs in fp8."""
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
        """Key/value heads of a rank; if there are fewer than ranks, they are replicated."""
        return self.parameters.attention.groups

    @cached_property
    def queries(self) -> int:
        """Width of the queries and of the attention output of a rank."""
        return self.heads * self.head

    @cached_property
    def keys(self) -> int:
        return self.groups * self.head

    @cached_property
    def inner(self) -> int:
        return self.parameters.mlp.inner

    @property
    def halves(self) -> int:
        """Matrices before the activation function: 2 in a gated MLP, otherwise 1."""
        return matrices_before_activation(self.config.model)

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
        """Tokens of a micro-batch that the attention and the MLP of a rank process."""
        return self.config.train.micro_batch_size * self.config.model.seq_length // self.grid.context

    @cached_property
    def local_tokens(self) -> int:
        """Tokens of a micro-batch whose hidden states a rank holds between layers."""
        return self.tokens // self.grid.tensor if self.sequence_parallel else self.tokens

    @property
    def expert_inner(self) -> int:
        return self.parameters.experts.inner

    @property
    def shared_inner(self) -> int:
        shared = self.parameters.shared_expert
        return 0 if shared is None else shared.inner

    @cached_property
    def rows(self) -> int:
        """Token-expert pairs dispatched to one rank, with balanced experts."""
        pairs = self.local_tokens * self.config.moe.moe_router_topk * self.grid.expert_tensor
        capacity_factor = self.config.moe.moe_expert_capacity_factor
        return pairs if capacity_factor is None else int(pairs * min(1.0, capacity_factor))

    def ranks(self, axis: Axis) -> int:
        """Returns the number of replicas of a parameter on this axis."""
        return self.grid.expert_data if axis == "expert_data" else self.grid.data * self.grid.context
