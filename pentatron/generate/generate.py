"""Continuing texts, token by token, with a model that may be spread over tensor and pipeline ranks.

Every rank runs the same loop. Stages run one after the other for each token; where the logits are, one rank chooses and
tells all others.
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
from pentatron.nn.attention import can_keep
from pentatron.nn.kv_cache import KVCache, Pass
from pentatron.parallel.collectives import all_gather_into, broadcast_, gather_objects
from pentatron.parallel.executor import Executor
from pentatron.parallel.messages import open_messages
from pentatron.parallel.world import World

# Which token comes next: from the logits of a model to one choice.
#
# Draws happen on the CPU and in fp64, so that a seed gives the same text on every device and in every layout,
# as far as their logits agree. The likeliest token needs no lot: it is found where the logits are, and the
# host is told that alone.


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 always takes the likeliest token. `top_k` 0 and `top_p` 1 leave out nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def generator(self, number: int) -> torch.Generator:
        """Of the `number`-th prompt. Each has its own, so that a prompt's text does not depend on those beside it."""
        return torch.Generator().manual_seed(self.seed + number)


@dataclass(frozen=True)
class Choice:
    """A token, and the logarithm of the probability the model itself gave it: at temperature 1, nothing left out."""

    token: int
    logprob: float


def choices(
    logits_BV: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]
) -> list[Choice | None]:
    """One for each row, by the row's own generator; none where the logits are not all finite numbers.

    To draw, logits must be in host memory.
    """
    # What is no number is the least and the greatest of its row.
    greatest_B = logits_BV.amax(1)
    finite_B = greatest_B.isfinite() & logits_BV.amin(1).isfinite()
    if sampling.greedy:
        return _likeliest(logits_BV, greatest_B, finite_B)
    return [
        _drawn(row, sampling, each) if fine else None
        for row, each, fine in zip(logits_BV, generators, finite_B.tolist())
    ]


def _likeliest(logits_BV: Tensor, greatest_B: Tensor, finite_B: Tensor) -> list[Choice | None]:
    """All rows at once, in the precision of the logits: a whole vocabulary in fp64 takes longer than a small model's forward."""
    # Of the likeliest, the logarithm is that of the others' sum alone.
    sums_B = (logits_BV - greatest_B[:, None]).exp_().sum(1).double()
    # One copy to the host; fp64 holds any id exactly.
    found = torch.stack((logits_BV.argmax(1).double(), -sums_B.log(), finite_B.double())).tolist()
    return [Choice(int(token), logprob) if fine else None for token, logprob, fine in zip(*found)]


