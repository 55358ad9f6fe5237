"""Converts the return value of a loss function written for Megatron into the objective of a step.

`(sum, number of tokens)` and `(sum, number of tokens, report)`: Σ sum / Σ tokens over all micro-batches and
replicas of the step. `(loss, report)`: the mean over all micro-batches and replicas. Gradients are those of
the returned scalar.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pentatron.errors import UserError
from pentatron.parallel.collectives import Group
from pentatron.parallel.sharding import sharded_parameters
from pentatron.parallel.world import World
from pentatron.train.model import Objective

LossFunction = Callable[[Tensor], Any]


@dataclass(frozen=True)
class LossResult:
    """The return value of a loss function. `tokens` is None for a mean."""

    loss: Tensor
    tokens: Tensor | None
    report: Mapping[str, Any]


def objective_share(returned: LossResult, objective: Objective) -> Tensor:
    """Returns the micro-batch's share of the step's objective, and reports the other values to it."""
    for name, value in returned.report.items():
        objective.report(str(name), *_pair(name, value, returned.loss.device))
    loss = returned.loss.float().sum()
    if returned.tokens is None:
        return objective.share_of_mean(loss)
    return objective.share_of_sum(loss, returned.tokens)


def call_loss_function(loss_function: LossFunction, output: Tensor, context: Group) -> LossResult:
    """Calls the loss function and checks the result. `context` is the context-parallel group."""
    with _differentiable_all_reduce(context) as over_context:
        returned = _parsed(loss_function(output))
    if over_context:
        # The value is the sum over all context ranks, the gradient that of this rank's part.
        value = returned.loss.detach()
        returned = replace(returned, loss=returned.loss - value + value / context.size)
    if torch.is_grad_enabled() and not returned.loss.requires_grad:
        raise UserError(
            "the loss function's loss does not depend on output_tensor or on any weight, so it has no gradient; compute it "
            "from output_tensor, and detach only the reported values"
        )
    return returned


def counting_terms_once(
    loss_function: LossFunction, output: Tensor, module: nn.Module, world: World
) -> LossResult:
    """`call_loss_function` for sequence parallelism, where the ranks of the tensor axis have parts of the
    hidden states.

    Gradients of weights that act on these parts are summed over the tensor axis. A loss term that depends on
    such a weight without passing through `output`, such as a regularizer, is complete on every rank, so its
    gradient is divided by the number of ranks.
    """
    leaf = output.detach().requires_grad_(output.requires_grad)
    returned = call_loss_function(loss_function, leaf.view_as(leaf), world.group("context"))
    if not returned.loss.requires_grad:
        return returned
    # What the loss may depend on: as autograd sees it, as the step sees it, and the ranks that repeat its
    # term.
    sources: list[tuple[Tensor, Tensor, int]] = [(leaf, output, 1)] if leaf.requires_grad else []
    for param in sharded_parameters(module):
        is_summed = any("tensor" in shard.partial_over for shard in param.declared.shards)
        sources.append((param.parameter, param.parameter, world.tensor.size if is_summed else 1))
    inputs = [source for source, _, _ in sources]
    gradients = torch.autograd.grad(returned.loss.sum(), inputs, allow_unused=True)
    terms = [
        (value * gradient).float().sum() / ranks
        for (_, value, ranks), gradient in zip(sources, gradients)
        if gradient is not None
    ]
    surrogate = torch.stack(terms).sum()
    # The value of the loss with the gradient of the surrogate.
    loss = surrogate + (returned.loss.detach().float().sum() - surrogate.detach())
    return replace(returned, loss=loss)


@contextmanager
def _differentiable_all_reduce(context: Group) -> Iterator[list[Tensor]]:
    """Corrects the gradient of losses that are all-reduced in place; yields the tensors summed over
    context-parallel ranks.

    Guide 004 all-reduces the loss and the number of tokens over data-parallel ranks in place and returns
    both. Every rank then returns the sum over all ranks, so the objective contains this rank's part once per
    rank, but autograd does not see the all-reduce: its gradient is multiplied by the number of ranks. Sums
    over context-parallel ranks are not corrected, because Megatron's loss functions multiply by the number of
    these ranks themselves.
    """
    torch_all_reduce = dist.all_reduce
    over_context: list[Tensor] = []

    def all_reduce(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        work = torch_all_reduce(tensor, op, group, async_op)
        if op == dist.ReduceOp.SUM and tensor.requires_grad:
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            if context.size > 1 and ranks == dist.get_process_group_ranks(context.process_group):
                over_context.append(tensor)
            elif len(ranks) > 1:
                tensor.register_hook(lambda gradient: gradient * len(ranks))
        return work

    dist.all_reduce = all_reduce
    try:
        yield over_context
    finally:
        dist.all_reduce = torch_all_reduce


def _pair(name: Any, value: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Numerator and denominator of a reported value: (sum, count), or (number, 1) for a mean."""
    tensor = value if isinstance(value, Tensor) else torch.empty(0)
    if not isinstance(value, Tensor):
        parts = value if isinstance(value, tuple | list) else (value,)
        with suppress(TypeError, ValueError, RuntimeError):
            tensor = torch.stack([torch.as_tensor(p, device=device).double().reshape(()) for p in parts])
    flat = tensor.detach().to(device).reshape(-1).double()
    if flat.numel() == 1:
        return flat[0], torch.ones((), device=device)
    if flat.numel() == 2:
        return flat[0], flat[1]
    raise UserError(
        f"the loss function reports {name!r} as {_described(value)}; report one number, or a sum and the number of tokens it is over"
    )


def _parsed(result: Any) -> LossResult:
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], Tensor):
        raise UserError(
            f"the loss function returned {_described(result)}; it must return (loss, number of tokens), "
            "(loss, number of tokens, report) or, for a mean, (loss, report)"
        )
    loss, second, *rest = result
    if loss.numel() != 1:
        raise UserError(
            f"the loss function returned a loss of {loss.numel()} numbers; return one, the sum over the tokens"
        )
    if isinstance(second, Mapping):
        return LossResult(loss, None, second)
    report = rest[0] if rest else {}
    if not isinstance(report, Mapping):
        raise UserError(
            f"the loss function returned a report that is a {type(report).__name__}; return a dictionary of names and values"
        )
    return LossResult(loss, torch.as_tensor(second, device=loss.device).sum(), report)


def _described(result: Any) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(type(part).__name__ for part in result)})"
    return f"{result.numel()} numbers" if isinstance(result, Tensor) else f"a {type(result).__name__}"
