"""The decoder-only language model: embedding, a loop over layers, a norm and a head.

A pipeline stage is the same class with parts missing: no embedding, some of the layers, no head.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from pentatron.config.core import CoreTransformerConfig
from pentatron.config.model import NO_EXPERTS, MoEConfig, TransformerConfig
from pentatron.layout.documents import DocumentStarts
from pentatron.layout.stages import StagePart
from pentatron.models.layer_specs import block_spec
from pentatron.nn.attention import AttentionKernels, DotProductAttention
from pentatron.nn.dropout import DropoutKeys, hidden_dropout
from pentatron.nn.init import draw_weights
from pentatron.nn.linear import PositionTable, VocabularyHead, VocabularyTable, tie_on_one_rank
from pentatron.nn.loss import CrossEntropy
from pentatron.nn.norm import ConfiguredNorm, norm_in
from pentatron.nn.recompute import EVERY_LAYER, NOTHING, Recompute
from pentatron.nn.rope import build_rope
from pentatron.nn.spec import ModuleSpec, TransformerBlockSubmodules, build_module, documents_for
from pentatron.parallel.axes import Axes
from pentatron.parallel.pieces import held_parameters
from pentatron.parallel.tensor_axis import TensorAxis

_TIED_TENSOR = "embedding.word.weight"


class Embedding(nn.Module):
    """Word vectors, plus learned positions where the family has them."""

    def __init__(self, config: TransformerConfig, axis: TensorAxis, tied_elsewhere: bool) -> None:
        super().__init__()
        assert config.padded_vocab_size and config.vocab_size and config.max_position_embeddings
        self.axis = axis
        self.dropout = config.hidden_dropout
        self.word = VocabularyTable(
            config.padded_vocab_size, config.vocab_size, config.hidden_size, axis, tied=tied_elsewhere
        )
        learned = config.position_embedding_type == "learned_absolute"
        self.position = (
            PositionTable(config.max_position_embeddings, config.hidden_size, axis) if learned else None
        )

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, keys: DropoutKeys | None) -> Tensor:
        x_BSD = self.word(tokens_BS)
        if self.position is not None:
            x_BSD = x_BSD + self.position(self.axis.own_sequence(positions_BS))
        return x_BSD if keys is None else hidden_dropout(x_BSD, keys, 0, self.dropout)


class CausalLM(nn.Module):
    """One stage of the model, or all of it."""

    def __init__(
        self,
        config: TransformerConfig,
        moe: MoEConfig,
        part: StagePart,
        axes: Axes,
        attention_backend: str = "auto",
        spec: ModuleSpec | TransformerBlockSubmodules | None = None,
    ) -> None:
        super().__init__()
        core = CoreTransformerConfig.of(config, moe)
        block = block_spec(core, spec)
        axis = axes.tensor
        assert config.padded_vocab_size and config.vocab_size and config.kv_channels
        self.vocab_size = config.vocab_size
        self.attention_backend = attention_backend
        self.kernels = AttentionKernels()
        self.axis = axis
        self.attention_dropout = config.attention_dropout
        self.recompute: Recompute = NOTHING
        # Several layers as one function, where they are compiled like that; it gives back those it did not run.
        self.together: Callable[..., tuple[Tensor, Sequence[nn.Module]]] | None = None
        self.cross_entropy = CrossEntropy()
        tied = not config.untie_embeddings_and_output_weights
        self.embedding = Embedding(config, axis, tied and not part.head) if part.embedding else None
        self.rope = build_rope(config)
        # A ModuleDict keeps a layer's number in its name when a stage holds only some of the layers.
        self.layers = nn.ModuleDict(
            {
                str(i): build_module(block.layer_specs[i], config=core, layer_number=i + 1, axes=axes)
                for i in part.layers
            }
        )
        for module in self.layers.modules():
            if isinstance(module, DotProductAttention):
                module.kernels = self.kernels
        self.final_norm: nn.Module | None = None
        self.head: VocabularyHead | None = None
        if part.head:
            chosen = block.layer_norm or ConfiguredNorm
            self.final_norm = norm_in(chosen, config, config.hidden_size, axis.partial_in_stream)
            sizes = (config.padded_vocab_size, config.vocab_size, config.hidden_size)
            if not tied:
                self.head = VocabularyHead(*sizes, axis)
            elif not part.embedding:
                self.head = VocabularyHead(*sizes, axis, tied_to=_TIED_TENSOR)

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
        """The stream for the next stage; where the head is, logits, or the loss of every token if labels are given.

        `received_BSD` is what the stage before made; `keys` choose what dropout drops, without them it is off. With
        `wanted_B`, logits are those of one token of each sequence alone. With `documents`, a token sees those of its own document
        alone; they are the documents of whole sequences, also where this rank has a part of each.
        """
        if self.embedding is not None:
            x_BSD = self.embedding(tokens_BS, positions_BS, keys)
        else:
            assert received_BSD is not None, "a stage without embedding goes on from the stage before"
            x_BSD = received_BSD
        angles = self.rope(positions_BS) if self.rope is not None else None
        self.kernels.choose(self.attention_backend, x_BSD.device, self.attention_dropout)
        with self.kernels.around():
            for part, layers in self.recompute.chunks(list(self.layers.values())):
                x_BSD = self.recompute(part, self._through, x_BSD, layers, angles, keys, documents)
        if self.final_norm is None:
            return x_BSD
        if wanted_B is not None:
            x_BSD = x_BSD[torch.arange(len(wanted_B), device=wanted_B.device), wanted_B][:, None]
        return self._logits_or_losses(self.final_norm(x_BSD), labels_BS)

    def _through(
        self,
        x_BSD: Tensor,
        layers: Sequence[nn.Module],
        angles: tuple[Tensor, Tensor] | None,
        keys: DropoutKeys | None,
        documents: DocumentStarts | None,
    ) -> Tensor:
        if self.together is not None and documents is None:
            x_BSD, layers = self.together(x_BSD, layers, self.rope, angles, keys)
        for layer in layers:
            x_BSD = layer(x_BSD, self.rope, angles, keys, **documents_for(layer, documents))
        return x_BSD

    def use_recompute(self, wanted: Recompute) -> None:
        """What keeps only its input for backward from now on, and runs again there."""
        draws = self.attention_dropout > 0
        self.recompute = dataclasses.replace(wanted, draws=draws, kernels=self.kernels.around)
        for module in self.modules():
            if isinstance(getattr(module, "recompute", None), Recompute):
                module.recompute = self.recompute  # type: ignore[assignment]

    def gradient_checkpointing_enable(self) -> None:
        """Every layer keeps its input alone, and runs again in backward."""
        self.use_recompute(EVERY_LAYER)

    def gradient_checkpointing_disable(self) -> None:
        self.use_recompute(NOTHING)

    def use_cross_entropy(self, wanted: CrossEntropy) -> None:
        """How losses are computed from now on."""
        self.cross_entropy = wanted

    def _logits_or_losses(self, x_BSD: Tensor, labels_BS: Tensor | None) -> Tensor:
        """This rank's part of the logits, or with labels the loss of every token."""

        def losses(head: VocabularyTable, x_BSD: Tensor) -> Tensor:
            assert labels_BS is not None
            return self.cross_entropy.of_stream(head, x_BSD, labels_BS, self.vocab_size)

        if self.head is not None:
            made: Tensor = self.head(x_BSD, None if labels_BS is None else losses)
            return made
        assert self.embedding is not None, "a tied head without a copy of its own is beside the embedding"
        table = self.embedding.word
        return table.logits(x_BSD) if labels_BS is None else losses(table, x_BSD)


