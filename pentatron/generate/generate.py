"""Text generation token by token, with a model that may be split over tensor and pipeline ranks.

Every rank runs the same loop. For each token the stages run one after the other; one rank with the logits
samples and broadcasts the token to all ranks. Sampling is done on the CPU in fp64, so that a seed gives the
same text on every device and in every layout if their logits agree. Greedy decoding runs where the logits
are, and copies only the token to the host.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pentatron.errors import AgreedError, UserError
from pentatron.layout.actions import Schedule
from pentatron.layout.schedules import forward_schedule, looped_placement
from pentatron.models.causal_lm import CausalLM
from pentatron.nn.attention import supports_kv_cache
from pentatron.nn.kv_cache import ForwardPass, KVCache
from pentatron.parallel.collectives import all_gather_into, broadcast_, gather_objects
from pentatron.parallel.executor import Executor
from pentatron.parallel.messages import open_messages
from pentatron.parallel.world import World
from pentatron.settings.model import TransformerConfig


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Temperature 0 is greedy decoding; `top_k` 0 and `top_p` 1 exclude nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def generator(self, number: int) -> torch.Generator:
        """Generator of the `number`-th prompt.

        Each prompt has its own, so its text does not depend on the rest of the batch.
        """
        return torch.Generator().manual_seed(self.seed + number)


@dataclass(frozen=True)
class Choice:
    """A token, and its log probability under the model at temperature 1 without top-k and top-p."""

    token: int
    logprob: float


def choose_tokens(
    logits_BV: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]
) -> list[Choice | None]:
    """Chooses a token for each row, with the row's generator; None if the row contains NaN or inf.

    Sampling needs logits in host memory.
    """
    # NaN propagates to both the maximum and the minimum.
    greatest_B = logits_BV.amax(1)
    finite_B = greatest_B.isfinite() & logits_BV.amin(1).isfinite()
    if not sampling.greedy:
        rows = zip(logits_BV, generators, finite_B.tolist())
        return [_sampled(row, sampling, each) if fine else None for row, each, fine in rows]
    # In the precision of the logits; fp64 would be slower than a small model. The log probability of the
    # largest logit needs only the sum of exponentials.
    sums_B = (logits_BV - greatest_B[:, None]).exp_().sum(1).double()
    # One copy to the host; fp64 represents any token id exactly.
    columns = torch.stack((logits_BV.argmax(1).double(), -sums_B.log(), finite_B.double())).tolist()
    return [Choice(int(token), logprob) if fine else None for token, logprob, fine in zip(*columns)]


def _sampled(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> Choice:
    logits_V = logits_V.double()
    # Not sorted by probability: for tokens with nearly equal probability, rounding would decide which one a
    # random number selects.
    reached_V = probabilities(logits_V, sampling).cumsum(0)
    drawn = torch.rand(1, dtype=torch.float64, generator=generator) * reached_V[-1]
    token = int(torch.searchsorted(reached_V, drawn, right=True))
    return Choice(token, float(logits_V.log_softmax(0)[token]))


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """Probability of every token after temperature, top-k and top-p."""
    # Shifts the largest logit to 0, so that small temperatures do not overflow.
    scaled_V = (logits_V.double() - logits_V.max()) / sampling.temperature
    if 0 < sampling.top_k < len(scaled_V):
        least = scaled_V.topk(sampling.top_k).values[-1]
        scaled_V = scaled_V.masked_fill(scaled_V < least, -torch.inf)
    probabilities_V = scaled_V.softmax(0)
    if sampling.top_p < 1:
        sorted_V, order_V = probabilities_V.sort(descending=True, stable=True)
        # A token stays if the more likely ones do not reach `top_p` yet, so the first one always does.
        enough_V = sorted_V.cumsum(0) - sorted_V >= sampling.top_p
        enough_V[0] = False
        probabilities_V[order_V[enough_V]] = 0
        probabilities_V /= probabilities_V.sum()
    return probabilities_V


# Why a text ends: a stop token, the requested number of tokens, or the model's maximum number of positions.
End = Literal["stop", "length", "positions"]
# Prompts are read in chunks of so many tokens, which bounds the memory of the prefill.
READ_AT_ONCE = 1024


@dataclass(frozen=True)
class GenerationModel:
    """A model that can generate: this rank's stages, and the schedule of a forward through all ranks."""

    stages: Mapping[int, CausalLM]
    world: World
    executor: Executor
    schedule: Schedule
    settings: TransformerConfig

    @property
    def sampling_rank(self) -> int:
        """The rank that samples: the first one of the last stage."""
        return self.world.all_ranks.size // self.world.grid.pipeline * (self.world.grid.pipeline - 1)


