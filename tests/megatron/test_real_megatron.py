"""Compares names, parameters, defaults and masks with the installed megatron-core."""

import dataclasses
import importlib
import inspect
import warnings
from typing import Any

import pytest
import torch

from pentatron.megatron.core import parallel_state
from pentatron.megatron.core.models.gpt import GPTModel
from pentatron.megatron.core.transformer.transformer_config import TransformerConfig
from pentatron.megatron.training.utils import get_ltor_masks_and_position_ids


def real(module: str) -> Any:
    with warnings.catch_warnings():
        # megatron-core warns on import about missing fast kernels.
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core")
        return importlib.import_module(f"megatron.core.{module}")


def test_the_configuration_has_megatrons_fields_and_defaults() -> None:
    theirs = {
        f.name: f.default
        for f in dataclasses.fields(real("transformer.transformer_config").TransformerConfig)
    }
    own = {f.name: f.default for f in dataclasses.fields(TransformerConfig) if f.name != "of_run"}
    assert own.keys() <= theirs.keys()
    assert {name: theirs[name] for name in own} == own


def test_parameters_are_those_of_the_real_functions() -> None:
    their_state = real("parallel_state")
    for name in [name for name in dir(parallel_state) if name.startswith(("get_", "is_", "set_"))]:
        mine = inspect.signature(getattr(parallel_state, name)).parameters
        if name in ("is_running",):
            continue
        theirs = inspect.signature(getattr(their_state, name)).parameters
        assert set(mine) - {"vp_stage", "check_initialized"} <= set(theirs), name
    mine = inspect.signature(GPTModel.__init__).parameters
    assert set(mine) <= set(inspect.signature(real("models.gpt").GPTModel.__init__).parameters)


@pytest.mark.parametrize("wishes", [(False, False, False), (True, False, True), (True, True, True)])
def test_masks_and_positions_are_megatrons(wishes: tuple[bool, bool, bool]) -> None:
    tokens = torch.tensor([[5, 9, 2, 3, 9, 9, 7, 1], [9, 1, 2, 3, 4, 5, 6, 9]])
    hidden, loss_mask, positions = get_ltor_masks_and_position_ids(tokens, 9, *wishes)
    for row, ids in enumerate(tokens):
        expected = real("datasets.gpt_dataset")._get_ltor_masks_and_position_ids(ids, 9, *wishes, True)
        assert torch.equal(hidden[row % len(hidden)], expected[0])
        assert torch.equal(loss_mask[row], expected[1]) and torch.equal(positions[row], expected[2])
