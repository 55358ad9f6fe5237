"""Tests the forms of a loss function's return value, and the errors of wrong ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pentatron.errors import UserError
from pentatron.megatron.losses import call_loss_function, objective_share
from pentatron.parallel.world import ALONE
from pentatron.train.model import Objective

MASK = torch.tensor([[1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]])


def share(output: Tensor, function: Callable[[Tensor], Any]) -> tuple[Tensor, Objective]:
    """Returns the share of one call in the objective of a step of four calls with ten valid tokens."""
    objective = Objective(lambda: torch.tensor(10.0), 4)
    return objective_share(call_loss_function(function, output, ALONE), objective), objective


def test_a_sum_is_divided_by_the_tokens_of_the_step() -> None:
    output = torch.rand(2, 4, requires_grad=True)
    for count in (4, torch.tensor(4), torch.tensor([4.0])):
        loss, objective = share(output, lambda x, count=count: ((x * MASK).sum(), count))
        torch.testing.assert_close(loss, (output * MASK).sum() / 10)
        assert [float(c) for c in objective.counted] == [4.0] and objective.means == 0


def test_a_mean_is_divided_by_the_calls_of_the_step() -> None:
    output = torch.rand(2, 4, requires_grad=True)
    loss, objective = share(output, lambda x: (x.mean(), {"lm loss": x.mean()}))
    torch.testing.assert_close(loss, output.mean() / 4)
    assert objective.means == 1 and not objective.counted
    torch.testing.assert_close(
        objective.reported["lm loss"], torch.tensor([float(output.detach().mean()), 1.0], dtype=torch.float64)
    )


def test_negative_weights_and_terms_of_their_own_stay() -> None:
    output, weight = torch.rand(2, 4, requires_grad=True), torch.rand(3, requires_grad=True)
    loss, _ = share(output, lambda x: (-(x * MASK).sum() + weight.square().sum(), 4))
    loss.backward()
    assert output.grad is not None and weight.grad is not None
    torch.testing.assert_close(output.grad, -MASK / 10)
    torch.testing.assert_close(weight.grad, weight.detach() / 5)


def nothing(output: Tensor) -> Any:
    return None


def one_tensor(output: Tensor) -> Any:
    return output.sum()


def whole(output: Tensor) -> Any:
    return output, MASK.sum()


def detached(output: Tensor) -> Any:
    return output.detach().sum(), 4


def odd_report(output: Tensor) -> Any:
    return output.sum(), 4, {"all": output}


def no_report(output: Tensor) -> Any:
    return output.sum(), 4, 5


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (nothing, "returned a NoneType; it must return"),
        (one_tensor, "it must return"),
        (whole, "a loss of 8 numbers; return one"),
        (detached, "does not depend on output_tensor"),
        (odd_report, "reports 'all' as 8 numbers; report one number, or a sum"),
        (no_report, "a report that is a int; return a dictionary"),
    ],
)
def test_invalid_loss_function_is_refused(function: Callable[[Tensor], Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        share(torch.rand(2, 4, requires_grad=True), function)
