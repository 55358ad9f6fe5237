"""One training step, and one validation: the part of the loop that computes."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pentatron.data.loader import Batch
from pentatron.models.router_load import ExpertLoad
from pentatron.optim.build import AnyOptimizer
from pentatron.parallel.collectives import Group, all_reduce_, start_all_reduce_
from pentatron.parallel.executor import StageProgram
from pentatron.parallel.world import World
from pentatron.train.model import MicroBatches, Objective, ParallelModel, Total, ratio_on_device

# Numbers on their way from a device to the host.


class Told:
    """A copy in host memory that nobody waits for before it is needed; what the device does after it is not waited for at all."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._arrived: Any = None
        if values.is_cuda:
            # Only into page-locked memory does a copy run by itself.
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> Tensor:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


@dataclass(frozen=True)
class StepResult:
    loss: float
    gradient_norm: float
    tokens: int
    experts: ExpertLoad | None = None
    # Otherwise loss or gradients were no numbers, and everything was left as it is.
    updated: bool = True
    # This rank's part of the loss, for whoever looks for the origin of such numbers.
    own_loss: Tensor | None = None
    # What the loss function reports beside the loss, over the whole step.
    reported: Mapping[str, float] = field(default_factory=dict)
    # Gradients that are still there are so many times what they should be.
    gradient_scale: float = 1.0


def train_step(
    model: ParallelModel,
    optimizer: AnyOptimizer,
    batches: Sequence[Batch],
    learning_rate: float,
    step: int,
    scale: float = 1.0,
    weight_decay: float | None = None,
) -> StepResult:
    """Forward and backward over every micro-batch as the schedule says, one reduction, one update.

    The valid tokens of the whole step are counted before the first backward and every loss is divided by that one
    number: how the step is cut into ranks and micro-batches then changes nothing. `step` counts from 0. Backward is that of
    `scale` times the loss; loss and norm are told without it. `weight_decay` is the configured one unless it is said.
    """
    under_way = _start(model, optimizer, batches, step, scale)
    # The gradients of router losses are not sums over tokens: where there are some, the ratio must be known before they arise.
    depends = model.program.reported_names is not None and bool(model.routers.names)
    if optimizer.decides and not depends:
        # A GPU has the numbers on its way to the host, and goes on meanwhile: it leaves the update out itself.
        with model.timers("optimizer", 1):
            optimizer.start_step(learning_rate, under_way.for_update(), scale, weight_decay)
        found = under_way.known()
        optimizer.settle_step(found.is_sound)
    else:
        found = under_way.known()
        if depends and found.ratio != 1 and found.is_sound:
            tokens = under_way.tokens / found.ratio
            under_way = _start(model, optimizer, batches, step, scale, tokens=tokens)
            found = under_way.known()
        if found.is_sound:
            with model.timers("optimizer", 1):
                optimizer.step(learning_rate, found.norm, scale / found.ratio, weight_decay)
    # With numbers that are none the weights are left alone, on every rank: the caller decides what to do about it.
    if found.is_sound:
        model.routers.settle(under_way.of_routers())
    experts = model.routers.report(found.of_routers)
    return StepResult(
        found.loss,
        found.norm,
        found.tokens,
        experts,
        found.is_sound,
        found.own_loss,
        found.reported,
        scale / found.ratio,
    )


@dataclass(frozen=True)
class Computed:
    """What a step has computed before its update; numbers of the whole step, but for `own_loss`. `of_routers` is on the host."""

    loss: float
    norm: float
    tokens: int
    of_routers: Tensor
    own_loss: Tensor
    # What the gradients are still to be multiplied by; the norm is that of the product.
    ratio: float = 1.0
    reported: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class _UnderWay:
    """What a step has computed, on the device: `totals` are the loss, the squared norm, the numbers of the routers and those of the
    loss functions."""

    def __init__(
        self,
        model: ParallelModel,
        totals: Tensor,
        tokens: Tensor,
        own_loss: Tensor,
        scale: float,
        objective: Objective,
    ) -> None:
        self.model, self.totals, self.tokens = model, totals, tokens
        self.own_loss, self.scale, self.objective = own_loss, scale, objective
        names = model.program.reported_names
        self._width = 0 if names is None else names.width
        self._told = Told(torch.cat((tokens.double()[None], totals)))

    def of_routers(self) -> Tensor:
        return self.totals[2 : len(self.totals) - self._width]

    def for_update(self) -> Tensor:
        """Loss and squared norm, and where loss functions count their tokens what gradients are still to be multiplied by."""
        found = self.totals[:2]
        if self.model.program.reported_names is None:
            return found
        ratio = ratio_on_device(self.totals[-self._width :], self.tokens)
        return torch.stack((found[0] * ratio, found[1] * ratio * ratio, ratio))

    def known(self) -> Computed:
        """Waits for the numbers, and for nothing that was begun after them."""
        told = self._told.wait()
        tokens, loss, squared_norm = told[:3].tolist()
        total, names = Total(), self.model.program.reported_names
        if names is not None:
            of_losses, told = told[-self._width :], told[: -self._width]
            total = self.objective.total(of_losses, tokens, names, self.model.world)
        # A program's own mask may be none; then the loss is none either, which is what is told.
        counted = int(tokens) if math.isfinite(tokens) else 0
        norm = math.sqrt(squared_norm) / self.scale * total.ratio
        return Computed(
            loss * total.ratio, norm, counted, told[3:], self.own_loss, total.ratio, total.reported
        )


