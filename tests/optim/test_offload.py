"""Tests master weights and Adam's state in host memory."""

import dataclasses

import pytest
import torch

from pentatron.layout.ranks import Grid
from pentatron.optim.optimizer import Optimizer
from pentatron.parallel.world import World, single_process
from tests.harness import distributed
from tests.optim.tiny import OPTIM, here, network, one_step, parallel


def after_three_steps(world: World, zero: int, dtype: torch.dtype, offload: bool) -> dict[str, torch.Tensor]:
    """Returns weights and state after three steps.

    A CPU runs the same code as a GPU, with both memories the same.
    """
    model = network().to(world.device)
    layout = dataclasses.replace(parallel(zero), in_host_memory=offload)
    optimizer = Optimizer({0: model}, world, OPTIM, layout, dtype)
    for step in range(3):
        one_step(model, optimizer, step, count=2)
    optimizer.wait_for_weights()
    state = list(optimizer.fragments(owned_only=False))
    assert not offload or all(f.values.device.type == "cpu" for f in state)
    if offload:
        held = optimizer.bytes()
        assert held["master"] == held["moments"] / 2, "also weights in fp32 have a master apart from them"
    return {name: p.detach().cpu() for name, p in model.named_parameters()} | {
        f"{f.tensor} at {f.start}": f.values.cpu() for f in state
    }


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(world=2)
def test_where_the_state_is_changes_no_bit(zero: int, dtype: torch.dtype) -> None:
    expected, found = (
        after_three_steps(here(Grid(data=2)), zero, dtype, offload) for offload in (False, True)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_state_is_in_host_memory(dtype: torch.dtype) -> None:
    world = single_process(torch.device("cuda"))
    expected, found = (after_three_steps(world, 0, dtype, offload) for offload in (False, True))
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-4 if dtype == torch.float32 else 0.02, atol=1e-5
        )
