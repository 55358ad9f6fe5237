"""All-gathers that overlap with forward, delayed until `wait`, so that a missing wait is detected."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import pentatron.parallel.buckets as gathering
from pentatron.layout.ranks import Grid
from pentatron.parallel.world import single_process
from tests.harness import run_distributed
from tests.optim.tiny import here, parallel, trajectory
from tests.parallel.test_reduction import assert_close
from tests.parity.trajectory import on_a_rank, run
from tests.support import LLAMA


class Lazy:
    """A collective that starts only when it is waited for."""

    def __init__(self, collective: Callable[[], Any]) -> None:
        self.collective = collective

    def wait(self) -> None:
        self.collective()


def lazy_gathers() -> None:
    real = gathering.start_all_gather_into

    def put_off(*arguments: Any) -> Any:
        def act() -> None:
            real(*arguments).wait()

        return Lazy(act)

    gathering.start_all_gather_into = put_off  # type: ignore[assignment]


def lazily(zero: int, hooks: bool) -> dict[str, Any]:
    lazy_gathers()
    if not hooks:
        torch.nn.Module.register_forward_pre_hook = lambda self, hook: None  # type: ignore[method-assign,assignment]
    return trajectory(here(Grid(data=2)), parallel(zero, param=True), 2)


@pytest.mark.parametrize("zero", [1, 2])
def test_modules_wait_for_the_weights_they_use(zero: int) -> None:
    reference = trajectory(single_process(), parallel(), 2)
    for found in run_distributed(lazily, 2, zero=zero, hooks=True):
        assert_close(found, reference)
    with pytest.raises(AssertionError):
        for found in run_distributed(lazily, 2, zero=zero, hooks=False):
            assert_close(found, reference)


def lazy_language_model(words: str, hooks: bool) -> list[float]:
    lazy_gathers()
    if not hooks:
        torch.nn.Module.register_forward_pre_hook = lambda self, hook: None  # type: ignore[method-assign,assignment]
    return run(words, 2).losses


@pytest.mark.parametrize("tying", ["", "--untie-embeddings-and-output-weights"])
def test_the_language_model_waits_for_its_weights(tying: str) -> None:
    words = (
        f"{LLAMA} --micro-batch-size 2 --zero-stage 1 --overlap-param-gather --ddp-bucket-size 3000 {tying}"
    )
    expected = run_distributed(on_a_rank, 2, words=words.replace("--overlap-param-gather", ""))[0].losses
    assert run_distributed(lazy_language_model, 2, words=words, hooks=True) == [expected] * 2
    assert run_distributed(lazy_language_model, 2, words=words, hooks=False)[0] != expected
