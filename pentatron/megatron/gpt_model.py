"""`GPTModel` and module specs, which take process groups, stage and dropout keys from the run."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from pentatron.data.loader import Batch
from pentatron.errors import UserError
from pentatron.megatron.config import TransformerConfig, core_of
from pentatron.megatron.state import current_run, is_running
from pentatron.models import gpt_model, layer_specs
from pentatron.models.causal_lm import CausalLM
from pentatron.models.gpt_model import ProcessGroups
from pentatron.nn import spec
from pentatron.nn.spec import ModuleSpec, Slot, TransformerBlockSubmodules
from pentatron.settings.model import TransformerConfig as PentatronConfig
from pentatron.train.model import StageInputs


class GPTModel(gpt_model.GPTModel):
    """A model, or the stage of it that the run builds. None takes a value from the configuration."""

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
        if rope_scaling and core.rope_scaling_type != "llama3":
            raise UserError("rope_scaling=True: set the scaling of rotary positions with --use-rope-scaling")
        if rope_scaling and rope_scaling_factor not in (None, core.rope_scaling_factor):
            raise UserError(
                f"rope_scaling_factor={rope_scaling_factor}: set the factor with --rope-scaling-factor"
            )
        interpolation = core.rope_scaling_factor if core.rope_scaling_type == "linear" else None
        if seq_len_interpolation_factor not in (None, interpolation):
            raise UserError(
                f"seq_len_interpolation_factor={seq_len_interpolation_factor}: set the factor with "
                "--rotary-seq-len-interpolation-factor"
            )
        if pg_collection is None and is_running():
            run = current_run()
            pg_collection = run.groups
            vp_stage = run.virtual_rank if vp_stage is None else vp_stage
        elif pg_collection is not None and pg_collection.options is None and is_running():
            pg_collection = dataclasses.replace(pg_collection, options=current_run().groups.options)
        super().__init__(
            core,
            transformer_layer_spec,
            vocab_size,
            max_sequence_length,
            pre_process,
            post_process,
            share_embeddings_and_output_weights,
            position_embedding_type,
            rotary_percent,
            rotary_base,
            vp_stage,
            pg_collection,
        )
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        # The call of the program that the next forward belongs to.
        self.pending_call: StageInputs | None = None
        self._input: Tensor | None = None
        self._checked_positions = False

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

        Inside a run, arguments that are None come from the micro-batch.
        """
        _refuse_others(decoder_input=(decoder_input, None), **{name: (others[name], None) for name in others})
        call = self.pending_call
        if call is None:
            if input_ids is None or position_ids is None:
                raise UserError("GPTModel: outside a run input_ids and position_ids are needed; give both")
            output = super().forward(input_ids, position_ids, attention_mask, labels, self._input)
            return self._without_padding(output, labels)
        batch = call.batch
        tokens = batch.tokens if input_ids is None else input_ids
        positions = batch.position_ids if position_ids is None else position_ids
        self._check(batch, tokens, positions)
        documents = batch.documents
        if attention_mask is not None and documents is None:
            documents = self.documents_of(attention_mask, tokens)
        # Not `super()`, which takes documents as a mask.
        output = CausalLM.forward(
            self, tokens, positions, labels, call.received, call.keys, documents=documents
        )
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


def _refuse_others(**given: tuple[Any, Any]) -> None:
    """Raises unless each argument, given as (value, allowed value), has its allowed value."""
    for name, (value, allowed) in given.items():
        if value is not allowed and value != allowed:
            raise UserError(f"GPTModel: {name}={value!r} is not available; leave it out")


def build_module(slot: Slot, *args: Any, **kwargs: Any) -> Any:
    """Builds the module of a spec or class, spread over the ranks of the run if there is one.

    Configurations among the arguments may be Megatron's.
    """
    if is_running() and spec.takes(slot, object, "axes"):
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