def build_generation_model(
    stages: Mapping[int, CausalLM], settings: TransformerConfig, world: World
) -> GenerationModel:
    """Returns the model for `generate`, with one stage per pipeline rank.

    Every rank must call it: it may create process groups.
    """
    weight = next(next(iter(stages.values())).parameters())
    schedule = forward_schedule(looped_placement(world.grid.pipeline, 1), 1)
    messages = open_messages(world, schedule.placement)
    executor = Executor(messages, world.at.pipeline, weight.dtype, world.device)
    return GenerationModel(stages, world, executor, schedule, settings)


@dataclass(frozen=True)
class GeneratedToken:
    """A new token of the `number`-th text, or its end, or both. A stop token is not part of the text."""

    number: int
    choice: Choice | None
    end: End | None


@torch.no_grad()
def generate(
    model: GenerationModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    stop: Collection[int] = (),
    first_number: int = 0,
) -> Iterator[GeneratedToken]:
    """Continues all prompts as a batch; each text is the same as if generated alone.

    `first_number` is the number of the first prompt.
    """
    positions = model.settings.max_position_embeddings
    check_prompts(prompts, model.settings.vocab_size, positions)
    limits = [min(max_new_tokens, positions - len(prompt)) for prompt in prompts]
    generators = [sampling.generator(first_number + row) for row in range(len(prompts))]
    texts = [list(prompt) for prompt in prompts]
    read = _reader(model, capacity=max(map(sum, zip(map(len, prompts), limits))))
    active = list(range(len(prompts)))
    while active:
        for row, choice in _choices(model, read(texts), active, sampling, generators):
            end: End | None = "stop" if choice.token in stop else None
            if end is None:
                texts[row].append(choice.token)
                if len(texts[row]) == len(prompts[row]) + limits[row]:
                    end = "length" if limits[row] == max_new_tokens else "positions"
            if end is not None:
                active = [other for other in active if other != row]
            yield GeneratedToken(first_number + row, None if end == "stop" else choice, end)


def _reader(model: GenerationModel, capacity: int) -> Callable[[Sequence[Sequence[int]]], Tensor | None]:
    """Returns a function that reads texts and returns this rank's logits of the next tokens, with a KV cache
    if possible.

    Layers with their own attention may not support the cache; then the whole texts are read for every token.
    """
    layers = [layer for stage in model.stages.values() for layer in stage.layers.values()]
    if not all(gather_objects(all(map(supports_kv_cache, layers)), model.world.all_ranks)):
        return lambda texts: _read(model, texts, max(map(len, texts)), None)
    cache = KVCache(capacity)

    def read(texts: Sequence[Sequence[int]]) -> Tensor | None:
        if cache.now.length == 0:
            return _read(model, texts, READ_AT_ONCE, cache)
        # Texts that have ended repeat their last token.
        cache.begin(ForwardPass(tuple(len(text) - 1 for text in texts), 1))
        last = torch.tensor([[text[-1]] for text in texts])
        return _forward(model, cache.now, last, [0] * len(texts), cache)

    return read


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int, positions: int) -> None:
    """Raises unless every prompt has tokens, all in the vocabulary, and leaves room for one more."""
    for number, prompt in enumerate(prompts):
        name = f"prompt {number + 1}" if len(prompts) > 1 else "the prompt"
        if not prompt:
            raise UserError(f"{name} has no token; give at least one")
        if (count := len(prompt)) >= positions:
            raise UserError(f"{name} has {count} tokens, but the model has {positions} positions; shorten it")
        if wrong := [token for token in prompt if not 0 <= token < vocab_size]:
            raise UserError(
                f"{name} holds token {wrong[0]}, but the model has the tokens 0 to {vocab_size - 1}; use the tokenizer of the model"
            )


