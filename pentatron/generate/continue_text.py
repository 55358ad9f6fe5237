"""Text generation with the model of a run, a checkpoint or a Hugging Face folder."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pentatron.data.tokenizer import Tokenizer
from pentatron.errors import ConfigError, UserError
from pentatron.generate.generate import End, GenerationModel, Sampling, build_generation_model, generate
from pentatron.generate.source import ModelSource, find_weights, open_source
from pentatron.models.causal_lm import CausalLM, build_stages
from pentatron.nn.options import axes_of
from pentatron.parallel.world import World, single_process
from pentatron.settings.rules import problems_of
from pentatron.settings.run_config import RunConfig
from pentatron.settings.settings import ProcessFacts, Settings

REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Ranks:
    """Number of ranks that share the model, per axis."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline


def generation_config(source: ModelSource, ranks: Ranks) -> RunConfig:
    """Returns the configuration of the model in this layout; raises if it cannot be split so."""
    sections = (source.model, source.moe)
    model = {field.name: getattr(part, field.name) for part in sections for field in dataclasses.fields(part)}
    if ranks.tensor % ranks.expert:
        raise UserError(
            f"--expert-model-parallel-size {ranks.expert} must divide --tensor-model-parallel-size {ranks.tensor}: experts are "
            f"divided over the tensor ranks of a stage"
        )
    experts = source.moe.num_experts is not None
    values: dict[str, Any] = {
        **model,
        "tensor_model_parallel_size": ranks.tensor,
        "pipeline_model_parallel_size": ranks.pipeline,
        "expert_model_parallel_size": ranks.expert,
        "expert_tensor_parallel_size": ranks.tensor // ranks.expert if experts else None,
        "data_parallel_size": 1,
        "padded_vocab_size": math.ceil(source.model.vocab_size / ranks.tensor) * ranks.tensor,
        "micro_batch_size": 1,
        "global_batch_size": 1,
        "seq_length": source.model.max_position_embeddings,
        "train_iters": 1,
        "mock_data": True,
        # A single token cannot be split over ranks, and without training every rank routes all tokens of the
        # batch without a capacity.
        "sequence_parallel": False,
        "moe_expert_capacity_factor": None,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    settings = Settings.defaults(**values)
    settings.facts = ProcessFacts(ranks.world_size, ranks.world_size)
    # The rules for training require sequence parallelism with experts on several tensor ranks, and a
    # divisible length.
    trained = {"sequence_parallel": True, "seq_length": ranks.tensor} if experts and ranks.tensor > 1 else {}
    if problems := problems_of(settings.changed(**trained)):
        raise ConfigError(problems)
    return RunConfig.of(settings)


def load_stages(
    source: ModelSource, config: RunConfig, world: World, dtype: torch.dtype
) -> dict[int, CausalLM]:
    """Builds this rank's stages and loads their weights."""
    parts = {n: config.stages[n] for n in config.placement.stages_of(world.at.pipeline)}
    axes, cpu = axes_of(world, config.parallel), torch.device("cpu")
    # Uninitialized memory: each parameter is replaced when it is loaded.
    stages = build_stages(config.model, config.moe, parts, axes, None, cpu)
    source.fill(stages.values(), dtype, world.device)
    for stage in stages.values():
        stage.eval()
    return stages


@dataclass
class Text:
    """A prompt and its continuation so far."""

    prompt: Sequence[int]
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    end: End | None = None

    def decoded(self, tokenizer: Tokenizer) -> str:
        """Decodes the continuation after the prompt, because a token may decode differently at the start of a
        text.
        """
        before, whole = tokenizer.decode(self.prompt), tokenizer.decode([*self.prompt, *self.tokens])
        return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(self.tokens)


def generate_texts(
    model: GenerationModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    stop: frozenset[int],
    at_once: int,
) -> Iterator[tuple[int, Text]]:
    """Continues the prompts in batches of `at_once`; yields the index and the text after every token."""
    texts = [Text(prompt) for prompt in prompts]
    for first in range(0, len(prompts), at_once):
        group = prompts[first : first + at_once]
        for made in generate(model, group, max_new_tokens, sampling, stop, first):
            text = texts[made.number]
            if made.choice is not None:
                text.tokens.append(made.choice.token)
                text.logprobs.append(made.choice.logprob)
            text.end = made.end
            yield made.number, text


@dataclass
class NewText:
    """Yields the new part of a growing text."""

    tokenizer: Tokenizer
    length: int = 0

    def more(self, text: Text) -> str:
        decoded = text.decoded(self.tokenizer)
        # A character may span several tokens; until it is complete it decodes to a replacement character.
        if decoded.endswith(REPLACEMENT) and text.end is None:
            return ""
        fresh, self.length = decoded[self.length :], len(decoded)
        return fresh


def open_continuation(
    folder: Path, prompt: str, max_tokens: int, seed: int = 0, trusted: tuple[str, ...] = ()
) -> Iterator[str]:
    """Loads the newest checkpoint of a run on this process and returns an iterator over the continuation of
    the prompt.

    Raises before the first token if the run cannot be loaded.
    """
    weights, _ = find_weights(str(folder), verify=True)
    source = open_source(weights, trusted)
    tokenizer = source.tokenizer()
    if tokenizer is None:
        raise UserError(f"the run in {folder} was trained without a tokenizer, so it cannot continue text")
    config, world = generation_config(source, Ranks()), single_process()
    model = build_generation_model(load_stages(source, config, world, torch.float32), config.model, world)
    sampling, shown = Sampling(temperature=0.8, top_k=40, seed=seed), NewText(tokenizer)
    prompts, stop = [tokenizer.encode(prompt) or [tokenizer.eod]], frozenset({tokenizer.eod})
    texts = generate_texts(model, prompts, max_tokens, sampling, stop, 1)
    return (shown.more(text) for _, text in texts)
