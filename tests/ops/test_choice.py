"""Runs torch's operations if Triton is installed but cannot work, and prints the reason once."""

import dataclasses
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pentatron.ops import dispatch
from pentatron.parallel.world import single_process
from pentatron.train.run_header import _without_kernels

MISSING = "Failed to find C compiler. Please specify via CC environment variable"
ON_A_GPU: Any = SimpleNamespace(is_cuda=True)


@pytest.fixture(autouse=True)
def tried_anew() -> Iterator[None]:
    dispatch.triton_problem.cache_clear()
    yield
    dispatch.triton_problem.cache_clear()


def trial(monkeypatch: pytest.MonkeyPatch, found: bool | Exception) -> list[int]:
    """Fakes an installed Triton whose first kernel returns or raises `found`; returns a list of its runs."""
    tries: list[int] = []

    def stored() -> bool:
        tries.append(1)
        if isinstance(found, Exception):
            raise found
        # Computes with real memory even when called by a compiler, whose own tensors are fake.
        return found and bool(torch.zeros(1).add_(1).item() == 1)

    module = ModuleType("pentatron.ops.triton_activation")
    module.stored = stored  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    return tries


def test_without_a_c_compiler_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = trial(monkeypatch, RuntimeError(f"{MISSING}\nand more"))
    cpu = single_process(torch.device("cpu"))
    gpu = dataclasses.replace(cpu, device=torch.device("cuda"))
    assert not dispatch.uses_triton(ON_A_GPU) and not dispatch.uses_triton(ON_A_GPU)
    (note,) = _without_kernels(gpu)
    assert f"(RuntimeError: {MISSING})" in note and "\n" not in note
    assert tries == [1], "once in a process"
    assert _without_kernels(cpu) == []


def test_where_it_works_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    trial(monkeypatch, True)
    gpu = dataclasses.replace(single_process(torch.device("cpu")), device=torch.device("cuda"))
    assert dispatch.uses_triton(ON_A_GPU) and not dispatch.uses_triton(torch.zeros(1))
    assert _without_kernels(gpu) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
def test_a_trial_without_a_gpu_fails_in_a_few_words() -> None:
    assert dispatch.triton_problem()


@pytest.mark.parametrize("works", [True, False])
def test_compiled_code_uses_the_triton_trial(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    trial(monkeypatch, works)

    def answer(x: Tensor) -> Tensor:
        return x + (1 if dispatch.triton_works() else 2)

    torch._dynamo.reset()
    # `nn.compiled` marks the function as a constant in the same way.
    monkeypatch.setattr(dispatch.triton_works, "_dynamo_marked_constant", True, raising=False)
    found = torch.compile(answer, backend="eager", fullgraph=True)(torch.zeros(1))
    assert found.item() == (1 if works else 2)
