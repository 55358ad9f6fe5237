"""The language model inside a run: it finds its stage, what the stage before made, and the keys of dropout by itself."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from pentatron.errors import UserError
from pentatron.megatron.core.transformer.transformer_config import TransformerConfig, core_of
from pentatron.megatron.state import current, is_running
from pentatron.models import gpt_model
from pentatron.models.causal_lm import CausalLM
from pentatron.models.gpt_model import ProcessGroups
from pentatron.nn.spec import ModuleSpec, TransformerBlockSubmodules
from pentatron.settings.model import TransformerConfig as OwnConfig
from pentatron.train.model import StageCall


class GPTModel(gpt_model.GPTModel):
    """What is left out (None) is as the configuration says; the stage is that which the run builds."""

    def __init__(
        self,
        config: TransformerConfig | OwnConfig,
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
            raise UserError("rope_scaling=True: how positions are stretched is said by --use-rope-scaling")
        if rope_scaling and rope_scaling_factor not in (None, core.rope_scaling_factor):
            raise UserError(
                f"rope_scaling_factor={rope_scaling_factor}: how far positions are stretched is said by --rope-scaling-factor"
            )
        stretched = core.rope_scaling_factor if core.rope_scaling_type == "linear" else None
        if seq_len_interpolation_factor is not None and seq_len_interpolation_factor != stretched:
            raise UserError(
                f"seq_len_interpolation_factor={seq_len_interpolation_factor}: how positions are stretched is said by "
                "--rotary-seq-len-interpolation-factor"
            )
        if pg_collection is None and is_running():
            run = current()
            pg_collection = run.groups
            vp_stage = run.virtual_rank if vp_stage is None else vp_stage
        elif pg_collection is not None and pg_collection.options is None and is_running():
            pg_collection = dataclasses.replace(pg_collection, options=current().groups.options)
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
        self._call: StageCall | None = None
        self._input: Tensor | None = None
        self._checked_positions = False

    def receive(self, call: StageCall | None) -> None:
        """What the next forward is about; None after it."""
        self._call = call

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor] | None) -> None:
        """What the stage before made, for who runs a stage outside `pretrain`."""
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
        """The loss of every token with labels, logits without; of a stage without head, the stream for the next one.

        A stage that needs no tokens may be given None for all of them.
        """
        _refuse_others(
            **{name: (value, None) for name, value in {"decoder_input": decoder_input, **others}.items()}
        )
        if self._call is None:
            if input_ids is None or position_ids is None:
                raise UserError("GPTModel: outside a run input_ids and position_ids are needed; give both")
            return self._without_padding(
                super().forward(input_ids, position_ids, attention_mask, labels, self._input), labels
            )
        batch = self._call.batch
        tokens = batch.tokens if input_ids is None else input_ids
        positions = batch.position_ids if position_ids is None else position_ids
        self._check(tokens, positions)
        documents = batch.documents
        if attention_mask is not None and documents is None:
            documents = self.documents_of(attention_mask, tokens)
        made = CausalLM.forward(
            self, tokens, positions, labels, self._call.received, self._call.keys, documents=documents
        )
        return self._without_padding(made, labels)

    def _without_padding(self, made: Tensor, labels: Tensor | None) -> Tensor:
        """Logits with those of the vocabulary's padding so low that a softmax gives them nothing; anything else as it is."""
        if labels is not None or not self.post_process:
            return made
        width = made.shape[-1]
        words = self.vocab_size - self.axis.group.rank * width
        if words >= width:
            return made
        # Finite: a probability of zero times its logarithm is then zero, and not NaN.
        low = torch.finfo(made.dtype).min / 2
        return made.masked_fill(torch.arange(width, device=made.device) >= words, low)

    def _check(self, tokens: Tensor, positions: Tensor) -> None:
        assert self._call is not None
        expected = self._call.batch.tokens.shape
        if tokens.shape != expected:
            raise UserError(
                f"forward_step gives the model tokens of shape {tuple(tokens.shape)}, but this rank computes {tuple(expected)}; "
                "give it what data_iterator has (with context parallelism that is this rank's part of each sequence)"
            )
        if self.split_sequences and not self._checked_positions:
            # Once: comparing numbers makes a GPU wait.
            self._checked_positions = True
            if not torch.equal(positions, self._call.batch.position_ids):
                raise UserError(
                    "with context parallelism a rank has part of each sequence, and position_ids count in the whole of it; give "
                    "the model those of data_iterator"
                )


def _refuse_others(**given: tuple[Any, Any]) -> None:
    """Arguments that have but one value here."""
    for name, (value, only) in given.items():
        if value is not only and value != only:
            raise UserError(f"GPTModel: {name}={value!r} is not available; leave it out")
