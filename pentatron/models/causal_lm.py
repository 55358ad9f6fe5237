"""The decoder-only language model: embedding, transformer layers, final norm and output layer.

A pipeline stage is the same class with some of these parts missing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from pentatron.layout.documents import DocumentStarts
from pentatron.layout.stages import StagePart
from pentatron.models.layer_specs import block_spec
from pentatron.nn.compiled import compiled_layers
from pentatron.nn.dropout import DropoutKeys, hidden_dropout
from pentatron.nn.init import draw_weights
from pentatron.nn.kv_cache import ActiveCache
from pentatron.nn.linear import OutputLayer, PositionEmbedding, VocabParallelEmbedding
from pentatron.nn.norm import ConfiguredNorm, norm_in
from pentatron.nn.options import DEFAULT_OPTIONS, AttentionKernels, Axes, LayerOptions, ModelOptions
from pentatron.nn.recompute import EVERY_LAYER, LAYERS, NO_RECOMPUTE, RecomputeSwitch
from pentatron.nn.rope import build_rope
from pentatron.nn.spec import ModuleSpec, TransformerBlockSubmodules, build_module, document_kwargs
from pentatron.parallel.axes import TensorAxis
from pentatron.parallel.sharding import Shape, sharded_parameters
from pentatron.settings import model_sizes
from pentatron.settings.core_config import CoreTransformerConfig
from pentatron.settings.model import NO_EXPERTS, MoEConfig, TransformerConfig

_TIED_TENSOR = "embedding.word.weight"


class Embedding(nn.Module):
    """Word embedding, plus learned position embedding if the family has one."""

    def __init__(self, config: TransformerConfig, axis: TensorAxis, tied_elsewhere: bool) -> None:
        super().__init__()
        self.axis = axis
        self.dropout = config.hidden_dropout
        rows, width = model_sizes.embedding_shape(config)
        self.word = VocabParallelEmbedding(rows, config.vocab_size, width, axis, tied=tied_elsewhere)
        positions = model_sizes.position_shape(config)
        self.position = None if positions is None else PositionEmbedding(positions, axis)

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, keys: DropoutKeys | None) -> Tensor:
        x_BSD = self.word(tokens_BS)
        if self.position is not None:
            x_BSD = x_BSD + self.position(self.axis.own_sequence(positions_BS))
        return x_BSD if keys is None else hidden_dropout(x_BSD, keys, 0, self.dropout)


class SharedEmbedding:
    """Passes the embedding table of a folded pipeline's first stage to the last one, built later on this
    rank.
    """

    def __init__(self) -> None:
        self.table: VocabParallelEmbedding | None = None


def shared_embedding_of(parts: Collection[StagePart]) -> SharedEmbedding | None:
    """Returns a SharedEmbedding if the first and the last stage are two different stages of this rank."""
    ends = {(part.embedding, part.head) for part in parts}
    return SharedEmbedding() if ends >= {(True, False), (False, True)} else None


class CausalLM(nn.Module):
    """One stage of the model, or all of it.

    `shared_embedding` is given if both ends of a folded pipeline are on this rank, so that a tied embedding
    is one parameter of two stages.
    """

    def __init__(
        self,
        config: TransformerConfig,
        moe: MoEConfig,
        part: StagePart,
        axes: Axes,
        options: ModelOptions = DEFAULT_OPTIONS,
        spec: ModuleSpec | TransformerBlockSubmodules | None = None,
        shared_embedding: SharedEmbedding | None = None,
    ) -> None:
        super().__init__()
        core = CoreTransformerConfig.of(config, moe)
        block = block_spec(core, spec)
        self.vocab_size = config.vocab_size
        self.attention_backend = options.attention_backend
        self.attention_dropout = config.attention_dropout
        self.kernels = AttentionKernels()
        self.cache_in_use = ActiveCache()
        draws = config.attention_dropout > 0
        self.recompute = RecomputeSwitch(options.recompute, draws, self.kernels.context)
        self.cross_entropy = options.cross_entropy
        axes = axes.with_linear(options.linear())
        self.axis = axes.tensor
        head_axis = axes.with_linear(options.linear_of_head()).tensor
        tied = model_sizes.is_tied(config)
        tied_elsewhere = tied and not part.head and shared_embedding is None
        # With both ends on this stage, the tied embedding table is the output layer too.
        table_axis = head_axis if tied and part.head else self.axis
        self.embedding = Embedding(config, table_axis, tied_elsewhere) if part.embedding else None
        self.rope = build_rope(config)
        shared = LayerOptions(
            self.recompute, self.kernels, self.cache_in_use, options.fuses_gates, options.compile
        )
        axes_of = {i: axes.with_linear(options.linear_of_layer(i)) for i in part.layers}
        build = partial(build_module, config=core)
        layers = {
            i: build(block.layer_specs[i], layer_number=i + 1, axes=replace(own, options=shared))
            for i, own in axes_of.items()
        }
        # ModuleDict, not ModuleList: names contain the layer's number in the model, also on stages with some
        # of the layers.
        self.layers = nn.ModuleDict({str(i): layer for i, layer in layers.items()})
        # Runs several layers as one compiled function; returns the layers it did not run.
        self.multi_layer_graph = compiled_layers(options.compile, layers.values())
        self.final_norm: nn.Module | None = None
        self.head: OutputLayer | None = None
        if part.head:
            slot, partial_over = block.layer_norm or ConfiguredNorm, self.axis.partial_axes
            self.final_norm = norm_in(slot, config, config.hidden_size, partial_over, options.compile)
        if model_sizes.has_separate_output_weight(config, part):
            rows, width = model_sizes.embedding_shape(config)
            table = shared_embedding.table if tied and shared_embedding is not None else None
            assert not tied or shared_embedding is None or table is not None, "the first stage is built first"
            tied_to = _TIED_TENSOR if tied else None
            self.head = OutputLayer(rows, config.vocab_size, width, head_axis, tied_to=tied_to, shared=table)
        if tied and shared_embedding is not None and self.embedding is not None:
            shared_embedding.table = self.embedding.word

    def forward(
        self,
        tokens_BS: Tensor,
        positions_BS: Tensor,
        labels_BS: Tensor | None = None,
        received_BSD: Tensor | None = None,
        keys: DropoutKeys | None = None,
        wanted_B: Tensor | None = None,
        documents: DocumentStarts | None = None,
    ) -> Tensor:
        """Returns hidden states for the next stage; on a stage with the head, logits, or the loss of every
        token if labels are given.

        `received_BSD` are the hidden states of the previous stage. `keys` determine the dropout masks;
        without them dropout is off. `wanted_B` selects one token of each sequence for the logits. `documents`
        restrict attention to each token's own document; they describe whole sequences, also if this rank has
        a part of each.
        """
        if self.embedding is not None:
            x_BSD = self.embedding(tokens_BS, positions_BS, keys)
        else:
            assert received_BSD is not None, "a stage without embedding needs hidden states"
            x_BSD = received_BSD
        angles = self.rope(positions_BS) if self.rope is not None else None
        self.kernels.choose(self.attention_backend, x_BSD.device, self.attention_dropout)
        layers = list(self.layers.values())
        with self.kernels.context():
            if LAYERS in self.recompute.wanted.parts:
                for part, chunk in self.recompute.chunks(layers):
                    x_BSD = self.recompute(part, self._run_layers, x_BSD, chunk, angles, keys, documents)
            else:
                x_BSD = self._run_layers(x_BSD, layers, angles, keys, documents)
        if self.final_norm is None:
            return x_BSD
        if wanted_B is not None:
            x_BSD = x_BSD[torch.arange(len(wanted_B), device=wanted_B.device), wanted_B][:, None]
        return self._logits_or_losses(self.final_norm(x_BSD), labels_BS)

    def _run_layers(
        self,
        x_BSD: Tensor,
        layers: Sequence[nn.Module],
        angles: tuple[Tensor, Tensor] | None,
        keys: DropoutKeys | None,
        documents: DocumentStarts | None,
    ) -> Tensor:
        if self.multi_layer_graph is not None and documents is None:
            x_BSD, layers = self.multi_layer_graph(x_BSD, layers, self.rope, angles, keys)
        for layer in layers:
            x_BSD = layer(x_BSD, self.rope, angles, keys, **document_kwargs(layer, documents))
        return x_BSD

    def gradient_checkpointing_enable(self) -> None:
        """Recomputes every layer in backward."""
        self.recompute.wanted = EVERY_LAYER

    def gradient_checkpointing_disable(self) -> None:
        self.recompute.wanted = NO_RECOMPUTE

    def _logits_or_losses(self, x_BSD: Tensor, labels_BS: Tensor | None) -> Tensor:
        """Returns this rank's shard of the logits, or with labels the loss of every token."""

        def losses(head: VocabParallelEmbedding, x_BSD: Tensor) -> Tensor:
            assert labels_BS is not None
            return self.cross_entropy.from_hidden_states(head, x_BSD, labels_BS, self.vocab_size)

        if self.head is not None:
            return self.head(x_BSD, None if labels_BS is None else losses)
        assert self.embedding is not None, "a stage with a tied head without a table has the embedding"
        table = self.embedding.word
        return table.logits(x_BSD) if labels_BS is None else losses(table, x_BSD)


