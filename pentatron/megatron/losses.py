"""What a loss function written for Megatron returns, as the objective of a step.

`(sum, number of tokens)` and `(sum, number of tokens, report)`: Σ sum / Σ tokens over all micro-batches and replicas of the step.
`(loss, report)`: the mean over all micro-batches and replicas. The gradients are those of the returned scalar.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pentatron.errors import UserError
from pentatron.parallel.collectives import Group
from pentatron.parallel.shards import Held, held_parameters
from pentatron.parallel.world import World
from pentatron.train.model import Objective

LossFunction = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Returned:
    """`tokens` is None for a mean."""

    loss: Tensor
    tokens: Tensor | None
    report: Mapping[str, Any]


def share_of(returned: Returned, objective: Objective) -> Tensor:
    """The micro-batch's share of the step's objective; what is reported beside it is kept there."""
    for name, value in returned.report.items():
        objective.report(str(name), *_pair(name, value, returned.loss.device))
    loss = returned.loss.float().sum()
    if returned.tokens is None:
        return objective.share_of_mean(loss)
    return objective.share_of_sum(loss, returned.tokens)


def returned_by(loss_function: LossFunction, output: Tensor, context: Group) -> Returned:
    """`context`: the context-parallel ranks."""
    with _reductions_counted(context) as over_context:
        returned = _parts(loss_function(output))
    if over_context:
        # The value is that of all context ranks, the derivative that of this one.
        value = returned.loss.detach()
        returned = replace(returned, loss=returned.loss - value + value / context.size)
    if torch.is_grad_enabled() and not returned.loss.requires_grad:
        raise UserError(
            "the loss function's loss does not depend on output_tensor or on any weight, so nothing could be learned from it; compute it "
            "from output_tensor, and detach only what is reported"
        )
    return returned


def counting_terms_once(
    loss_function: LossFunction, output: Tensor, module: nn.Module, world: World
) -> Returned:
    """`returned_by`, for a stage whose ranks see parts of the stream (sequence parallelism).

    Gradients of weights that act on the stream are summed over these ranks. A term of the loss that depends on such a weight without
    passing through `output` is whole on each of them, and counts once.
    """
    leaf = output.detach().requires_grad_(output.requires_grad)
    returned = returned_by(loss_function, leaf.view_as(leaf), world.group("context"))
    if not returned.loss.requires_grad:
        return returned
    held = [h for h in held_parameters(module) if h.parameter.requires_grad]
    sources = [*([output] if leaf.requires_grad else []), *(h.parameter for h in held)]
    ranks = [*([1] if leaf.requires_grad else []), *(_summed_over(h, world) for h in held)]
    found = torch.autograd.grad(
        returned.loss.sum(), [leaf if s is output else s for s in sources], allow_unused=True
    )
    terms = [(s * g).float().sum() / count for s, g, count in zip(sources, found, ranks) if g is not None]
    surrogate = torch.stack(terms).sum()
    # The value of the loss with the derivative of the terms.
    loss = surrogate + (returned.loss.detach().float().sum() - surrogate.detach())
    return replace(returned, loss=loss)


def _summed_over(held: Held, world: World) -> int:
    partial = any("tensor" in piece.partial_over for piece in held.declared.pieces)
    return world.tensor.size if partial else 1


@contextmanager
def _reductions_counted(context: Group) -> Iterator[list[Tensor]]:
    """Gives `torch.distributed.all_reduce` of a loss a derivative, and lists the tensors that were summed over context-parallel ranks.

    Guide 004 sums the loss and the number of tokens over data-parallel ranks, in place, and returns both. The value is then that of all ranks,
    and autograd, which does not see the reduction, has the derivative of this rank's part. Each of the ranks returns the sum, so the
    objective contains this rank's part as many times as there are ranks. Sums over context-parallel ranks are left alone: Megatron's
    functions multiply what they return by the number of these ranks themselves.
    """
    honest = dist.all_reduce
    over_context: list[Tensor] = []

    def all_reduce(
        tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        work = honest(tensor, op, group, async_op)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        only_context = context.size > 1 and ranks == dist.get_process_group_ranks(context.process_group)
        if op != dist.ReduceOp.SUM or not tensor.requires_grad:
            return work
        if only_context:
            over_context.append(tensor)
        elif len(ranks) > 1:
            tensor.register_hook(lambda gradient: gradient * len(ranks))
        return work

    dist.all_reduce = all_reduce
    try:
        yield over_context
    finally:
        dist.all_reduce = honest


def _pair(name: Any, value: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Numerator and denominator of a reported value: one number, averaged over micro-batches and ranks, or a sum and a count."""
    found = value if isinstance(value, Tensor) else None
    if found is None:
        try:
            parts = value if isinstance(value, tuple | list) else (value,)
            found = torch.stack([torch.as_tensor(part, device=device).double().reshape(()) for part in parts])
        except (TypeError, ValueError, RuntimeError):
            found = torch.empty(0)
    flat = found.detach().to(device).reshape(-1).double()
    if flat.numel() == 1:
        return flat[0], torch.ones((), device=device)
    if flat.numel() == 2:
        return flat[0], flat[1]
    raise UserError(
        f"the loss function reports {name!r} as {_described(value)}; report one number, or a sum and the number of tokens it is over"
    )


def _parts(result: Any) -> Returned:
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], Tensor):
        raise UserError(
            f"the loss function returned {_described(result)}; it must return (loss, number of tokens), "
            "(loss, number of tokens, report) or, for a mean, (loss, report)"
        )
    loss, second = result[0], result[1]
    if loss.numel() != 1:
        raise UserError(
            f"the loss function returned a loss of {loss.numel()} numbers; return one, the sum over the tokens"
        )
    if isinstance(second, Mapping):
        return Returned(loss, None, second)
    report = result[2] if len(result) == 3 else {}
    if not isinstance(report, Mapping):
        raise UserError(
            f"the loss function returned a report that is a {type(report).__name__}; return a dictionary of names and values"
        )
    return Returned(loss, torch.as_tensor(second, device=loss.device).sum(), report)


def _described(result: Any) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(type(part).__name__ for part in result)})"
    if isinstance(result, Tensor):
        return f"{result.numel()} numbers"
    return f"a {type(result).__name__}"
