"""What a user's loss function says, as a sum over valid tokens.

Here every valid token of a step weighs the same, however the step is cut into ranks and micro-batches. A loss function
written for Megatron has its own idea of that: a sum with a number of tokens, a mean, either of them summed over ranks for the
report. What they have in common is how they weigh the tokens of a micro-batch against each other, and that is what is
taken: the derivative of the loss by each token's loss, scaled to the valid tokens of the micro-batch.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pentatron.config.errors import UserError

LossFunction = Callable[[Tensor], Any]


def summed_loss(
    output: Tensor,
    loss_function: LossFunction,
    valid_tokens: Tensor,
    look: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Of the losses of every token: their sum as the function weighs them, its weights scaled to the valid tokens.

    `look` is shown those weights, before they are scaled.
    """
    with torch.enable_grad():
        # As it is in the run: other functions of it than sums may not see a leaf where they expect none.
        leaf = output.detach().requires_grad_()
        loss, _ = _parts(loss_function(leaf.view_as(leaf)))
        weights = torch.autograd.grad(loss.sum(), leaf, allow_unused=True)[0] if loss.requires_grad else None
    if weights is None:
        raise UserError(
            "the loss function's loss does not depend on output_tensor, so nothing could be learned from it; compute it from "
            "output_tensor, and detach only what is reported"
        )
    if look is not None:
        look(weights)
    total = weights.sum()
    # A micro-batch without a token that counts has nothing to say. Weights that take away as much as they give cannot be scaled to a number
    # of tokens: the loss is then no number, which ends the run, instead of a zero, from which nothing would be learned in silence.
    without = torch.where((weights != 0).any(), torch.nan, 0.0)
    scale = torch.where(total > 0, valid_tokens / torch.where(total > 0, total, 1.0), without)
    return (output.float() * (weights.float() * scale)).sum()


def stated_loss(output: Tensor, loss_function: LossFunction, valid_tokens: Tensor) -> Tensor:
    """Of anything else, logits say: the function's loss per token it counted, times the valid tokens."""
    loss, tokens = _parts(loss_function(output))
    mean = loss.sum() if tokens is None else loss.sum() / tokens.clamp(min=1)
    return mean.float() * valid_tokens


def _parts(result: Any) -> tuple[Tensor, Tensor | None]:
    """The loss, and the number of tokens it is a sum over; None where it is a mean."""
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
        return loss, None
    return loss, torch.as_tensor(second, device=loss.device)


def _described(result: Any) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(type(part).__name__ for part in result)})"
    return f"a {type(result).__name__}"