def build_stages(
    config: TransformerConfig,
    moe: MoEConfig,
    parts: Mapping[int, StagePart],
    axes: Axes,
    seed: int | None,
    device: torch.device,
    options: ModelOptions = DEFAULT_OPTIONS,
    spec: ModuleSpec | TransformerBlockSubmodules | None = None,
) -> dict[int, CausalLM]:
    """Builds the stages of a rank in fp32, with initial weights that depend only on the seed.

    Without a seed the weights are uninitialized memory, for callers that load all of them.
    """
    shared = shared_embedding_of(parts.values())
    with device:
        stages = {n: CausalLM(config, moe, part, axes, options, spec, shared) for n, part in parts.items()}
    if seed is not None:
        draw_weights(sharded_parameters(*stages.values()), seed, config.init_method_std)
    return stages


def build_model(
    config: TransformerConfig,
    seed: int,
    device: torch.device,
    moe: MoEConfig = NO_EXPERTS,
    options: ModelOptions = DEFAULT_OPTIONS,
    spec: ModuleSpec | TransformerBlockSubmodules | None = None,
) -> CausalLM:
    """Builds the whole model on one process."""
    part = StagePart(tuple(range(config.num_layers)), embedding=True, head=True)
    return build_stages(config, moe, {0: part}, Axes(), seed, device, options, spec)[0]


def logical_shapes(model: TransformerConfig, moe: MoEConfig) -> dict[str, Shape]:
    """Returns the shape of every tensor of the unsharded model by name, without allocating it."""
    part = StagePart(tuple(range(model.num_layers)), embedding=True, head=True)
    with torch.device("meta"):
        whole = CausalLM(model, moe, part, Axes())
    return {param.tensor: param.declared.shape for param in sharded_parameters(whole)}
