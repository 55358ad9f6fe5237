"""Text from the newest checkpoint of a run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pentatron.checkpoint.load import load_into
from pentatron.checkpoint.store import CheckpointStore
from pentatron.config.errors import UserError
from pentatron.config.model import TransformerConfig
from pentatron.config.training import DataConfig
from pentatron.data.tokenizer import FileTokenizer, Tokenizer
from pentatron.models.causal_lm import build_model
from pentatron.models.generate import generate
from pentatron.train.datasets import configured_tokenizer


def open_continuation(
    folder: Path, prompt: str, max_tokens: int, temperature: float, top_k: int, seed: int
) -> Iterator[str]:
    """Loads the model, or says why it cannot; the text then comes as it is made."""
    found, complaints = CheckpointStore(folder / "checkpoints", keep=None).newest_valid(verify=True)
    if found is None:
        reason = complaints[0] if complaints else "none was saved yet"
        raise UserError(
            f"{folder} holds no usable checkpoint ({reason}); train first: pentatron train --run-dir {folder}"
        )
    config = TransformerConfig(**found.manifest.config["model"])
    tokenizer = _tokenizer(folder, found.manifest.config)
    model = build_model(config, seed=0, device=torch.device("cpu"))
    load_into(found.folder, found.manifest, {f"weights/{n}": p.data for n, p in model.named_parameters()})
    model.eval()
    ids = tokenizer.encode(prompt) or [tokenizer.eod]
    tokens = generate(model, ids, max_tokens, config.seq_length, temperature, top_k, seed, stop=tokenizer.eod)
    return _decoded(tokens, tokenizer)


def _decoded(tokens: Iterator[int], tokenizer: Tokenizer) -> Iterator[str]:
    made: list[int] = []
    shown = 0
    for token in tokens:
        made.append(token)
        text = tokenizer.decode(made)
        # A character may need several tokens; until it is whole it decodes to a replacement mark.
        if not text.endswith("�"):
            yield text[shown:]
            shown = len(text)


def _tokenizer(folder: Path, config: dict[str, Any]) -> Tokenizer:
    prepared = folder / "data" / "tokenizer.json"
    if prepared.exists():
        return FileTokenizer(prepared)
    data: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in config["data"].items()}
    tokenizer = configured_tokenizer(DataConfig(**data), config["model"]["vocab_size"])
    if tokenizer is None:
        raise UserError(
            f"the run in {folder} was trained without a tokenizer, so there is no text to continue"
        )
    return tokenizer
