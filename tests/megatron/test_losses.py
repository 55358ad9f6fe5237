"""Loss functions of every kind that Megatron had weigh tokens as ours does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pentatron.config.errors import UserError
from pentatron.megatron.losses import stated_loss, summed_loss

MASK = torch.tensor([[1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]])


def summed(output: Tensor) -> Any:
    return (output * MASK).sum(), MASK.sum().int()


def with_report(output: Tensor) -> Any:
    loss = (output * MASK).sum()
    return loss, MASK.sum(), {"lm loss": loss.detach()}


def mean(output: Tensor) -> Any:
    loss = (output * MASK).sum() / MASK.sum()
    return loss, {"lm loss": loss}


def summed_over_ranks(output: Tensor) -> Any:
    """As a function does that reduces in place what it returns: values of all ranks, derivatives of this one."""
    loss = torch.stack(((output * MASK).sum(), MASK.sum()))
    with torch.no_grad():
        loss *= 4
    return loss[0].clone(), loss[1].detach().int()


@pytest.mark.parametrize("function", [summed, with_report, mean, summed_over_ranks])
def test_what_a_loss_function_says_is_the_sum_over_valid_tokens(function: Callable[[Tensor], Any]) -> None:
    output = torch.rand(2, 4, requires_grad=True)
    loss = summed_loss(output, function, MASK.sum())
    torch.testing.assert_close(loss, (output * MASK).sum())
    loss.backward()
    torch.testing.assert_close(output.grad, MASK)


def test_weights_of_tokens_are_the_functions_own() -> None:
    """Twice the weight for the second sequence; and a function that forgets the mask is followed, not mended."""
    output = torch.rand(2, 4)
    weights = MASK * torch.tensor([[1.0], [2.0]])
    loss = summed_loss(output, lambda x: ((x * weights).sum(), weights.sum()), MASK.sum())
    torch.testing.assert_close(loss, (output * weights).sum() * 4 / 5)
    forgetful = summed_loss(output, lambda x: (x.sum(), {}), MASK.sum())
    torch.testing.assert_close(forgetful, output.mean() * 4)
    assert not torch.isclose(forgetful, (output * MASK).sum())


def test_a_micro_batch_without_valid_tokens_adds_nothing() -> None:
    output = torch.rand(2, 4, requires_grad=True)
    loss = summed_loss(output, lambda x: ((x * 0 * MASK).sum(), 0), torch.tensor(0.0))
    loss.backward()
    assert loss == 0 and output.grad is not None and not output.grad.any()


def test_a_loss_of_logits_is_taken_by_its_word() -> None:
    logits = torch.rand(2, 4, 5, requires_grad=True)
    total = stated_loss(logits, lambda x: (x.sum(), torch.tensor(8)), MASK.sum())
    torch.testing.assert_close(total, logits.sum() / 8 * 4)
    torch.testing.assert_close(stated_loss(logits, lambda x: (x.mean(), {}), MASK.sum()), logits.mean() * 4)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda x: x.sum(), r"returned a Tensor; it must return \(loss, number of tokens\)"),
        (lambda x: (x, 3), "a loss of 8 numbers; return one"),
        (lambda x: (x.detach().sum(), 3), "does not depend on output_tensor"),
    ],
)
def test_wrong_loss_functions_get_a_sentence(function: Callable[[Tensor], Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        summed_loss(torch.rand(2, 4), function, MASK.sum())


def test_weights_that_cancel_are_no_number_rather_than_nothing() -> None:
    output = torch.ones(3, requires_grad=True)
    weights, valid = torch.tensor([1.0, -2.0, 0.5]), torch.tensor(3.0)
    assert summed_loss(output, lambda x: ((x * weights).sum(), {}), valid).isnan()
    assert summed_loss(output, lambda x: ((x * 0.0).sum(), {}), valid) == 0