def build_stages(
    config: TransformerConfig,
    moe: MoEConfig,
    parts: Mapping[int, StagePart],
    axes: Axes,
    seed: int | None,
    device: torch.device,
    attention_backend: str = "auto",
    spec: ModuleSpec | TransformerBlockSubmodules | None = None,
) -> dict[int, CausalLM]:
    """The stages of a rank in fp32, with initial weights that depend on the seed and on nothing else.

    Without a seed the weights are whatever the memory held, for whoever loads all of them.
    """
    stages = {}
    for number, part in parts.items():
        with device:
            stages[number] = CausalLM(config, moe, part, axes, attention_backend, spec)
    if not config.untie_embeddings_and_output_weights:
        tie_ends(stages.values())
    if seed is not None:
        draw_weights(held_parameters(*stages.values()), seed, config.init_method_std)
    return stages


def tie_ends(stages: Collection[CausalLM]) -> None:
    """Where a pipeline is folded, the first and the last stage are on one rank."""
    tables = [stage.embedding.word for stage in stages if stage.embedding is not None]
    heads = [stage.head for stage in stages if stage.head is not None]
    for table, head in zip(tables, heads):
        tie_on_one_rank(table, head)


def build_model(
    config: TransformerConfig,
    seed: int,
    device: torch.device,
    attention_backend: str = "auto",
    moe: MoEConfig = NO_EXPERTS,
    spec: ModuleSpec | TransformerBlockSubmodules | None = None,
) -> CausalLM:
    """The whole model on one process."""
    part = StagePart(tuple(range(config.num_layers)), embedding=True, head=True)
    return build_stages(config, moe, {0: part}, Axes(), seed, device, attention_backend, spec)[0]
