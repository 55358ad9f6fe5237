"""Text from a model: of a run under way, or from the newest checkpoint of a run folder."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from pentatron.checkpoint.load import load_fragments
from pentatron.checkpoint.store import CheckpointStore
from pentatron.config.errors import UserError
from pentatron.config.model import MoEConfig, TransformerConfig
from pentatron.config.training import DataConfig
from pentatron.data.tokenizer import FileTokenizer, Tokenizer
from pentatron.models.causal_lm import CausalLM, build_model
from pentatron.models.generate import generate
from pentatron.parallel.pieces import Fragment, fragments_of, held_parameters
from pentatron.train.datasets import configured_tokenizer
from pentatron.train.router_loads import kept_by_routers, loads_of


def continuation(
    model: CausalLM,
    tokenizer: Tokenizer,
    prompt: str,
    context: int,
    max_tokens: int,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> Iterator[str]:
    """What follows the prompt, in pieces, as they are made."""
    ids = tokenizer.encode(prompt) or [tokenizer.eod]
    made: list[int] = []
    shown = 0
    for token in generate(model, ids, max_tokens, context, temperature, top_k, seed, stop=tokenizer.eod):
        made.append(token)
        text = tokenizer.decode(made)
        # A character may need several tokens; until it is whole it decodes to a replacement mark.
        if not text.endswith("�"):
            yield text[shown:]
            shown = len(text)


def open_continuation(
    folder: Path, prompt: str, max_tokens: int, temperature: float = 0.8, top_k: int = 40, seed: int = 0
) -> Iterator[str]:
    """Loads the newest checkpoint, or says why it cannot; the text then comes as it is made."""
    inside = folder / "checkpoints"
    store = CheckpointStore(inside if inside.is_dir() else folder, keep=None)
    found, complaints = store.newest_valid(verify=True, set_aside=False)
    if found is None:
        reason = complaints[0] if complaints else "none was saved yet"
        raise UserError(
            f"{store.folder} holds no usable checkpoint ({reason}); train first, or name the folder given to --save"
        )
    config = TransformerConfig(**_tuples(found.manifest.config["model"]))
    tokenizer = _tokenizer(folder, found.manifest.config)
    moe = MoEConfig(**_tuples(found.manifest.config["moe"]))
    model = build_model(config, seed=0, device=torch.device("cpu"), moe=moe).eval()
    load_fragments(found.folder, found.manifest, weight_fragments(model))
    load_fragments(found.folder, found.manifest, kept_by_routers(loads_of(model)))
    return continuation(model, tokenizer, prompt, config.seq_length, max_tokens, temperature, top_k, seed)


def weight_fragments(model: CausalLM) -> Iterator[Fragment]:
    """The weights of a model that has no optimizer, under the names checkpoints give them."""
    for held in held_parameters(model):
        for _, fragment in fragments_of(held, held.parameter.data.view(-1)):
            yield replace(fragment, tensor=f"weights/{fragment.tensor}")


def _tuples(section: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in section.items()}


def _tokenizer(folder: Path, config: dict[str, Any]) -> Tokenizer:
    for run_folder in (folder, Path(config["run"]["run_dir"])):
        if (prepared := run_folder / "data" / "tokenizer.json").exists():
            return FileTokenizer(prepared)
    tokenizer = configured_tokenizer(DataConfig(**_tuples(config["data"])), config["model"]["vocab_size"])
    if tokenizer is None:
        raise UserError(
            f"the run in {folder} was trained without a tokenizer, so there is no text to continue"
        )
    return tokenizer
