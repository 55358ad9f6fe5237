"""The sizes a plan calculates with: of the model, of one rank's share of it, and of what a micro-batch brings to a rank."""

import math
from dataclasses import dataclass, field
from functools import cached_property

from pentatron.config.decided import Decisions, DeviceFacts
from pentatron.config.decisions import decide
from pentatron.config.run import RunConfig
from pentatron.layout.actions import Placement
from pentatron.layout.ranks import Axis, Grid
from pentatron.layout.stages import StagePart


@dataclass(frozen=True)
class Parameter:
    """What one rank holds of a parameter; ranks on the axis `copies` hold the same and see other tokens."""

    shape: tuple[int, ...]
    copies: Axis = "replicas"
    # The first and the last stage hold it both: a tied embedding.
    at_both_ends: bool = False

    @cached_property
    def elements(self) -> int:
        return math.prod(self.shape)


_OF_A_DIVISION = (
    "grid",
    "stages",
    "placement",
    "sparse_layers",
    "telling_ranks",
    "_dense_layer",
    "_sparse_layer",
)


@dataclass(frozen=True)
class Shape:
    """A configuration in short names. Widths are those of one rank."""

    config: RunConfig
    # What `pentatron.plan.held` found of each pipeline rank, so that it is packed once.
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
        assert self.config.model.kv_channels
        return self.config.model.kv_channels

    @property
    def heads(self) -> int:
        assert self.config.model.num_attention_heads
        return self.config.model.num_attention_heads // self.grid.tensor

    @property
    def groups(self) -> int:
        """Key/value heads of a rank; where there are fewer than ranks, neighbours have the same one."""
        assert self.config.model.num_query_groups
        return max(1, self.config.model.num_query_groups // self.grid.tensor)

    @cached_property
    def queries(self) -> int:
        """Width of a rank's queries, and of what its heads found."""
        return self.heads * self.head

    @cached_property
    def keys(self) -> int:
        return self.groups * self.head

    @cached_property
    def inner(self) -> int:
        assert self.config.model.ffn_hidden_size
        return self.config.model.ffn_hidden_size // self.grid.tensor

    @property
    def halves(self) -> int:
        """A gated MLP has two matrices before its activation."""
        return 2 if self.config.model.gated_linear_unit else 1

    @cached_property
    def words(self) -> int:
        assert self.config.model.padded_vocab_size
        return self.config.model.padded_vocab_size // self.grid.tensor

    @property
    def tied(self) -> bool:
        return not self.config.model.untie_embeddings_and_output_weights

    @property
    def sequence_parallel(self) -> bool:
        return self.config.parallel.sequence_parallel and self.grid.tensor > 1

    @cached_property
    def tokens(self) -> int:
        """Of one micro-batch, those that a rank's attention and MLP see."""
        assert self.config.train.micro_batch_size
        return self.config.train.micro_batch_size * self.config.model.seq_length // self.grid.context

    @cached_property
    def in_stream(self) -> int:
        """Of one micro-batch, those of which a rank holds the stream between layers."""
        return self.tokens // self.grid.tensor if self.sequence_parallel else self.tokens

    # --- experts ---

    @property
    def expert_inner(self) -> int:
        assert self.config.moe.moe_ffn_hidden_size
        return self.config.moe.moe_ffn_hidden_size // self.grid.expert_tensor

    @property
    def shared_inner(self) -> int:
        return (self.config.moe.moe_shared_expert_intermediate_size or 0) // self.grid.tensor

    @property
    def own_experts(self) -> int:
        return (self.config.moe.num_experts or 0) // self.grid.expert

    @cached_property
    def rows(self) -> int:
        """Pairs of token and expert that come to one rank, if all experts are equally busy."""
        chosen = self.in_stream * self.config.moe.moe_router_topk * self.grid.expert_tensor
        limit = self.config.moe.moe_expert_capacity_factor
        return chosen if limit is None else int(chosen * min(1.0, limit))

    def ranks(self, axis: Axis) -> int:
        """How many ranks hold the same of a parameter with copies on this axis."""
        return self.grid.expert_data if axis == "expert_data" else self.grid.data * self.grid.context

    # --- parameters ---

    def stage(self, part: StagePart) -> list[Parameter]:
        """What a rank holds of one stage, in the order of the model."""
        model = self.config.model
        found: list[Parameter] = []
        table = (self.words, self.hidden)
        if part.embedding:
            found.append(Parameter(table, at_both_ends=self.tied and not part.head))
            if model.position_embedding_type == "learned_absolute":
                assert model.max_position_embeddings
                found.append(Parameter((model.max_position_embeddings, self.hidden)))
        for layer in part.layers:
            found += self.layer(layer)
        if part.head:
            found += self._norm(self.hidden)
            if not self.tied or not part.embedding:
                found.append(Parameter(table, at_both_ends=self.tied))
        return found

    def layer(self, number: int) -> list[Parameter]:
        return self._sparse_layer if number in self.sparse_layers else self._dense_layer

    @cached_property
    def _dense_layer(self) -> list[Parameter]:
        return self._attention() + self._mlp(self.inner)

    @cached_property
    def _sparse_layer(self) -> list[Parameter]:
        return self._attention() + self.experts()

    def _attention(self) -> list[Parameter]:
        """With the norms of the layer."""
        model = self.config.model
        qkv = self.queries + 2 * self.keys
        found = self._norm(self.hidden)
        found += self._matrix(qkv, self.hidden, qkv if model.add_bias_linear or model.add_qkv_bias else 0)
        if model.qk_layernorm:
            found += 2 * self._norm(self.head)
        biased = model.add_bias_linear or model.add_proj_bias
        found += self._matrix(self.hidden, self.queries, self.hidden if biased else 0)
        return found + self._norm(self.hidden)

    def experts(self) -> list[Parameter]:
        moe, width = self.config.moe, self.expert_inner
        assert moe.num_experts
        found = [
            Parameter((moe.num_experts, self.hidden)),
            Parameter((self.own_experts, self.halves * width, self.hidden), "expert_data"),
            Parameter((self.own_experts, self.hidden, width), "expert_data"),
        ]
        if self.shared_inner:
            found += self._mlp(self.shared_inner)
            found += [Parameter((1, self.hidden))] if moe.moe_shared_expert_gate else []
        return found

    def _mlp(self, inner: int) -> list[Parameter]:
        biased = self.config.model.add_bias_linear or self.config.model.add_mlp_bias
        outer = self.halves * inner
        first = self._matrix(outer, self.hidden, outer if biased else 0)
        return first + self._matrix(self.hidden, inner, self.hidden if biased else 0)

    def _matrix(self, rows: int, columns: int, bias: int) -> list[Parameter]:
        return [Parameter((rows, columns))] + ([Parameter((bias,))] if bias else [])

    def _norm(self, width: int) -> list[Parameter]:
        return [Parameter((width,))] * (2 if self.config.model.normalization == "LayerNorm" else 1)
