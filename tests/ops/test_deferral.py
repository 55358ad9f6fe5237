"""Tests deferred weight gradients: the same bits, the same hooks, and no more kept than needed."""

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from pentatron.ops.linear import DeferredGradients, linear


def layer(dtype: torch.dtype = torch.float32) -> tuple[Tensor, nn.Parameter, nn.Parameter]:
    torch.manual_seed(3)
    x = torch.randn(2, 5, 7).to(dtype).requires_grad_()
    return x, nn.Parameter(torch.randn(4, 7).to(dtype)), nn.Parameter(torch.randn(4).to(dtype))


def gradients(dtype: torch.dtype, deferred: DeferredGradients | None, halves: bool) -> list[Tensor]:
    x, weight, bias = layer(dtype)
    loss = linear(x, weight, bias, deferred).square().sum()
    if deferred is not None and halves:
        with deferred.collect((0, 0)):
            loss.backward()
        assert weight.grad is None and bias.grad is not None and deferred.cells == [(0, 0)]
        deferred.compute((0, 0))
        assert deferred.cells == []
    else:
        loss.backward()
    found = [x.grad, weight.grad, bias.grad]
    return [g for g in found if g is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("halves", [False, True])
def test_the_same_bits_as_torch(dtype: torch.dtype, halves: bool) -> None:
    expected = gradients(dtype, None, False)
    found = gradients(dtype, DeferredGradients(), halves)
    assert len(found) == 3
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def test_a_recomputed_layer_gives_its_gradient_to_the_parameter() -> None:
    """A recomputed layer adds its deferred gradient to the parameter.

    Backward unpacks a copy of the weight, and the graph that knew the parameter is gone when the weight
    gradient is computed.
    """
    expected = gradients(torch.float32, None, False)[1]
    x, weight, bias = layer()
    deferred = DeferredGradients()
    made = checkpoint(lambda x: linear(x, weight, bias, deferred), x, use_reentrant=False)
    with deferred.collect((0, 0)):
        made.square().sum().backward()
    del made
    deferred.compute((0, 0))
    assert weight.grad is not None and torch.equal(weight.grad, expected)


def test_hooks_hear_of_them_and_gradients_add_up() -> None:
    x, weight, bias = layer()
    deferred, heard = DeferredGradients(), []
    weight.register_post_accumulate_grad_hook(lambda p: heard.append(p.grad is not None))
    for micro_batch in range(2):
        with deferred.collect((1, micro_batch)):
            linear(x, weight, bias, deferred).sum().backward()
    assert True not in heard, "nothing has been computed yet"
    deferred.compute((1, 1))
    once = weight.grad.clone() if weight.grad is not None else None
    deferred.compute((1, 0))
    assert heard.count(True) == 2 and once is not None and weight.grad is not None
    assert torch.equal(weight.grad, 2 * once)


def test_deferral_keeps_input_and_output_gradient_only() -> None:
    """Keeps the layer's input and output gradient; the activation after it is freed with the graph."""
    x, weight, bias = layer()
    deferred = DeferredGradients()
    made = linear(x, weight, bias, deferred)
    activated = made.tanh()
    behind = StorageWeakRef(activated.untyped_storage())
    with deferred.collect((0, 0)):
        activated.square().sum().backward()
    del made, activated
    assert deferred.elements == x.numel() + 2 * 5 * 4
    assert behind.expired()
    deferred.compute((0, 0))
    assert deferred.elements == 0


def test_frozen_weights_leave_nothing() -> None:
    x, weight, bias = layer()
    weight.requires_grad_(False)
    deferred = DeferredGradients()
    with deferred.collect((0, 0)):
        linear(x, weight, bias, deferred).sum().backward()
    assert deferred.elements == 0 and x.grad is not None


def test_a_cell_is_cut_in_two_once() -> None:
    deferred = DeferredGradients()
    with deferred.collect((0, 0)):
        pass
    with pytest.raises(AssertionError, match="two input halves"), deferred.collect((0, 0)):
        pass
