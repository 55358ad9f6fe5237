"""The parameters of every part of a model, in the sizes that one rank holds.

Layers are built with these sizes, and plans count these parameters. With one rank on every axis the sizes are
those of the whole model. A layer declares itself which pieces of a parameter its rank holds.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from pentatron.layout.ranks import Axis, Grid
from pentatron.layout.schedules import FOLDED
from pentatron.layout.stages import Costs, Division, StagePart
from pentatron.settings.layers import window_of, windowed_layers
from pentatron.settings.model import NO_EXPERTS, MoEConfig, TransformerConfig, inner_widths, moe_layers
from pentatron.settings.settings import Settings

# By kind of norm, in the order of the layer.
_OF_NORM = {"LayerNorm": ("weight", "bias"), "RMSNorm": ("weight",)}


@dataclass(frozen=True)
class Parameter:
    """One parameter on one rank, with its name within the layer, or within the stage at its ends.

    Ranks on the axis `copies` hold the same and see other tokens. `at_both_ends`: a tied embedding, held by
    the first and the last stage.
    """

    name: str
    shape: tuple[int, ...]
    copies: Axis = "replicas"
    at_both_ends: bool = False

    @cached_property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class LinearSizes:
    """`y = x Wᵀ + b`: the weight has `outputs` rows and `inputs` columns, the bias `outputs` elements."""

    inputs: int
    outputs: int
    has_bias: bool

    @property
    def multiplications(self) -> int:
        """For one token."""
        return self.inputs * self.outputs

    def parameters(self, name: str) -> list[Parameter]:
        found = [Parameter(f"{name}.weight", (self.outputs, self.inputs))]
        return [*found, Parameter(f"{name}.bias", (self.outputs,))] if self.has_bias else found


@dataclass(frozen=True)
class AttentionSizes:
    """`head`: the width of one. `groups` are key/value heads."""

    heads: int
    groups: int
    head: int
    linear_qkv: LinearSizes
    linear_proj: LinearSizes

    @property
    def queries_per_group(self) -> int:
        return self.heads // self.groups


def attention_sizes(config: TransformerConfig, ranks: int = 1) -> AttentionSizes:
    """Sizes on one of `ranks` tensor ranks. With fewer groups than ranks, neighbours hold the same group."""
    heads, groups = config.num_attention_heads // ranks, max(1, config.num_query_groups // ranks)
    hidden, head = config.hidden_size, config.kv_channels
    return AttentionSizes(
        heads,
        groups,
        head,
        LinearSizes(hidden, (heads + 2 * groups) * head, has_qkv_bias(config)),
        LinearSizes(heads * head, hidden, has_proj_bias(config)),
    )


def has_qkv_bias(config: TransformerConfig) -> bool:
    return config.add_bias_linear or config.add_qkv_bias


def has_proj_bias(config: TransformerConfig) -> bool:
    return config.add_bias_linear or config.add_proj_bias


def has_mlp_bias(config: TransformerConfig) -> bool:
    """Of MLPs without experts and of shared experts. Experts have no bias."""
    return config.add_bias_linear or config.add_mlp_bias


def halves_of(config: TransformerConfig) -> int:
    """Matrices of an MLP before its activation: a gated one has two, in one parameter."""
    return 2 if config.gated_linear_unit else 1


def matrices_of(config: TransformerConfig) -> int:
    """All matrices of an MLP, or of an expert."""
    return halves_of(config) + 1


@dataclass(frozen=True)
class MLPSizes:
    inner: int
    linear_fc1: LinearSizes
    linear_fc2: LinearSizes


def mlp_sizes(config: TransformerConfig, ranks: int = 1, inner: int | None = None) -> MLPSizes:
    """Sizes on one of `ranks` tensor ranks. `inner`: the whole width, if not the configured one."""
    own, hidden, bias = (inner or config.ffn_hidden_size) // ranks, config.hidden_size, has_mlp_bias(config)
    return MLPSizes(own, LinearSizes(hidden, halves_of(config) * own, bias), LinearSizes(own, hidden, bias))


@dataclass(frozen=True)
class ExpertSizes:
    """`count` experts of one inner width. Each of two parameters holds a matrix of every expert."""

    count: int
    inner: int
    linear_fc1: tuple[int, int, int]
    linear_fc2: tuple[int, int, int]

    @property
    def parameters(self) -> list[Parameter]:
        return [
            Parameter("mlp.experts.linear_fc1.weight", self.linear_fc1, "expert_data"),
            Parameter("mlp.experts.linear_fc2.weight", self.linear_fc2, "expert_data"),
        ]


def expert_sizes(config: TransformerConfig, moe: MoEConfig, holders: int = 1, cut: int = 1) -> ExpertSizes:
    """Sizes on one rank, with the experts divided by `holders` and the width of each by `cut`."""
    count, inner = moe.experts // holders, moe.moe_ffn_hidden_size // cut
    hidden = config.hidden_size
    return ExpertSizes(count, inner, (count, halves_of(config) * inner, hidden), (count, hidden, inner))


def router_shape(hidden: int, moe: MoEConfig) -> tuple[int, int]:
    return (moe.experts, hidden)


def has_shared_expert(moe: MoEConfig) -> bool:
    """Whether every token uses one expert beside those of the router."""
    return moe.moe_shared_expert_intermediate_size is not None


def has_shared_gate(moe: MoEConfig) -> bool:
    return has_shared_expert(moe) and moe.moe_shared_expert_gate


def shared_gate_shape(hidden: int) -> tuple[int, int]:
    return (1, hidden)


def norm_parameters(kind: str, width: int, name: str = "") -> list[Parameter]:
    prefix = f"{name}." if name else ""
    return [Parameter(f"{prefix}{each}", (width,)) for each in _OF_NORM[kind]]


def is_tied(config: TransformerConfig) -> bool:
    """Whether the embedding is the matrix of the head too."""
    return not config.untie_embeddings_and_output_weights


def head_has_table(config: TransformerConfig, part: StagePart) -> bool:
    """Whether the head of a stage has a table beside the embedding's of the same stage."""
    return part.head and not (is_tied(config) and part.embedding)