def _drawn(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> Choice:
    logits_V = logits_V.double()
    # Tokens stay in the order of their ids: where two are equally likely but for rounding, sorting would let the
    # rounding decide which of them the same random number means.
    reached_V = probabilities(logits_V, sampling).cumsum(0)
    drawn = torch.rand(1, dtype=torch.float64, generator=generator) * reached_V[-1]
    token = int(torch.searchsorted(reached_V, drawn, right=True))
    return Choice(token, float(logits_V.log_softmax(0)[token]))


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """Of every token, by temperature, then the `top_k` likeliest, then the fewest that reach `top_p` together."""
    # The likeliest at 0, so that no temperature is too small to divide by.
    scaled_V = (logits_V.double() - logits_V.max()) / sampling.temperature
    if 0 < sampling.top_k < len(scaled_V):
        least = scaled_V.topk(sampling.top_k).values[-1]
        scaled_V = scaled_V.masked_fill(scaled_V < least, -torch.inf)
    found_V = scaled_V.softmax(0)
    if sampling.top_p < 1:
        sorted_V, order_V = found_V.sort(descending=True, stable=True)
        # A token stays if those before it do not reach the share yet; so the first one always does.
        enough_V = sorted_V.cumsum(0) - sorted_V >= sampling.top_p
        enough_V[0] = False
        found_V[order_V[enough_V]] = 0
        found_V /= found_V.sum()
    return found_V


# Why a text ends: at a stop token, at as many tokens as were asked for, or where the model has no more positions.
End = Literal["stop", "length", "positions"]
# Prompts are read in parts of so many tokens, which bounds the memory that reading takes.
READ_AT_ONCE = 1024


@dataclass(frozen=True)
class GenerationModel:
    """A model that can continue texts: this rank's stages, and how a forward runs through those of all ranks."""

    stages: Mapping[int, CausalLM]
    world: World
    executor: Executor
    schedule: Schedule
    hidden_size: int
    vocab_size: int
    positions: int

    @property
    def chooser(self) -> int:
        """The rank that chooses: the first of those that have logits."""
        return self.world.everyone.size // self.world.grid.pipeline * (self.world.grid.pipeline - 1)


def generation_model(
    stages: Mapping[int, CausalLM], world: World, hidden_size: int, vocab_size: int, positions: int
) -> GenerationModel:
    """One stage on each pipeline rank. Every rank of the world must call this: it may make process groups."""
    weight = next(next(iter(stages.values())).parameters())
    schedule = forward_schedule(looped_placement(world.grid.pipeline, 1), 1)
    messages = open_messages(world, schedule.placement)
    executor = Executor(messages, world.at.pipeline, weight.dtype, world.device)
    return GenerationModel(stages, world, executor, schedule, hidden_size, vocab_size, positions)


@dataclass(frozen=True)
class Made:
    """One more token of the `number`-th text, or its end, or both. A stop token is not part of the text."""

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
) -> Iterator[Made]:
    """Continues all prompts together; each text is what it would be alone. The first prompt has number `first_number`."""
    require_room(prompts, model.vocab_size, model.positions)
    most = [min(max_new_tokens, model.positions - len(prompt)) for prompt in prompts]
    generators = [sampling.generator(first_number + row) for row in range(len(prompts))]
    texts = [list(prompt) for prompt in prompts]
    read = _reader(model, capacity=max(map(sum, zip(map(len, prompts), most))))
    going = list(range(len(prompts)))
    while going:
        for row, choice in _choices(model, read(texts), going, sampling, generators):
            if choice.token in stop:
                yield Made(first_number + row, None, "stop")
                going = [other for other in going if other != row]
                continue
            texts[row].append(choice.token)
            end: End | None = None
            if len(texts[row]) == len(prompts[row]) + most[row]:
                end = "length" if most[row] == max_new_tokens else "positions"
                going = [other for other in going if other != row]
            yield Made(first_number + row, choice, end)


def _reader(model: GenerationModel, capacity: int) -> Callable[[Sequence[Sequence[int]]], Tensor | None]:
    """What reads texts and gives this rank's logits of their next tokens; texts that grew are not read again.

    Layers that attend in a way of their own may not be able to remember; then every text is read anew each time.
    """
    layers = [layer for stage in model.stages.values() for layer in stage.layers.values()]
    if not all(gather_objects(all(map(can_keep, layers)), model.world.everyone)):
        return lambda texts: _read(model, texts, max(map(len, texts)), None)
    cache = KVCache(capacity)

    def read(texts: Sequence[Sequence[int]]) -> Tensor | None:
        if cache.now.length == 0:
            return _read(model, texts, READ_AT_ONCE, cache)
        # One that has ended stays where it is.
        cache.begin(Pass(tuple(len(text) - 1 for text in texts), 1))
        last = torch.tensor([[text[-1]] for text in texts])
        return _forward(model, cache.now, last, [0] * len(texts), cache)

    return read


def require_room(prompts: Sequence[Sequence[int]], vocab_size: int, positions: int) -> None:
    """A prompt must have a token, all of them known to the model, and leave room for one more."""
    for number, prompt in enumerate(prompts):
        name = f"prompt {number + 1}" if len(prompts) > 1 else "the prompt"
        if not prompt:
            raise UserError(f"{name} has no token; give at least one")
        if len(prompt) >= positions:
            raise UserError(
                f"{name} has {len(prompt)} tokens, and the model is made for {positions} in all; shorten it"
            )
        wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise UserError(
                f"{name} holds token {wrong}, and the model knows the tokens 0 to {vocab_size - 1}; is this its tokenizer?"
            )


