"""Trains on what users' loss functions return; compares gradients with a plain torch loop."""

from typing import Any

import pytest

from pentatron.compare.trial import gather_tensors
from tests.harness import run_distributed
from tests.megatron.objectives import (
    BATCH,
    CASES,
    LAYOUTS,
    LOSSES,
    Case,
    distance,
    plain_loop,
    several,
    stepped,
)

FORMS = ("sum, count, report", "sum, count", "loss, report", "reduced over data")


def assert_trained(found: list[Any], case: Case, micro_batch: int, context: int) -> None:
    name, form = case
    gradients, objective, mean = plain_loop(micro_batch, name, form, context)
    assert distance(gather_tensors([seen for seen, _, _ in found], "gradients 1"), gradients) < 1e-5, case
    for _, loss, reported in found:
        assert loss == pytest.approx(objective, rel=1e-5), case
        if "report" in form:
            assert reported["objective"] == pytest.approx(mean, rel=1e-5), "every rank knows it"


@pytest.mark.parametrize("micro_batch", [1, 2, 8])
@pytest.mark.parametrize("name", LOSSES)
def test_one_process_trains_what_the_function_returns(name: str, micro_batch: int) -> None:
    for form in FORMS:
        assert_trained(
            [stepped(f"--micro-batch-size {micro_batch}", name, form)], (name, form), micro_batch, 1
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_what_the_function_returns(layout: str) -> None:
    ranks, words, context = LAYOUTS[layout]
    by_rank = run_distributed(
        several, ranks, words=f"{words} --micro-batch-size 2", cases=CASES, timeout=120.0
    )
    for case, found in zip(CASES, zip(*by_rank), strict=True):
        assert_trained(list(found), case, 2, context)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [(1, ""), (2, "--pipeline-model-parallel-size 2"), (2, ""), (2, "--tensor-model-parallel-size 2")],
)
@pytest.mark.parametrize("form", ["sum, count", "loss, report"])
def test_losses_of_logits(ranks: int, words: str, form: str) -> None:
    """Padding of the vocabulary must have no probability."""
    given = {"words": f"{words} --micro-batch-size 2", "name": "weighted", "form": form, "of_logits": True}
    found = run_distributed(stepped, ranks, **given)
    gradients, objective, _ = plain_loop(2, "weighted", form, of_logits=True)
    assert distance(gather_tensors([seen for seen, _, _ in found], "gradients 1"), gradients) < 1e-5
    assert found[0][1] == pytest.approx(objective, rel=1e-5)


def test_losses_of_routers_are_left_as_they_are() -> None:
    """Router losses are means over micro-batches, whatever a loss function divides by."""
    experts = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.5"
    seen, _, _ = stepped(f"--micro-batch-size 2 {experts}", "own_mask", "sum, count")
    gradients, _, _ = plain_loop(2, "own_mask", "sum, count", more=experts)
    assert distance(gather_tensors([seen], "gradients 1"), gradients) < 1e-5
    without, _, _ = plain_loop(2, "own_mask", "sum, count", more=f"{experts} --moe-aux-loss-coeff 0.25")
    assert distance(gather_tensors([seen], "gradients 1"), without) > 1e-3, "the losses act"


def test_sums_do_not_depend_on_the_micro_batch_size() -> None:
    norms = [
        stepped(f"--micro-batch-size {size}", "weighted", "sum, count")[0].norms[0] for size in (1, 2, BATCH)
    ]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


@pytest.mark.parametrize("name", ["weighted", "regularised", "factor"])
def test_the_old_behaviour_is_seen(name: str) -> None:
    """Control: a planted bug scales weights to the tokens of a micro-batch and drops terms."""
    (planted,) = run_distributed(
        stepped, 1, words="--micro-batch-size 2", name=name, form="sum, count", bug="normalised"
    )
    gradients, _, _ = plain_loop(2, name, "sum, count")
    assert distance(gather_tensors([planted[0]], "gradients 1"), gradients) > 1e-2
