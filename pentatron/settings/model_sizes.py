"""Shapes of all parameters of a model on one rank, FLOPs of a step, and the costs of layers and stages.

Layers are built with these shapes, and the planner counts these parameters. With one rank on every axis they
are those of the whole model. Which shard of a parameter a rank holds is declared by the layer.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from pentatron.layout.ranks import Axis, Grid
from pentatron.layout.schedules import FOLDED
from pentatron.layout.stages import Costs, StageDivision, StagePart
from pentatron.settings.layer_patterns import window_of_layer, windowed_layers
from pentatron.settings.model import NO_EXPERTS, MoEConfig, TransformerConfig, inner_widths, moe_layers
from pentatron.settings.settings import Settings

# Parameters by kind of norm, in the order of the layer.
_NORM_PARAMETERS = {"LayerNorm": ("weight", "bias"), "RMSNorm": ("weight",)}


@dataclass(frozen=True)
class Parameter:
    """A parameter on one rank. `name` is relative to its layer, or to the stage outside of layers.

    Ranks on `replica_axis` hold replicas and see different tokens. `is_tied_across_stages`: a tied
    embedding, of which the first and the last stage have a copy.
    """

    name: str
    shape: tuple[int, ...]
    replica_axis: Axis = "replicas"
    is_tied_across_stages: bool = False

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
        """Multiply-adds for one token."""
        return self.inputs * self.outputs

    def parameters(self, name: str) -> list[Parameter]:
        weight = Parameter(f"{name}.weight", (self.outputs, self.inputs))
        return [weight, Parameter(f"{name}.bias", (self.outputs,))] if self.has_bias else [weight]


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of attention. `groups`: key/value heads. `head`: width of one head."""

    heads: int
    groups: int
    head: int
    linear_qkv: LinearSizes
    linear_proj: LinearSizes

    @property
    def queries_per_group(self) -> int:
        return self.heads // self.groups


def attention_sizes(config: TransformerConfig, ranks: int = 1) -> AttentionSizes:
    """Returns the sizes on one of `ranks` tensor ranks.

    With fewer groups than ranks, groups are replicated.
    """
    heads, groups = config.num_attention_heads // ranks, max(1, config.num_query_groups // ranks)
    hidden, head = config.hidden_size, config.kv_channels
    qkv = LinearSizes(hidden, (heads + 2 * groups) * head, has_qkv_bias(config))
    return AttentionSizes(heads, groups, head, qkv, LinearSizes(heads * head, hidden, has_proj_bias(config)))


def has_qkv_bias(config: TransformerConfig) -> bool:
    return config.add_bias_linear or config.add_qkv_bias


def has_proj_bias(config: TransformerConfig) -> bool:
    return config.add_bias_linear or config.add_proj_bias


def has_mlp_bias(config: TransformerConfig) -> bool:
    """Whether dense MLPs and shared experts have biases. Routed experts have none."""
    return config.add_bias_linear or config.add_mlp_bias


def matrices_before_activation(config: TransformerConfig) -> int:
    """Returns the number of matrices before the activation of an MLP.

    A gated MLP has two, in one parameter.
    """
    return 2 if config.gated_linear_unit else 1


def matrices_per_mlp(config: TransformerConfig) -> int:
    """Returns the number of matrices of an MLP or expert."""
    return matrices_before_activation(config) + 1


@dataclass(frozen=True)
class MLPSizes:
    """Sizes of an MLP. `inner`: width between its matrices."""

    inner: int
    linear_fc1: LinearSizes
    linear_fc2: LinearSizes


