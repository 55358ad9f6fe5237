"""The parameters of every part of a model, in the sizes that one rank holds.

Layers are built with these sizes, and plans count these parameters. With one rank on every axis the sizes are
those of the whole model. A layer declares itself which pieces of a parameter its rank holds.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from pentatron.config.model import MoEConfig, TransformerConfig
from pentatron.layout.ranks import Axis, Grid
from pentatron.layout.stages import StagePart

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
