"""`GPTModel` and module specs, which take process groups, stage and dropout keys from the run."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from pentatron.data.loader import Batch
from pentatron.errors import UserError
from pentatron.layout.documents import DocumentStarts
from pentatron.layout.stages import StagePart
from pentatron.megatron.config import TransformerConfig, core_of
from pentatron.megatron.state import ProcessGroups, current_run, is_running
from pentatron.models import layer_specs
from pentatron.models.causal_lm import CausalLM, shared_embedding_of
from pentatron.nn import spec
from pentatron.nn.init import draw_weights
from pentatron.nn.options import DEFAULT_OPTIONS, ONE_PROCESS
from pentatron.nn.spec import ModuleSpec, Slot, TransformerBlockSubmodules
from pentatron.parallel.sharding import sharded_parameters
from pentatron.settings.core_config import CoreTransformerConfig
from pentatron.settings.model import TransformerConfig as PentatronConfig
from pentatron.settings.model_sizes import is_tied
from pentatron.train.model import StageInputs

_OTHER_MASK = (
    "attention_mask is neither the causal one (True above the diagonal) nor one that also hides all documents before a token's "
    "own; other masks are not available, pass None"
)


class GPTModel(CausalLM):
    """A stage of the model, in fp32 with initial weights: the one that the run builds, or that of `vp_stage`
    in `pg_collection`; outside a run, without `pg_collection`, the whole model.

    Arguments that are None come from the configuration. `vocab_size` includes padding.
    """

    def __init__(
        self,
        config: TransformerConfig | PentatronConfig,
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
        *,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        scatter_embedding_sequence_parallel: bool = True,
        rope_scaling: bool | None = None,
        rope_scaling_factor: float | None = None,
        seq_len_interpolation_factor: float | None = None,
        mtp_block_spec: Any = None,
    ) -> None:
        core = core_of(config)
        _refuse_others(
            fp16_lm_cross_entropy=(fp16_lm_cross_entropy, False),
            parallel_output=(parallel_output, True),
            scatter_embedding_sequence_parallel=(scatter_embedding_sequence_parallel, True),
            mtp_block_spec=(mtp_block_spec, None),
        )
        _check_rope_scaling(core, rope_scaling, rope_scaling_factor, seq_len_interpolation_factor)
        groups = pg_collection
        if is_running():
            run = current_run()
            if groups is None:
                groups, vp_stage = run.groups, run.virtual_rank if vp_stage is None else vp_stage
            elif groups.options is None:
                groups = dataclasses.replace(groups, options=run.groups.options)
        words = core.vocab_size if core.vocab_size is not None else vocab_size
        if words > vocab_size:
            raise UserError(
                f"vocab_size={vocab_size} is smaller than the vocabulary of {words} in the configuration; "
                "pass padded_vocab_size"
            )
        shares = share_embeddings_and_output_weights
        changes: dict[str, Any] = {
            "vocab_size": words,
            "padded_vocab_size": vocab_size,
            "max_position_embeddings": max_sequence_length,
            "position_embedding_type": position_embedding_type,
            "rotary_percent": rotary_percent,
            "rotary_base": rotary_base,
            "untie_embeddings_and_output_weights": None if shares is None else not shares,
        }
        given = {name: value for name, value in changes.items() if value is not None}
        core = dataclasses.replace(core, **given)
        part = _part(core, pre_process, post_process, vp_stage, groups)
        groups = groups or ProcessGroups(ONE_PROCESS, (part,))
        options = groups.options or DEFAULT_OPTIONS
        options = dataclasses.replace(options, attention_backend=core.attention_backend)
        tied = groups.shared_embedding
        super().__init__(core, core.moe, part, groups.axes, options, transformer_layer_spec, tied)
        self.config = core
        self.split_sequences = groups.axes.context.size > 1
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        # The call of the program that the next forward belongs to.
        self.pending_call: StageInputs | None = None
        self._input: Tensor | None = None
        self._checked_positions = False
        draw_weights(sharded_parameters(self), core.seed, core.init_method_std)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """Sets the hidden states of the previous stage, for programs that run a stage outside `pretrain`."""
        self._input = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Returns the loss of every token with labels and logits without; a stage without head returns hidden
        states.

        Inside a run, arguments that are None come from the micro-batch. Attention is causal. A mask (True:
        hidden) must be the causal one, optionally restricted to documents. Checking it takes time, so without
        documents None is better.
        """
        _refuse_others(decoder_input=(decoder_input, None), **{name: (others[name], None) for name in others})
        received, keys, documents = self._input, None, None
        if (call := self.pending_call) is not None:
            input_ids = call.batch.tokens if input_ids is None else input_ids
            position_ids = call.batch.position_ids if position_ids is None else position_ids
            self._check(call.batch, input_ids, position_ids)
            received, keys, documents = call.received, call.keys, call.batch.documents
        if input_ids is None or position_ids is None:
            raise UserError("GPTModel: outside a run input_ids and position_ids are needed; give both")
        if attention_mask is not None and documents is None:
            documents = _documents_of(attention_mask, *input_ids.shape)
            if documents is not None and self.split_sequences:
                raise UserError(
                    "with context parallelism attention_mask covers only a part of each sequence; pass None, and the "
                    "document starts as CausalLM.forward(..., documents=...)"
                )
        output = super().forward(input_ids, position_ids, labels, received, keys, documents=documents)
        return self._without_padding(output, labels)

    def _without_padding(self, output: Tensor, labels: Tensor | None) -> Tensor:
        """Masks logits of the vocabulary's padding; returns losses and hidden states unchanged."""
        if labels is not None or not self.post_process:
            return output
        width = output.shape[-1]
        words = self.vocab_size - self.axis.rank * width
        if words >= width:
            return output
        # Finite, not -inf: a probability of 0 times its logarithm is 0 then, not NaN.
        low = torch.finfo(output.dtype).min / 2
        return output.masked_fill(torch.arange(width, device=output.device) >= words, low)

    def _check(self, batch: Batch, tokens: Tensor, positions: Tensor) -> None:
        if tokens.shape != batch.tokens.shape:
            raise UserError(
                f"forward_step gives the model tokens of shape {tuple(tokens.shape)}, but this rank computes {tuple(batch.tokens.shape)}; "
                "pass those of data_iterator (with context parallelism they are this rank's part of each sequence)"
            )
        if self.split_sequences and not self._checked_positions:
            # Once per model: the comparison synchronizes host and device.
            self._checked_positions = True
            if not torch.equal(positions, batch.position_ids):
                raise UserError(
                    "with context parallelism a rank has part of each sequence, and position_ids count in the whole of it; pass "
                    "those of data_iterator"
                )


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
    if is_tied(config) and groups.shared_embedding is None and shared_embedding_of(groups.stages):
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
        raise UserError(_OTHER_MASK)
    hidden = mask.bool().reshape(-1, length, length)
    index = torch.arange(length, device=mask.device)
    first = (~hidden).int().argmax(-1)
    begins = first == index
    # The last document start up to each position.
    start = torch.where(begins, index, 0).cummax(-1).values
    if not torch.equal(hidden, (index > index[:, None]) | (index < start[:, :, None])):
        raise UserError(_OTHER_MASK)
    starts = tuple(tuple(row.nonzero().flatten().tolist()) for row in begins.cpu())
    if all(len(row) == 1 for row in starts):
        return None
    return starts if len(starts) == batch else starts * batch


