"""Compares the logits of a Hugging Face folder and a checkpoint, to verify that they are the same model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pentatron.checkpoint.find import saved_architecture
from pentatron.checkpoint.load import WEIGHTS, StepReader
from pentatron.checkpoint.store import Checkpoint
from pentatron.errors import UserError
from pentatron.models.causal_lm import CausalLM, build_model
from pentatron.parallel.sharding import fragments_of, sharded_parameters

_CPU = torch.device("cpu")
_SEQUENCES, _TOKENS = 2, 32
# Relative tolerance: both models compute in fp32, but in another order.
_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Comparison:
    """The largest absolute difference of the logits, and the largest absolute logit."""

    difference: float
    largest: float

    def sentence(self) -> str:
        most = f"at most {self.difference:.2e} (the largest is {self.largest:.2f})"
        tokens = f"{_SEQUENCES} × {_TOKENS} random tokens"
        return f"the logits of {tokens} differ from those of transformers by {most}"


def require_transformers() -> Any:
    """Imports transformers; raises a UserError if it is not installed."""
    try:
        import transformers
    except ImportError:
        raise UserError(
            "--verify compares with the transformers library, which is missing: pip install transformers, or leave it out"
        ) from None
    return transformers


def compare_logits(checkpoint: Checkpoint, folder: Path, rounded: torch.dtype | None = None) -> Comparison:
    """Raises if the models differ.

    `rounded`: the dtype that the weights of one were rounded to, applied to both.
    """
    model, _ = saved_architecture(checkpoint)
    length = min(_TOKENS, model.max_position_embeddings)
    generator = torch.Generator().manual_seed(1)
    tokens_BS = torch.randint(0, model.vocab_size, (_SEQUENCES, length), generator=generator)
    with torch.no_grad():
        # One after the other, so that only one model is in memory.
        expected = _reference_model(folder, rounded)(tokens_BS).logits
        positions_BS = torch.arange(length).expand(_SEQUENCES, length)
        logits = _checkpoint_model(checkpoint, rounded)(tokens_BS, positions_BS)[..., : model.vocab_size]
    result = Comparison(float((logits - expected).abs().max()), float(expected.abs().max()))
    if not result.difference <= _TOLERANCE * result.largest:
        why = "so the conversion is wrong and its output was removed; please report this"
        raise UserError(f"{result.sentence()}, {why}")
    return result


def _reference_model(folder: Path, rounded: torch.dtype | None) -> Any:
    model = require_transformers().AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    for parameter in model.parameters():
        # Not the buffers: they are computed, not stored, in both models.
        parameter.data = (parameter.data if rounded is None else parameter.data.to(rounded)).float()
    return model.float().eval()


def _checkpoint_model(checkpoint: Checkpoint, rounded: torch.dtype | None) -> CausalLM:
    config, moe = saved_architecture(checkpoint)
    model = build_model(config, seed=0, device=_CPU, moe=moe).eval()
    with StepReader(checkpoint.folder, checkpoint.manifest) as step:
        for param in sharded_parameters(model):
            for _, fragment in fragments_of(param, param.parameter.data.view(-1)):
                size = tuple(fragment.values.shape)
                values = step.read(f"{WEIGHTS}{fragment.tensor}", fragment.start, size)
                fragment.values.copy_(values if rounded is None else values.to(rounded))
    return model