def mlp_sizes(config: TransformerConfig, ranks: int = 1, inner: int | None = None) -> MLPSizes:
    """Returns the sizes on one of `ranks` tensor ranks.

    `inner`: unsharded inner width, if not the configured one.
    """
    width, hidden, bias = (inner or config.ffn_hidden_size) // ranks, config.hidden_size, has_mlp_bias(config)
    fc1 = LinearSizes(hidden, matrices_before_activation(config) * width, bias)
    return MLPSizes(width, fc1, LinearSizes(width, hidden, bias))


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of `count` experts. Each of the two parameters stacks the matrices of all experts."""

    count: int
    inner: int
    linear_fc1: tuple[int, int, int]
    linear_fc2: tuple[int, int, int]

    @property
    def parameters(self) -> list[Parameter]:
        shapes = {"linear_fc1": self.linear_fc1, "linear_fc2": self.linear_fc2}
        return [Parameter(f"mlp.experts.{n}.weight", shape, "expert_data") for n, shape in shapes.items()]


def expert_sizes(
    config: TransformerConfig, moe: MoEConfig, ep_size: int = 1, expert_tp_size: int = 1
) -> ExpertSizes:
    """Returns the sizes on one rank.

    `ep_size`: expert-parallel size. `expert_tp_size`: tensor-parallel size of an expert.
    """
    count, hidden = moe.experts // ep_size, config.hidden_size
    inner = moe.moe_ffn_hidden_size // expert_tp_size
    fc1 = (count, matrices_before_activation(config) * inner, hidden)
    return ExpertSizes(count, inner, fc1, (count, hidden, inner))


def router_shape(hidden: int, moe: MoEConfig) -> tuple[int, int]:
    return (moe.experts, hidden)


def has_shared_expert(moe: MoEConfig) -> bool:
    """Whether there is an expert that every token uses, in addition to the routed ones."""
    return moe.moe_shared_expert_intermediate_size is not None


def has_shared_gate(moe: MoEConfig) -> bool:
    return has_shared_expert(moe) and moe.moe_shared_expert_gate


def shared_gate_shape(hidden: int) -> tuple[int, int]:
    return (1, hidden)


def norm_parameters(kind: str, width: int, name: str = "") -> list[Parameter]:
    prefix = f"{name}." if name else ""
    return [Parameter(f"{prefix}{each}", (width,)) for each in _NORM_PARAMETERS[kind]]


def is_tied(config: TransformerConfig) -> bool:
    """Whether embedding and output layer share their weight."""
    return not config.untie_embeddings_and_output_weights


def has_separate_output_weight(config: TransformerConfig, part: StagePart) -> bool:
    """Whether the output layer of a stage has a weight other than the embedding of that stage."""
    return part.head and not (is_tied(config) and part.embedding)


def embedding_shape(config: TransformerConfig, ranks: int = 1) -> tuple[int, int]:
    """Returns the shape of the weight of embedding and output layer."""
    return (config.padded_vocab_size // ranks, config.hidden_size)


def position_shape(config: TransformerConfig) -> tuple[int, int] | None:
    """Returns the shape of the learned position embedding, or None if there is none."""
    learned = config.position_embedding_type == "learned_absolute"
    return (config.max_position_embeddings, config.hidden_size) if learned else None


@dataclass(frozen=True)
class ModelParameters:
    """Parameters of each part of a model on one rank of a grid, in the order of the model.

    `sparse_layers`: indices of the layers with experts.
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
        width = self.moe.moe_shared_expert_intermediate_size
        return None if width is None else mlp_sizes(self.model, self.grid.tensor, width)

    @cached_property
    def embedding_shape(self) -> tuple[int, int]:
        return embedding_shape(self.model, self.grid.tensor)

    def stage(self, part: StagePart) -> list[Parameter]:
        parameters: list[Parameter] = []
        tied, positions, shape = is_tied(self.model), position_shape(self.model), self.embedding_shape
        if part.embedding:
            copied = tied and not part.head
            parameters.append(Parameter("embedding.word.weight", shape, is_tied_across_stages=copied))
        if part.embedding and positions is not None:
            parameters.append(Parameter("embedding.position.weight", positions))
        for layer in part.layers:
            parameters += self.layer(layer)
        if part.head:
            parameters += self._norm("final_norm")
        if has_separate_output_weight(self.model, part):
            parameters.append(Parameter("head.weight", shape, is_tied_across_stages=tied))
        return parameters

    def layer(self, number: int) -> list[Parameter]:
        return self._sparse_layer if number in self.sparse_layers else self._dense_layer

    @cached_property
    def _dense_layer(self) -> list[Parameter]:
        return self._attention() + _mlp_parameters(self.mlp, "mlp")

    @cached_property
    def _sparse_layer(self) -> list[Parameter]:
        hidden = self.model.hidden_size
        router = Parameter("mlp.router.weight", router_shape(hidden, self.moe))
        parameters = [*self._attention(), router, *self.experts.parameters]
        if self.shared_expert is not None:
            parameters += _mlp_parameters(self.shared_expert, "mlp.shared.mlp")
        if has_shared_gate(self.moe):
            parameters.append(Parameter("mlp.shared.gate.weight", shared_gate_shape(hidden)))
        return parameters

    def _attention(self) -> list[Parameter]:
        """Returns the parameters of attention and of the norms of a layer."""
        sizes, kind = self.attention, self.model.normalization
        parameters = self._norm("input_norm") + sizes.linear_qkv.parameters("attention.linear_qkv")
        if self.model.qk_layernorm:
            for name in ("attention.q_norm", "attention.k_norm"):
                parameters += norm_parameters(kind, sizes.head, name)
        return parameters + sizes.linear_proj.parameters("attention.linear_proj") + self._norm("mlp_norm")

    def _norm(self, name: str) -> list[Parameter]:
        return norm_parameters(self.model.normalization, self.model.hidden_size, name)


def _mlp_parameters(sizes: MLPSizes, name: str) -> list[Parameter]:
    fc1, fc2 = sizes.linear_fc1, sizes.linear_fc2
    return fc1.parameters(f"{name}.linear_fc1") + fc2.parameters(f"{name}.linear_fc2")