def _read(
    model: GenerationModel, texts: Sequence[Sequence[int]], at_once: int, cache: KVCache | None
) -> Tensor | None:
    """This rank's logits of the token after each text, read from the beginning; shorter ones are filled up at the end."""
    longest = max(map(len, texts))
    tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    found: Tensor | None = None
    for start in range(0, longest, at_once):
        part = tokens[:, start : start + at_once]
        now = Pass((start,) * len(texts), part.shape[1])
        if cache is not None:
            cache.begin(now)
        places = [len(text) - 1 - start for text in texts]
        inside = [place if 0 <= place < part.shape[1] else 0 for place in places]
        logits = _forward(model, now, part, inside, cache)
        if logits is not None:
            ends_here = torch.tensor([p == i for p, i in zip(places, inside)], device=logits.device)
            found = logits if found is None else torch.where(ends_here[:, None], logits, found)
    return found


def _forward(
    model: GenerationModel, now: Pass, tokens_BS: Tensor, wanted: Sequence[int], cache: KVCache | None
) -> Tensor | None:
    """One pass of all stages. Where the head is, this rank's part of the logits of each sequence's wanted token."""
    device = model.world.device
    program = _OnePass(
        model, tokens_BS.to(device), now.positions(device), torch.tensor(wanted, device=device), cache
    )
    model.executor.evaluate(model.schedule, program)
    return program.logits_BV


class _OnePass:
    """What the executor runs."""

    def __init__(
        self,
        model: GenerationModel,
        tokens_BS: Tensor,
        positions_BS: Tensor,
        wanted_B: Tensor,
        cache: KVCache | None,
    ) -> None:
        self.model, self.cache = model, cache
        self.tokens_BS, self.positions_BS, self.wanted_B = tokens_BS, positions_BS, wanted_B
        self.logits_BV: Tensor | None = None

    def forward(self, stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        module = self.model.stages[stage]
        with module.cache_in_use.using(self.cache):
            made: Tensor = module(
                self.tokens_BS, self.positions_BS, received_BSD=received, wanted_B=self.wanted_B
            )
        if stage < self.model.schedule.placement.stages - 1:
            return made
        self.logits_BV = made[:, 0]
        # The executor adds up losses; there are none.
        return made.new_zeros(())

    def message_shape(self, stage: int, micro_batch: int) -> tuple[int, ...]:
        return *self.tokens_BS.shape, self.model.hidden_size


def _choices(
    model: GenerationModel,
    logits_BV: Tensor | None,
    rows: Sequence[int],
    sampling: Sampling,
    generators: Sequence[torch.Generator],
) -> list[tuple[int, Choice]]:
    """What one rank chose for these rows, on every rank."""
    world = model.world
    # Token and logprob, in host memory: fp64 holds any id exactly.
    told = torch.full((len(rows), 2), -1.0, dtype=torch.float64)
    if logits_BV is not None:
        of_all_BV = _whole_vocabulary(logits_BV, model)
        if world.everyone.rank == model.chooser:
            # A vocabulary takes longer to copy than its greatest to find; lots are drawn on the host.
            of_all_BV = of_all_BV if sampling.greedy else of_all_BV.cpu()
            wanted_BV = of_all_BV if len(rows) == len(of_all_BV) else of_all_BV[list(rows)]
            made = choices(wanted_BV, sampling, [generators[row] for row in rows])
            for place, choice in enumerate(made):
                if choice is not None:
                    told[place, 0], told[place, 1] = choice.token, choice.logprob
    broadcast_(told, world.everyone, model.chooser)
    if told[:, 0].min() < 0:
        raise AgreedError(
            "the model's logits are not finite numbers, so there is no next token; check the weights, or try --dtype float32"
        )
    return [(row, Choice(int(token), logprob)) for row, (token, logprob) in zip(rows, told.tolist())]


def _whole_vocabulary(logits_BV: Tensor, model: GenerationModel) -> Tensor:
    """From every tensor rank's part, without the padding."""
    group = model.world.tensor
    if group.size == 1:
        return logits_BV[:, : model.vocab_size].float()
    parts = logits_BV.new_empty(group.size, *logits_BV.shape)
    all_gather_into(parts.flatten(0, 1), logits_BV.contiguous(), group)
    return parts.movedim(0, 1).flatten(1)[:, : model.vocab_size].float()