def _check_rope_scaling(
    core: CoreTransformerConfig, scales: bool | None, factor: float | None, interpolation: float | None
) -> None:
    """Raises unless the flags of the run ask for the same scaling."""
    kind, of_run = core.rope_scaling_type, core.rope_scaling_factor
    if scales and kind != "llama3":
        raise UserError("rope_scaling=True: set the scaling of rotary positions with --use-rope-scaling")
    if scales and factor not in (None, of_run):
        raise UserError(f"rope_scaling_factor={factor}: set the factor with --rope-scaling-factor")
    if interpolation not in (None, of_run if kind == "linear" else None):
        raise UserError(
            f"seq_len_interpolation_factor={interpolation}: set the factor with --rotary-seq-len-interpolation-factor"
        )


def _refuse_others(**given: tuple[Any, Any]) -> None:
    """Raises unless each argument, given as (value, allowed value), has its allowed value."""
    for name, (value, allowed) in given.items():
        if value is not allowed and value != allowed:
            raise UserError(f"GPTModel: {name}={value!r} is not available; leave it out")


def build_module(slot: Slot, *args: Any, **kwargs: Any) -> Any:
    """Builds the module of a spec or class, spread over the ranks of the run if there is one.

    Configurations among the arguments may be Megatron's.
    """
    if is_running() and spec.takes(slot, "axes"):
        kwargs.setdefault("axes", current_run().groups.axes)
    named = {name: _converted(value) for name, value in kwargs.items()}
    return spec.build_module(slot, *map(_converted, args), **named)


def _converted(value: Any) -> Any:
    return core_of(value) if isinstance(value, TransformerConfig) else value


def get_gpt_decoder_block_spec(
    config: TransformerConfig | PentatronConfig,
    use_transformer_engine: bool,
    normalization: str | None = None,
    qk_l2_norm: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """Returns the specs of all layers, dense and with experts; each stage builds the layers it holds."""
    return layer_specs.get_gpt_decoder_block_spec(
        core_of(config), use_transformer_engine, normalization, qk_l2_norm, vp_stage
    )