# --- FLOPs of a training step ---


_MULTIPLY_ADD_FORWARD_BACKWARD = 6  # 2 per multiply-add, once forward and twice backward
# Assumed model FLOPs utilization (MFU), and assumed peak TFLOP/s of an unknown GPU.
_ASSUMED_MFU, _ASSUMED_PEAK = 0.5, 300.0


def step_flops(config: TransformerConfig, batch: int, sequence: int, moe: MoEConfig = NO_EXPERTS) -> float:
    """Returns the FLOPs of the matmuls of one step over `batch` sequences, forward and backward.

    Recompute, embedding, router, softmax and norms are not counted. Attention is counted causally and within
    the window of each layer. Masks between documents are ignored, as they depend on the data.
    """
    hidden, attention = config.hidden_size, attention_sizes(config)
    attended = attention.linear_proj.inputs
    sparse = 0 if moe.num_experts is None else sum(moe_layers(moe.moe_layer_freq, config.num_layers))
    mlps = hidden * inner_widths(config, moe, sparse) * matrices_per_mlp(config)
    projections = attention.linear_qkv.multiplications + attention.linear_proj.multiplications
    per_token = mlps + config.num_layers * projections + hidden * config.padded_vocab_size
    per_sequence = sequence * per_token + _pairs(config, sequence) * attended
    return _MULTIPLY_ADD_FORWARD_BACKWARD * batch * per_sequence


def layer_seconds(config: TransformerConfig, moe: MoEConfig, samples: int, peak: float | None) -> float:
    """Estimates the time of one layer for a micro-batch, forward and backward. `peak`: TFLOP/s of the GPU."""
    flops = step_flops(config, samples, config.seq_length, moe)
    return flops / config.num_layers / ((peak or _ASSUMED_PEAK) * 1e12 * _ASSUMED_MFU)


def _pairs(config: TransformerConfig, sequence: int) -> int:
    """Returns the attended token pairs of a sequence over all layers, twice: for scores and values."""
    layers, before = config.num_layers, window_of_layer(config.window_size, None, 1, 1)
    if before is None:
        return layers * sequence * sequence
    windows, seen = sum(windowed_layers(config.window_attn_skip_freq, layers)), min(before + 1, sequence)
    # A band of this width along the diagonal; the first tokens have fewer before them.
    return (layers - windows) * sequence * sequence + windows * seen * (2 * sequence - seen)


# --- ranks and pipeline stages ---


def grid_of(s: Settings) -> Grid:
    """Returns the grid of ranks. By default, experts have the tensor-parallel size of dense layers."""
    tensor = s.tensor_model_parallel_size
    expert_tensor = (s.expert_tensor_parallel_size or tensor) if s.num_experts else 1
    return Grid(
        tensor=tensor,
        context=s.context_parallel_size,
        data=s.data_parallel_size,
        pipeline=s.pipeline_model_parallel_size,
        expert=s.expert_model_parallel_size,
        expert_tensor=expert_tensor,
        kv_copies=max(1, tensor // s.num_query_groups),
        instances=s.num_distributed_optimizer_instances if s.zero_stage == 3 else 1,
    )


def division_of(s: Settings) -> StageDivision:
    """Returns how the layers are divided into stages.

    On one rank, layers at the ends are not counted separately.
    """
    ranks, written = s.pipeline_model_parallel_size, s.pipeline_model_parallel_layout
    whole = StageDivision(ranks, s.virtual_stages, written=written)
    if ranks == 1:
        return whole
    return replace(
        whole,
        first=s.decoder_first_pipeline_num_layers,
        last=s.decoder_last_pipeline_num_layers,
        count_embedding=s.account_for_embedding_in_pipeline_split,
        count_head=s.account_for_loss_in_pipeline_split,
        even=s.num_layers_per_virtual_pipeline_stage is not None,
        folded=s.pipeline_schedule in FOLDED,
    )


def costs_of(s: Settings) -> Costs:
    """Returns the multiply-adds per token of a layer and of the output layer.

    An embedding lookup has none.
    """
    hidden, attention = s.hidden_size, attention_sizes(s)
    projections = attention.linear_qkv.multiplications + attention.linear_proj.multiplications
    mlp = matrices_per_mlp(s) * hidden * _inner_width(s)
    # A token attends to half the sequence on average, once for the scores and once for the values.
    scores = s.seq_length * attention.linear_proj.inputs
    return Costs(layer=projections + mlp + scores, embedding=0, head=hidden * (s.padded_vocab_size or 0))


def _inner_width(s: Settings) -> float:
    """Returns the mean inner width of the feed-forward parts of all layers."""
    sparse = s.num_layers
    # A rule reports an invalid pattern.
    with suppress(ValueError):
        sparse = 0 if s.num_experts is None else sum(moe_layers(s.moe_layer_freq, s.num_layers))
    return inner_widths(s, s, sparse) / s.num_layers
