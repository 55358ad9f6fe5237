"""One training step, and the evaluation of batches without an update."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from pentatron.train.model import MicroBatches, Objective, ParallelModel, ratio_on_device


class AsyncHostCopy:
    """Asynchronous device-to-host copy. `wait()` blocks for this copy only, not for work queued after it."""

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._event: Any = None
        if values.is_cuda:
            # Only a copy to page-locked memory is asynchronous.
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._values


@dataclass(frozen=True)
class StepResult:
    """Results of a step over all ranks, except `own_loss`."""

    loss: float
    gradient_norm: float
    tokens: int
    # This rank's part of the loss, to find the origin of NaN/inf.
    own_loss: Tensor | None = None
    experts: ExpertLoad | None = None
    # Values that the loss function reported, over the whole step.
    reported: Mapping[str, float] = field(default_factory=dict)
    # Correction not yet multiplied into the gradients (loss scale excluded). `gradient_norm` includes it.
    ratio: float = 1.0
    # Scale of the gradients in memory relative to the true gradients.
    gradient_scale: float = 1.0

    @property
    def updated(self) -> bool:
        """False if the loss or a gradient was NaN or inf, and the weights were left unchanged."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


def train_step(
    model: ParallelModel,
    optimizer: AnyOptimizer,
    batches: Sequence[Batch],
    learning_rate: float,
    step: int,
    scale: float = 1.0,
    weight_decay: float | None = None,
) -> StepResult:
    """Runs forward and backward of every micro-batch, reduces the gradients and updates the weights.

    The valid tokens of the whole step are counted before the first backward, and every loss is divided by
    this number, so that the division into ranks and micro-batches does not change the result. `step` counts
    from 0. `scale` multiplies the loss for backward; the loss and norm returned are unscaled. `weight_decay`
    defaults to the configured value.
    """
    pending = start_step(model, optimizer, batches, step, scale)
    # Gradients of router losses are not sums over tokens: their ratio must be known before backward.
    needs_ratio = model.program.reported_names is not None and bool(model.routers.names)
    if optimizer.update.is_fused and not needs_ratio:
        # The update is skipped on the device if needed, so that the host does not wait for loss and norm
        # first.
        with model.timers("optimizer", 1):
            optimizer.start_step(learning_rate, pending.for_update(), scale, weight_decay)
        result = pending.wait()
        optimizer.finish_step(result.updated)
    else:
        result = pending.wait()
        if needs_ratio and result.ratio != 1 and result.updated:
            tokens = pending.tokens / result.ratio
            pending = start_step(model, optimizer, batches, step, scale, tokens=tokens)
            result = pending.wait()
        if result.updated:
            with model.timers("optimizer", 1):
                optimizer.step(learning_rate, result.gradient_norm, result.gradient_scale, weight_decay)
    # With NaN/inf no rank has changed its weights; the caller decides whether to stop or continue.
    if result.updated:
        model.routers.finish_step(pending.router_totals)
    return result


class _PendingStep:
    """Results of a step on the device, with their copy to the host under way.

    `totals` holds the loss, the squared norm, the router statistics and the tally of the loss functions.
    """

    def __init__(
        self, model: ParallelModel, totals: Tensor, own_loss: Tensor, scale: float, objective: Objective
    ) -> None:
        self.model, self.names, self.tokens = model, model.program.reported_names, objective.tokens()
        self.own_loss, self.scale, self.objective = own_loss, scale, objective
        self._end = end = len(totals) - (0 if self.names is None else self.names.width)
        self.loss_and_norm, self.router_totals, self.tally = totals[:2], totals[2:end], totals[end:]
        self._copy = AsyncHostCopy(torch.cat((totals, self.tokens.double()[None])))

    def for_update(self) -> Tensor:
        """Returns loss and squared norm, and the ratio if loss functions count their own tokens."""
        if self.names is None:
            return self.loss_and_norm
        ratio = ratio_on_device(self.tally, self.tokens)
        return torch.stack((self.loss_and_norm[0] * ratio, self.loss_and_norm[1] * ratio * ratio, ratio))

    def wait(self) -> StepResult:
        """Waits for the results, but not for device work that was queued after them."""
        values = self._copy.wait()
        loss, squared_norm, tokens = values[[0, 1, -1]].tolist()
        ratio, reported = 1.0, dict[str, float]()
        if self.names is not None:
            tally = values[self._end : -1]
            ratio, reported = self.objective.total(tally, tokens, self.names, self.model.world)
        norm = math.sqrt(squared_norm) / self.scale * ratio
        # A user's loss mask may contain NaN; then the loss is NaN as well and is reported.
        counted = int(tokens) if math.isfinite(tokens) else 0
        experts = self.model.routers.report(values[2 : self._end])
        lacking = self.scale / ratio
        return StepResult(loss * ratio, norm, counted, self.own_loss, experts, reported, ratio, lacking)