def table_shape(config: TransformerConfig, ranks: int = 1) -> tuple[int, int]:
    """Of the embedding and of the head."""
    return (config.padded_vocab_size // ranks, config.hidden_size)


def position_shape(config: TransformerConfig) -> tuple[int, int] | None:
    """Of learned positions, if there are any."""
    learned = config.position_embedding_type == "learned_absolute"
    return (config.max_position_embeddings, config.hidden_size) if learned else None


@dataclass(frozen=True)
class ModelParameters:
    """Parameters of each part of a model on a rank of a grid, in the order of the model.

    `sparse_layers` have experts.
    """

    model: TransformerConfig
    moe: MoEConfig
    sparse_layers: frozenset[int]
    grid: Grid

    @cached_property
    def attention(self) -> AttentionSizes:
        return attention_sizes(self.model, self.grid.tensor)

    @cached_property
    def mlp(self) -> MLPSizes:
        return mlp_sizes(self.model, self.grid.tensor)

    @cached_property
    def experts(self) -> ExpertSizes:
        return expert_sizes(self.model, self.moe, self.grid.expert, self.grid.expert_tensor)

    @cached_property
    def shared_expert(self) -> MLPSizes | None:
        if not has_shared_expert(self.moe):
            return None
        return mlp_sizes(self.model, self.grid.tensor, self.moe.shared_width)

    @cached_property
    def table(self) -> tuple[int, int]:
        return table_shape(self.model, self.grid.tensor)

    def stage(self, part: StagePart) -> list[Parameter]:
        found: list[Parameter] = []
        tied = is_tied(self.model)
        if part.embedding:
            word = Parameter("embedding.word.weight", self.table, at_both_ends=tied and not part.head)
            positions = position_shape(self.model)
            found += (
                [word] if positions is None else [word, Parameter("embedding.position.weight", positions)]
            )
        for layer in part.layers:
            found += self.layer(layer)
        if part.head:
            found += self._norm("final_norm")
        if head_has_table(self.model, part):
            found.append(Parameter("head.weight", self.table, at_both_ends=tied))
        return found

    def layer(self, number: int) -> list[Parameter]:
        return self._sparse_layer if number in self.sparse_layers else self._dense_layer

    @cached_property
    def _dense_layer(self) -> list[Parameter]:
        return self._attention() + _of_mlp(self.mlp, "mlp")

    @cached_property
    def _sparse_layer(self) -> list[Parameter]:
        found = self._attention()
        found.append(Parameter("mlp.router.weight", router_shape(self.model.hidden_size, self.moe)))
        found += self.experts.parameters
        if self.shared_expert is not None:
            found += _of_mlp(self.shared_expert, "mlp.shared.mlp")
        if has_shared_gate(self.moe):
            found.append(Parameter("mlp.shared.gate.weight", shared_gate_shape(self.model.hidden_size)))
        return found

    def _attention(self) -> list[Parameter]:
        """With the norms of the layer."""
        sizes, kind = self.attention, self.model.normalization
        found = self._norm("input_norm") + sizes.linear_qkv.parameters("attention.linear_qkv")
        if self.model.qk_layernorm:
            for name in ("attention.q_norm", "attention.k_norm"):
                found += norm_parameters(kind, sizes.head, name)
        return found + sizes.linear_proj.parameters("attention.linear_proj") + self._norm("mlp_norm")

    def _norm(self, name: str) -> list[Parameter]:
        return norm_parameters(self.model.normalization, self.model.hidden_size, name)


def _of_mlp(sizes: MLPSizes, name: str) -> list[Parameter]:
    fc1, fc2 = sizes.linear_fc1, sizes.linear_fc2
    return fc1.parameters(f"{name}.linear_fc1") + fc2.parameters(f"{name}.linear_fc2")


# Floating-point operations of a training step: matmuls forward and backward, attention counted causally.


_MULTIPLY_ADD_FORWARD_BACKWARD = 6  # 2 per multiply-add, once forward and twice backward
# The share of its peak that a GPU reaches, and the TFLOP/s taken for a GPU that is not known.
_USUAL_SHARE, _USUAL_PEAK = 0.5, 300.0


def step_flops(config: TransformerConfig, batch: int, sequence: int, moe: MoEConfig = NO_EXPERTS) -> float:
    """FLOPs of one step over `batch` sequences; no recompute, embedding, router, softmax or norm is counted.

    Attention counts what a layer's window lets a token see. Where documents end is data, so masks between them are not subtracted.
    """
    hidden, attention = config.hidden_size, attention_sizes(config)
    attended = attention.linear_proj.inputs
    sparse = 0 if moe.num_experts is None else sum(moe_layers(moe.moe_layer_freq, config.num_layers))
    mlps = hidden * inner_widths(config, moe, sparse) * matrices_of(config)
    projections = attention.linear_qkv.multiplications + attention.linear_proj.multiplications
    per_token = mlps + config.num_layers * projections + hidden * config.padded_vocab_size
    return (
        _MULTIPLY_ADD_FORWARD_BACKWARD * batch * (sequence * per_token + _pairs(config, sequence) * attended)
    )


def layer_seconds(config: TransformerConfig, moe: MoEConfig, samples: int, peak: float | None) -> float:
    """About how long a GPU computes one layer of a micro-batch, forward and backward; `peak` in TFLOP/s."""
    flops = step_flops(config, samples, config.seq_length, moe)
    return flops / config.num_layers / ((peak or _USUAL_PEAK) * 1e12 * _USUAL_SHARE)


def _pairs(config: TransformerConfig, sequence: int) -> int:
    """Twice the pairs of tokens that all layers compare in a sequence: once for the weights, once for what they weigh."""
    layers, before = config.num_layers, window_of(config.window_size, None, 1, 1)
    if before is None:
        return layers * sequence * sequence
    windows, seen = sum(windowed_layers(config.window_attn_skip_freq, layers)), min(before + 1, sequence)
    # A band of this width below the diagonal; the first tokens have less behind them.
    return (layers - windows) * sequence * sequence + windows * seen * (2 * sequence - seen)


# What the configuration says about the stages of the pipeline: how the layers are divided, and what each
# costs.


def grid_of(s: Settings) -> Grid:
    """The grid of ranks; with experts and nothing said, one expert is cut like a dense layer."""
    tensor = s.tensor_model_parallel_size
    of_experts = (s.expert_tensor_parallel_size or tensor) if s.num_experts else 1
    return Grid(
        tensor=tensor,
        context=s.context_parallel_size,
        data=s.data_parallel_size,
        pipeline=s.pipeline_model_parallel_size,
        expert=s.expert_model_parallel_size,
        expert_tensor=of_experts,
        kv_copies=max(1, tensor // s.num_query_groups),
        instances=s.num_distributed_optimizer_instances if s.zero_stage == 3 else 1,
    )


def division_of(s: Settings) -> Division:
    """How the layers are to be divided. Wishes about the ends mean nothing to a single rank."""
    ranks, virtual, written = (
        s.pipeline_model_parallel_size,
        s.virtual_stages,
        s.pipeline_model_parallel_layout,
    )
    if ranks == 1:
        return Division(ranks, virtual, written=written)
    return Division(
        ranks=ranks,
        virtual=virtual,
        first=s.decoder_first_pipeline_num_layers,
        last=s.decoder_last_pipeline_num_layers,
        count_embedding=s.account_for_embedding_in_pipeline_split,
        count_head=s.account_for_loss_in_pipeline_split,
        even=s.num_layers_per_virtual_pipeline_stage is not None,
        written=written,
        folded=s.pipeline_schedule in FOLDED,
    )


def costs_of(s: Settings) -> Costs:
    """Multiplications for one token of a full sequence; looking up an embedding takes none."""
    hidden, attention = s.hidden_size, attention_sizes(s)
    projections = attention.linear_qkv.multiplications + attention.linear_proj.multiplications
    mlp = matrices_of(s) * hidden * _inner_width(s)
    # A token looks back at half the sequence on average, once for the scores and once for the values.
    scores = s.seq_length * attention.linear_proj.inputs
    return Costs(layer=projections + mlp + scores, embedding=0, head=hidden * (s.padded_vocab_size or 0))


def _inner_width(s: Settings) -> float:
    """Of a feed-forward part; the mean, where some layers have experts and some do not."""
    layers = s.num_layers
    sparse = 0
    if s.num_experts is not None:
        try:
            sparse = sum(moe_layers(s.moe_layer_freq, layers))
        except ValueError:
            # A rule will say what is wrong with it.
            sparse = layers
    return inner_widths(s, s, sparse) / layers
