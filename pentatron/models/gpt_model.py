"""The language model under Megatron's name and with its arguments, for builders written by users."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pentatron.errors import UserError
from pentatron.layout.documents import DocumentStarts
from pentatron.layout.stages import StagePart
from pentatron.models.causal_lm import CausalLM, FoldedEnds, folded_ends
from pentatron.nn.init import draw_weights
from pentatron.nn.options import DEFAULT_OPTIONS, ONE_PROCESS, Axes, ModelOptions, axes_of
from pentatron.nn.spec import ModuleSpec, TransformerBlockSubmodules
from pentatron.parallel.shards import held_parameters
from pentatron.parallel.world import World
from pentatron.settings.core import CoreTransformerConfig
from pentatron.settings.model import TransformerConfig
from pentatron.settings.parameters import is_tied
from pentatron.settings.run import RunConfig


@dataclass(frozen=True)
class ProcessGroups:
    """How models of one rank are built: the axes their layers are spread over, what each of its stages holds,
    and how they compute.

    `options`: None leaves them to the run under way, and outside of one to the defaults. `ends`: for a
    program that builds all stages of the rank, one after the other.
    """

    axes: Axes
    stages: tuple[StagePart, ...]
    options: ModelOptions | None = None
    ends: FoldedEnds | None = None


def process_groups(config: RunConfig, world: World) -> ProcessGroups:
    """`pg_collection` of this rank in a configured layout."""
    own = config.placement.stages_of(world.at.pipeline)
    return ProcessGroups(axes_of(world, config.parallel), tuple(config.stages[number] for number in own))


class GPTModel(CausalLM):
    """A stage of the model, or without `pg_collection` all of it, in fp32 with its initial weights.

    What is left out (None) is as the configuration says. `vocab_size` counts padding.
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        share_embeddings_and_output_weights: bool | None = None,
        position_embedding_type: str | None = None,
        rotary_percent: float | None = None,
        rotary_base: float | None = None,
        vp_stage: int | None = None,
        pg_collection: ProcessGroups | None = None,
    ) -> None:
        core = CoreTransformerConfig.of(config)
        words = core.vocab_size if core.vocab_size is not None else vocab_size
        if words > vocab_size:
            raise UserError(
                f"vocab_size={vocab_size} has no room for the {words} words of the configuration; "
                "pass padded_vocab_size"
            )
        given = {
            "position_embedding_type": position_embedding_type,
            "rotary_percent": rotary_percent,
            "rotary_base": rotary_base,
        }
        if share_embeddings_and_output_weights is not None:
            given["untie_embeddings_and_output_weights"] = not share_embeddings_and_output_weights
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        core = dataclasses.replace(
            core,
            vocab_size=words,
            padded_vocab_size=vocab_size,
            max_position_embeddings=max_sequence_length,
            **changes,
        )
        tied = is_tied(core)
        part = _part(core.num_layers, pre_process, post_process, vp_stage, pg_collection, tied)
        groups = pg_collection or ProcessGroups(ONE_PROCESS, (part,))
        options = dataclasses.replace(
            groups.options or DEFAULT_OPTIONS, attention_backend=core.attention_backend
        )
        axes, ends = groups.axes, groups.ends
        super().__init__(core, core.moe, part, axes, options, transformer_layer_spec, ends)
        self.config = core
        self.split_sequences = axes.context.size > 1
        draw_weights(held_parameters(self), core.seed, core.init_method_std)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        received_BSD: Tensor | None = None,
    ) -> Tensor:
        """The loss of every token with labels, logits without; of a stage without head, the stream for the next one.

        Attention is causal; a mask (True: hidden) may say so, or that tokens see their own document of a sequence alone, but looking
        at it takes time: without documents None is better.
        """
        documents = None if attention_mask is None else self.documents_of(attention_mask, input_ids)
        return super().forward(input_ids, position_ids, labels, received_BSD, documents=documents)

    def documents_of(self, attention_mask: Tensor, input_ids: Tensor) -> DocumentStarts | None:
        """The documents that a mask tells of, if it is causal otherwise."""
        documents = _documents_of(attention_mask, *input_ids.shape)
        if documents is not None and self.split_sequences:
            raise UserError(
                "with context parallelism attention_mask tells the documents of a part of each sequence; pass None, and the "
                "places where documents begin as CausalLM.forward(..., documents=...)"
            )
        return documents


def _part(
    layers: int,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    groups: ProcessGroups | None,
    tied: bool,
) -> StagePart:
    if groups is None:
        if not (pre_process and post_process) or vp_stage is not None:
            raise UserError(
                "without pg_collection a model is whole; leave pre_process and post_process True and vp_stage out, or pass "
                "pg_collection=process_groups(config, world)"
            )
        return StagePart(tuple(range(layers)), embedding=True, head=True)
    if not 0 <= (vp_stage or 0) < len(groups.stages):
        raise UserError(f"vp_stage={vp_stage}: this rank has {len(groups.stages)} stages, counted from 0")
    if tied and groups.ends is None and folded_ends(groups.stages):
        raise UserError(
            "in a folded pipeline a tied embedding is one parameter of two stages, which GPTModel cannot make one by "
            "one; untie it (share_embeddings_and_output_weights=False), or use build_stages"
        )
    part = groups.stages[vp_stage or 0]
    if (part.embedding, part.head) != (pre_process, post_process):
        raise UserError(
            f"pre_process={pre_process}, post_process={post_process} do not fit this stage: in the layout it has "
            f"{'the' if part.embedding else 'no'} embedding and {'the' if part.head else 'no'} head"
        )
    return part


def _documents_of(mask: Tensor, batch: int, length: int) -> DocumentStarts | None:
    """Where documents begin so that a causal mask hides all before one's own; None where there is but one in each sequence."""
    if mask.shape[-2:] != (length, length) or mask.numel() not in (length**2, batch * length**2):
        raise _other_mask()
    hidden = mask.bool().reshape(-1, length, length)
    place = torch.arange(length, device=mask.device)
    first = (~hidden).int().argmax(-1)
    begins = first == place
    # The last place up to here at which a document begins.
    own = torch.where(begins, place, 0).cummax(-1).values
    if not torch.equal(hidden, (place > place[:, None]) | (place < own[:, :, None])):
        raise _other_mask()
    starts = tuple(tuple(row.nonzero().flatten().tolist()) for row in begins.cpu())
    if all(len(row) == 1 for row in starts):
        return None
    return starts if len(starts) == batch else starts * batch


def _other_mask() -> UserError:
    return UserError(
        "attention_mask is neither the causal one (True above the diagonal) nor one that also hides all documents before one's "
        "own; other masks are not available, pass None"
    )