def start_step(
    model: ParallelModel,
    optimizer: AnyOptimizer,
    batches: Sequence[Batch],
    step: int,
    scale: float,
    wrap: Callable[[MicroBatches], StageProgram] | None = None,
    tokens: Tensor | None = None,
) -> _PendingStep:
    """Runs a step without its update. `wrap` wraps the program that the executor runs.

    `tokens`: the divisor of summed losses, by default the valid tokens of the data.
    """
    world = model.world
    batches = model.local_tokens(batches)
    valid = ValidTokens(batches, world.replicas)
    optimizer.zero_gradients()
    model.routers.begin_step(len(batches), scale)
    model.weight_scales.refresh()
    calls = len(batches) * world.replicas.size
    objective = Objective(lambda: valid.total if tokens is None else tokens, calls)
    program = MicroBatches(model, batches, model.dropout_keys(batches, step), objective)
    wrapped = model.recording.wrap(program, optimizer, scale) if wrap is None else wrap(program)
    with model.timers("forward-backward", 1):
        loss = model.executor.train(model.config.schedule(len(batches)), wrapped, optimizer, scale)
        with model.timers("all-grads-sync", 1):
            optimizer.finish_reduction()
    model.weight_scales.forget()
    # One all-reduce for everything the step reports.
    tallies = [
        torch.stack((_zero_unless_first_tensor_rank(loss, world), optimizer.squared_norm())),
        model.routers.tally(),
    ]
    if (names := model.program.reported_names) is not None:
        tallies.append(objective.tally(names, world))
    totals = all_reduce_(torch.cat(tallies), world.all_ranks)
    return _PendingStep(model, totals, loss, scale, objective)


def _zero_unless_first_tensor_rank(loss: Tensor, world: World) -> Tensor:
    """Returns 0 on all tensor-parallel ranks but the first: they compute the same loss, which is summed."""
    return loss.double() if world.is_first_of(("tensor",)) else torch.zeros_like(loss, dtype=torch.float64)


class ValidTokens:
    """Number of labels that count in the loss, over all micro-batches and replicas.

    The all-reduce is waited for only when the first loss needs it: weights may still be gathered between the
    same replicas, and the collectives of one group are ordered, so that an earlier wait would wait for these
    too.
    """

    def __init__(self, batches: Sequence[Batch], replicas: Group) -> None:
        self._sum = torch.stack([batch.valid_tokens.double() for batch in batches]).sum()
        self._pending = start_all_reduce_(self._sum, replicas)

    @functools.cached_property
    def total(self) -> Tensor:
        """The number of tokens, at least 1."""
        self._pending.wait()
        return self._sum.clamp(min=1).float()


@torch.no_grad()
def evaluate(
    model: ParallelModel, batches: Iterable[Batch], at_once: int
) -> tuple[float, Mapping[str, float]]:
    """Returns the objective over the batches of all data-parallel ranks: by default the mean loss per token.

    Runs `at_once` micro-batches at a time through the pipeline. Also returns the values that the loss
    function reported.
    """
    world, names = model.world, model.program.reported_names
    totals = torch.zeros(2, dtype=torch.float64, device=world.device)
    one = torch.ones((), device=world.device)
    # Undivided sums: they are divided by the totals of the whole evaluation at its end.
    objective = Objective(lambda: one, 1)
    counts_tokens = world.is_first_of(("tensor", "pipeline"))
    model.train(False)
    model.weight_scales.refresh()
    source = iter(batches)
    while whole := list(itertools.islice(source, at_once)):
        chunk = model.local_tokens(whole)
        program = MicroBatches(model, chunk, [None] * len(chunk), objective)
        loss = model.executor.evaluate(model.config.forward_schedule(len(chunk)), program)
        totals[0] += _zero_unless_first_tensor_rank(loss, world)
        if counts_tokens:
            totals[1] += torch.stack([b.valid_tokens.double() for b in chunk]).sum()
    model.weight_scales.forget()
    model.train()
    if names is None:
        loss_sum, valid = all_reduce_(totals, world.all_ranks).tolist()
        return loss_sum / max(valid, 1.0), {}
    tallies = torch.cat((totals, objective.tally(names, world)))
    summed = all_reduce_(tallies, world.all_ranks).cpu()
    loss_sum, valid, counted, sums, means = summed[:5].tolist()
    _, reported = objective.total(summed[2:], valid, names, world)
    return loss_sum / ((counted or 1.0) if sums else means or max(valid, 1.0)), reported
