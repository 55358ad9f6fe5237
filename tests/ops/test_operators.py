"""Checks that custom operators return the shapes and dtypes that they declare to compilers.

Runs the kernels if there is a GPU.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from pentatron.nn import dropout
from pentatron.ops import activation, dispatch, fp8
from pentatron.ops.fp8 import E4M3, E5M2
from tests.harness import run_distributed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
X, ONE = torch.randn(32, 48, dtype=torch.bfloat16, device=DEVICE), torch.ones((), device=DEVICE)
ROWS = torch.arange(64, device=DEVICE).reshape(2, 32)
BATCH = torch.randn(2, 32, 16, device=DEVICE)
SITE = torch.tensor(3, device=DEVICE)
SAMPLES: list[tuple[Any, tuple[Any, ...]]] = [
    (fp8.scale_of, (X.abs().amax(1), E4M3)),
    (fp8._rounded, (X, ONE, None, E4M3, True, True)),
    (fp8._rounded, (X, torch.ones(32, 1, device=DEVICE), torch.ones(48, 1, device=DEVICE), E5M2, True, True)),
    (fp8._rounded, (X, ONE, None, E4M3, True, False)),
    (fp8._rounded, (X, ONE, None, E5M2, False, True)),
    (fp8._largest_of_tiles, (X,)),
    (activation.gate_backward, (X[:, :24], X)),
    (activation.swiglu_backward, (X[:, :24].clone(), X)),
    (dropout._dropped_by_site, (BATCH, None, ROWS, SITE, 0.25)),
    (dropout._dropped_by_site, (BATCH, BATCH.clone(), ROWS, SITE, 0.25)),
]


@pytest.mark.parametrize(("operation", "given"), SAMPLES, ids=[op.name()[11:] for op, _ in SAMPLES])
def test_operators_match_their_schema_and_alias_no_input(operation: Any, given: tuple[Any, ...]) -> None:
    torch.library.opcheck(operation, given, test_utils=("test_schema", "test_faketensor"))


def defined() -> list[str]:
    found = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeExplicitAutograd")
    return [name for name in found if name.startswith("pentatron::")]


def test_every_operation_is_looked_at() -> None:
    """Every custom operator has a sample; a forked rank has imported all modules that define one."""
    [ours] = run_distributed(defined, 1, process_group=False)
    assert {operation.name() for operation, _ in SAMPLES} == set(ours)


def test_one_that_makes_something_else_is_found() -> None:
    def narrow(x: Tensor) -> Tensor:
        return x.new_empty(1)

    @dispatch.operator("wrong", narrow)
    def doubled(x: Tensor) -> Tensor:
        return x + x

    with pytest.raises(Exception, match=r"shape|mismatch"):
        torch.library.opcheck(doubled, (X,), test_utils=("test_faketensor",))
