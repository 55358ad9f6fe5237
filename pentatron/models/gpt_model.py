"""`GPTModel`: the language model with Megatron's name and arguments, for builders written by users."""

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
from pentatron.parallel.sharding import sharded_parameters
from pentatron.parallel.world import World
from pentatron.settings.core_config import CoreTransformerConfig
from pentatron.settings.model import TransformerConfig
from pentatron.settings.parameters import is_tied
from pentatron.settings.run_config import RunConfig


@dataclass(frozen=True)
class ProcessGroups:
    """How the models of one rank are built: the parallel axes, the contents of each of its stages, and their
    options.

    `options` None takes those of the run, or the defaults outside of a run. `ends`: for a program that builds
    all stages of the rank in order.
    """

    axes: Axes
    stages: tuple[StagePart, ...]
    options: ModelOptions | None = None
    ends: FoldedEnds | None = None


def process_groups(config: RunConfig, world: World) -> ProcessGroups:
    """Returns the `pg_collection` of this rank in a configured layout."""
    numbers = config.placement.stages_of(world.at.pipeline)
    return ProcessGroups(axes_of(world, config.parallel), tuple(config.stages[number] for number in numbers))


class GPTModel(CausalLM):
    """A stage of the model, or without `pg_collection` the whole model, in fp32 with initial weights.

    Arguments that are None come from the configuration. `vocab_size` includes padding.
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
        overrides = {
            "position_embedding_type": position_embedding_type,
            "rotary_percent": rotary_percent,
            "rotary_base": rotary_base,
        }
        if share_embeddings_and_output_weights is not None:
            overrides["untie_embeddings_and_output_weights"] = not share_embeddings_and_output_weights
        changes: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
        core = dataclasses.replace(
            core,
            vocab_size=words,
            padded_vocab_size=vocab_size,
            max_position_embeddings=max_sequence_length,
            **changes,
        )
        part = _part(core, pre_process, post_process, vp_stage, pg_collection)
        groups = pg_collection or ProcessGroups(ONE_PROCESS, (part,))
        options, backend = groups.options or DEFAULT_OPTIONS, core.attention_backend
        options = dataclasses.replace(options, attention_backend=backend)
        super().__init__(core, core.moe, part, groups.axes, options, transformer_layer_spec, groups.ends)
        self.config = core
        self.split_sequences = groups.axes.context.size > 1
        draw_weights(sharded_parameters(self), core.seed, core.init_method_std)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        received_BSD: Tensor | None = None,
    ) -> Tensor:
        """Returns the loss of every token with labels and logits without; a stage without head returns hidden
        states.

        Attention is causal. A mask (True: hidden) must be the causal one, optionally restricted to documents.
        Checking it takes time, so without documents None is better.
        """
        documents = None if attention_mask is None else self.documents_of(attention_mask, input_ids)
        return super().forward(input_ids, position_ids, labels, received_BSD, documents=documents)

    def documents_of(self, attention_mask: Tensor, input_ids: Tensor) -> DocumentStarts | None:
        """Returns the documents that a causal mask separates; None for one document per sequence."""
        documents = _documents_of(attention_mask, *input_ids.shape)
        if documents is not None and self.split_sequences:
            raise UserError(
                "with context parallelism attention_mask covers only a part of each sequence; pass None, and the "
                "document starts as CausalLM.forward(..., documents=...)"
            )
        return documents


def _part(
    config: CoreTransformerConfig,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    groups: ProcessGroups | None,
) -> StagePart:
    if groups is None:
        if not (pre_process and post_process) or vp_stage is not None:
            raise UserError(
                "without pg_collection a model is whole; leave pre_process and post_process True and vp_stage out, or pass "
                "pg_collection=process_groups(config, world)"
            )
        return StagePart(tuple(range(config.num_layers)), embedding=True, head=True)
    if not 0 <= (vp_stage or 0) < len(groups.stages):
        raise UserError(f"vp_stage={vp_stage}: this rank has {len(groups.stages)} stages, counted from 0")
    if is_tied(config) and groups.ends is None and folded_ends(groups.stages):
        raise UserError(
            "in a folded pipeline a tied embedding is one parameter of two stages, which GPTModel cannot build one by "
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
    """Returns the document starts of a causal mask; None for one document per sequence."""
    if mask.shape[-2:] != (length, length) or mask.numel() not in (length**2, batch * length**2):
        raise _other_mask()
    hidden = mask.bool().reshape(-1, length, length)
    index = torch.arange(length, device=mask.device)
    first = (~hidden).int().argmax(-1)
    begins = first == index
    # The last document start up to each position.
    start = torch.where(begins, index, 0).cummax(-1).values
    if not torch.equal(hidden, (index > index[:, None]) | (index < start[:, :, None])):
        raise _other_mask()
    starts = tuple(tuple(row.nonzero().flatten().tolist()) for row in begins.cpu())
    if all(len(row) == 1 for row in starts):
        return None
    return starts if len(starts) == batch else starts * batch


def _other_mask() -> UserError:
    return UserError(
        "attention_mask is neither the causal one (True above the diagonal) nor one that also hides all documents before a token's "
        "own; other masks are not available, pass None"
    )