def _read(
    model: GenerationModel, texts: Sequence[Sequence[int]], at_once: int, cache: KVCache | None
) -> Tensor | None:
    """Returns this rank's logits of the token after each text, read in chunks; shorter texts are padded."""
    longest = max(map(len, texts))
    tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    result: Tensor | None = None
    for start in range(0, longest, at_once):
        chunk = tokens[:, start : start + at_once]
        now = ForwardPass((start,) * len(texts), chunk.shape[1])
        if cache is not None:
            cache.begin(now)
        last = [len(text) - 1 - start for text in texts]
        wanted = [index if 0 <= index < chunk.shape[1] else 0 for index in last]
        logits = _forward(model, now, chunk, wanted, cache)
        if logits is not None:
            ends_here = torch.tensor([p == i for p, i in zip(last, wanted)], device=logits.device)
            result = logits if result is None else torch.where(ends_here[:, None], logits, result)
    return result


def _forward(
    model: GenerationModel, now: ForwardPass, tokens_BS: Tensor, wanted: Sequence[int], cache: KVCache | None
) -> Tensor | None:
    """Runs one forward through all stages; the last stage returns logits of each sequence's wanted token."""
    device = model.world.device
    wanted_B = torch.tensor(wanted, device=device)
    program = _OnePass(model, tokens_BS.to(device), now.positions(device), wanted_B, cache)
    model.executor.evaluate(model.schedule, program)
    return program.logits_BV


@dataclass(eq=False)
class _OnePass:
    """The program of one forward for the pipeline executor."""

    model: GenerationModel
    tokens_BS: Tensor
    positions_BS: Tensor
    wanted_B: Tensor
    cache: KVCache | None
    logits_BV: Tensor | None = None

    def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        module, inputs = self.model.stages[stage], (self.tokens_BS, self.positions_BS)
        with module.cache_in_use.using(self.cache):
            output: Tensor = module(*inputs, received_BSD=received, wanted_B=self.wanted_B)
        if stage < self.model.schedule.placement.stages - 1:
            return output
        self.logits_BV = output[:, 0]
        # The executor sums losses; there is none.
        return output.new_zeros(())

    def message_shape(self, stage: int, micro_batch: int) -> tuple[int, ...]:
        return *self.tokens_BS.shape, self.model.settings.hidden_size


def _choices(
    model: GenerationModel,
    logits_BV: Tensor | None,
    rows: Sequence[int],
    sampling: Sampling,
    generators: Sequence[torch.Generator],
) -> list[tuple[int, Choice]]:
    """Chooses tokens for these rows on one rank and broadcasts them to all."""
    world = model.world
    # Token and log probability in host memory; fp64 represents any token id exactly.
    chosen = torch.full((len(rows), 2), -1.0, dtype=torch.float64)
    if logits_BV is not None:
        of_all_BV = _whole_vocabulary(logits_BV, model)
        if world.all_ranks.rank == model.sampling_rank:
            # Greedy decoding runs on the device, because copying the logits takes longer; sampling runs on
            # the host.
            of_all_BV = of_all_BV if sampling.greedy else of_all_BV.cpu()
            wanted_BV = of_all_BV if len(rows) == len(of_all_BV) else of_all_BV[list(rows)]
            by_row = choose_tokens(wanted_BV, sampling, [generators[row] for row in rows])
            chosen_here = [(c.token, c.logprob) if c else (-1, 0) for c in by_row]
            chosen = torch.tensor(chosen_here, dtype=torch.float64)
    broadcast_(chosen, world.all_ranks, model.sampling_rank)
    if chosen[:, 0].min() < 0:
        raise AgreedError(
            "the model's logits are NaN or inf, so there is no next token; check the weights, or try --dtype float32"
        )
    return [(row, Choice(int(token), logprob)) for row, (token, logprob) in zip(rows, chosen.tolist())]


def _whole_vocabulary(logits_BV: Tensor, model: GenerationModel) -> Tensor:
    """Gathers the logits of all tensor ranks and drops the padding."""
    group, vocab_size = model.world.tensor, model.settings.vocab_size
    if group.size == 1:
        return logits_BV[:, :vocab_size].float()
    parts = logits_BV.new_empty(group.size, *logits_BV.shape)
    all_gather_into(parts.flatten(0, 1), logits_BV.contiguous(), group)
    return parts.movedim(0, 1).flatten(1)[:, :vocab_size].float()