def compute_gradients(
    model: ParallelModel,
    optimizer: AnyOptimizer,
    batches: Sequence[Batch],
    step: int,
    scale: float = 1.0,
    watch: Callable[[MicroBatches], StageProgram] | None = None,
) -> Computed:
    """All of a step but its update. `watch` puts something around the stages as they run."""
    return _start(model, optimizer, batches, step, scale, watch).known()


def _start(
    model: ParallelModel,
    optimizer: AnyOptimizer,
    batches: Sequence[Batch],
    step: int,
    scale: float,
    watch: Callable[[MicroBatches], StageProgram] | None = None,
    tokens: Tensor | None = None,
) -> _UnderWay:
    """`tokens`: what sums of losses are divided by, if not by the valid tokens of the data."""
    world = model.world
    batches = model.own_tokens(batches)
    valid = ValidTokens(batches, world.replicas)
    optimizer.zero_gradients()
    model.routers.begin_step(len(batches), scale)
    model.weight_scales.refresh()
    objective = Objective(
        valid.total if tokens is None else lambda: tokens, len(batches) * world.replicas.size
    )
    program = MicroBatches(model, batches, model.dropout_keys(batches, step), objective)
    watched = model.recording.around(program, optimizer, scale) if watch is None else watch(program)
    with model.timers("forward-backward", 1):
        loss = model.executor.train(model.config.schedule(len(batches)), watched, optimizer, scale)
        with model.timers("all-grads-sync", 1):
            optimizer.finish_reduction()
    model.weight_scales.forget()
    of_step = torch.stack((_said_once(loss, world), optimizer.squared_norm()))
    numbers = [of_step, model.routers.numbers()]
    if (names := model.program.reported_names) is not None:
        numbers.append(objective.numbers(names, world))
    totals = all_reduce_(torch.cat(numbers), world.everyone)
    divisor = valid.total() if tokens is None else tokens
    return _UnderWay(model, totals, divisor, loss, scale, objective)


def _said_once(loss: Tensor, world: World) -> Tensor:
    """Ranks of the tensor axis compute the same loss; one of them says it."""
    return loss.double() if world.is_first_of(("tensor",)) else torch.zeros_like(loss, dtype=torch.float64)


class ValidTokens:
    """Labels that count in the loss, over all micro-batches and replicas.

    Nobody waits for the sum before the first loss needs it: weights may still be on their way between the same replicas,
    and collectives of one group follow each other, so that waiting here would be waiting for all of them.
    """

    def __init__(self, batches: Sequence[Batch], replicas: Group) -> None:
        self._sum = torch.stack([batch.valid_tokens.double() for batch in batches]).sum()
        self._pending = start_all_reduce_(self._sum, replicas)
        self._total: Tensor | None = None

    def total(self) -> Tensor:
        """At least 1."""
        if self._total is not None:
            return self._total
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self._total = self._sum.clamp(min=1).float()
        return self._total


@dataclass(frozen=True)
class Evaluated:
    """The objective over an evaluation, and what the loss function reports beside it."""

    loss: float
    reported: Mapping[str, float] = field(default_factory=dict)


def validation_loss(model: ParallelModel, batches: Iterable[Batch], at_once: int) -> float:
    return evaluate(model, batches, at_once).loss


@torch.no_grad()
def evaluate(model: ParallelModel, batches: Iterable[Batch], at_once: int) -> Evaluated:
    """The objective over all batches of all data-parallel ranks: by default the mean loss per valid token. `at_once` micro-batches at a
    time."""
    world, names = model.world, model.program.reported_names
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    one = torch.ones((), device=world.device)
    objective = Objective(lambda: one, 1)
    counts_tokens = world.is_first_of(("tensor", "pipeline"))
    model.train(False)
    model.weight_scales.refresh()
    for whole in _chunks(batches, at_once):
        chunk = model.own_tokens(whole)
        program = MicroBatches(model, chunk, [None] * len(chunk), objective)
        loss = model.executor.evaluate(model.config.forward_schedule(len(chunk)), program)
        totals[0] += _said_once(loss, world)
        if counts_tokens:
            totals[1] += torch.stack([b.valid_tokens.double() for b in chunk]).sum()
    model.weight_scales.forget()
    model.train()
    if names is None:
        loss_sum, valid = all_reduce_(totals, world.everyone).tolist()
        return Evaluated(float(loss_sum / max(valid, 1.0)))
    numbers = torch.cat((totals, objective.numbers(names, world)))
    summed = all_reduce_(numbers, world.everyone).cpu()
    loss_sum, valid, counted, sums, means = summed[:5].tolist()
    total = objective.total(summed[2:], valid, names, world)
    return Evaluated(loss_sum / ((counted or 1.0) if sums else means or max(valid, 1.0)), total.reported)


def _chunks(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    source = iter(batches)
    while chunk := list(itertools.islice(source, size)):
        yield chunk
