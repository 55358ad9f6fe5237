"""Tests when a training step waits for the all-reduce of its token count."""

from typing import Any

import pytest

import pentatron.train.step as step_module
from pentatron.compare.trial import micro_batches
from pentatron.optim.optimizer import Optimizer
from pentatron.parallel.world import single_process
from pentatron.train.model import build_parallel_model, model_dtype
from pentatron.train.step import train_step
from tests.support import resolved


class Watched:
    """Pending all-reduce that records when it is waited for."""

    def __init__(self, happened: list[str]) -> None:
        self.happened = happened

    def wait(self) -> None:
        self.happened.append("count waited for")


def test_the_count_of_tokens_holds_up_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    monkeypatch.setattr(step_module, "start_all_reduce_", lambda tensor, group: Watched(happened))
    config = resolved("--micro-batch-size 4").config
    model = build_parallel_model(config, single_process())

    def tell(what: str) -> Any:
        return lambda module, arguments: happened.append(what)

    stage = model.stages[0]
    assert stage.embedding is not None and stage.final_norm is not None
    stage.embedding.register_forward_pre_hook(tell("first layer"))
    stage.final_norm.register_forward_pre_hook(tell("last layer"))
    optimizer = Optimizer(
        model.stages, model.world, config.optim, model.decisions.optimizer, model_dtype(config)
    )
    batches = micro_batches(config, model.world, 0)
    result = train_step(model, optimizer, [next(batches) for _ in range(config.accumulation)], 1e-3, 0)
    first_micro_batch = ["first layer", "last layer", "count waited for"]
    assert happened == [*first_micro_batch, "first layer", "last layer"]
    assert result.tokens > 0
