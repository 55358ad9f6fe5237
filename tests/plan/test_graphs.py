"""Tests planned memory of runs whose micro-batches are captured as CUDA graphs."""

import dataclasses
import itertools

import pytest

from pentatron.cli.plan import as_data, plan_layouts
from pentatron.cli.plan_report import as_text
from pentatron.compare.trial import micro_batches
from pentatron.nn import loss
from pentatron.plan import activations, memory
from pentatron.plan.fit import AvailableMemory, check_device_memory
from pentatron.plan.memory import RankMemory, memory_of
from pentatron.plan.search import usable_memory
from pentatron.plan.sizes import PlanSizes
from pentatron.settings.run_config import RunConfig
from pentatron.train.model import build_parallel_model
from pentatron.train.step import evaluate
from tests.parity.trajectory import here
from tests.plan.on_gpu import QWEN2, configured
from tests.plan.test_peak import SHAPE, Living
from tests.support import resolved

GIB = 2**30
GPT2 = "--preset gpt2 --hidden-dropout 0 --attention-dropout 0 --seq-length 1024 --micro-batch-size 8 --global-batch-size 8"


def planned(words: str) -> RankMemory:
    return memory_of(configured(words), on_gpu=True).largest


@pytest.mark.parametrize(("words", "plain", "recorded"), [(QWEN2, 50.6, 52.0), (GPT2, 4.8, 5.0)])
def test_a_step_of_one_micro_batch_needs_no_more(words: str, plain: float, recorded: float) -> None:
    """`plain` and `recorded` are GiB measured on an H200 without evaluation, in allocator blocks."""
    off, on = (planned(f"{words} --eval-iters 0 --cuda-graphs {how}") for how in ("off", "on"))
    assert off.total == on.total and on.graphs == 0
    assert off.total / GIB == pytest.approx(plain, rel=0.02)
    assert on.total / GIB == pytest.approx(recorded, rel=0.06)


def test_the_first_gradients_stay_beside_their_sums() -> None:
    for steps in (2, 3, 4):
        words = f"{QWEN2} --eval-iters 0 --micro-batch-size 1 --global-batch-size {steps}"
        off, on = (planned(f"{words} --cuda-graphs {how}") for how in ("off", "on"))
        assert on.graphs == on.static.weights == off.static.gradients // 2
        # With two micro-batches, sums are allocated while activations are freed.
        assert on.total - off.total == on.graphs - (on.not_simultaneous - off.not_simultaneous) <= on.graphs
        assert (on.not_simultaneous > off.not_simultaneous) is (steps == 2)
    in_fp32 = f"{GPT2} --no-bf16 --eval-iters 0 --micro-batch-size 1"
    assert planned(f"{in_fp32} --cuda-graphs on").graphs == 0


def test_evaluation_and_update_do_not_share_graph_memory() -> None:
    on = planned(f"{GPT2} --cuda-graphs on")
    assert on.graphs == 2 * 2 * 8192 * 768 + 2 * 4096 * 50304, "the stream twice, and logits of 4096 tokens"
    assert planned(f"{GPT2} --cuda-graphs on --eval-interval 0").graphs == 0
    # A given test set is evaluated at the end in any case.
    config = configured(f"{GPT2} --cuda-graphs on --eval-interval 0")
    named = dataclasses.replace(config, data=dataclasses.replace(config.data, test_data_path=("test",)))
    assert memory_of(named, on_gpu=True).largest.graphs == on.graphs
    larger = f"{GPT2} --cuda-graphs on --eval-micro-batch-size 64 --eval-global-batch-size 64"
    assert planned(larger).graphs > 2 * on.graphs
    by_torch = planned(f"{GPT2} --cuda-graphs on --eval-interval 0 --no-fused-update")
    assert by_torch.graphs == 4 * max(50304 * 768, 2**25)


def peak_of_an_evaluation(config: RunConfig) -> int:
    world = here(config)
    model = build_parallel_model(config, world)
    batches = list(itertools.islice(micro_batches(config, world, 0), 2))
    with Living() as living:
        evaluate(model, batches, 1)
    return living.peak


@pytest.mark.parametrize(
    ("words", "least"),
    [
        ("--seq-length 128 --vocab-size 4000", 0.95),
        ("--seq-length 128 --vocab-size 4000 --cross-entropy-loss-fusion", 0.6),
        # The forward peak of a layer is below the sum of all tensors that it could save.
        ("--seq-length 512 --vocab-size 40", 0.3),
    ],
)
def test_an_evaluation_has_no_more_than_planned(words: str, least: float) -> None:
    config = resolved(f"{SHAPE} {words} --eval-interval 1").config
    found = peak_of_an_evaluation(config) / memory._evaluation_peak(PlanSizes(config))
    assert least < found <= 1.0, found


def test_logits_are_evaluated_as_many_at_a_time_as_planned() -> None:
    assert activations._EVALUATED == loss._EVALUATION_CHUNK


def test_where_they_are_a_choice_of_ours_nothing_is_made_of_them_but_a_line() -> None:
    words = f"{GPT2.replace('--global-batch-size 8', '--global-batch-size 16')} --bf16 --gpus 1 --gpu h200".split()
    report = plan_layouts(words)[0]
    plain, recorded = report.shown.largest, report.shown.with_graphs
    assert plain.graphs == 0 and recorded is not None and recorded.total > plain.total
    (line,) = [line for line in as_text(report).splitlines() if line.startswith("  with graphs")]
    assert f"{recorded.total / GIB:.3g} GiB" in line
    assert as_data(report)["layouts"][0]["largest_bytes_if_recorded"] == recorded.total
    for other in (["--cuda-graphs", "off"], ["--cuda-graphs", "on"]):
        assert plan_layouts([*words, *other])[0].shown.with_graphs is None, other
    assert plan_layouts([*words[:-4], "--gpus", "2", "--gpu", "h200"])[0].shown.with_graphs is None
    # A device with room for steps without graphs only.
    between = (plain.total + recorded.total) / 2
    scarce = dataclasses.replace(report.search.device, memory=int((between + GIB) / 0.95))
    layout = dataclasses.replace(report.shown, search=dataclasses.replace(report.search, device=scarce))
    assert plain.total < usable_memory(scarce) < recorded.total and layout.fits and layout.with_graphs is None


def test_run_that_may_not_fit_is_advised_to_disable_graphs() -> None:
    config = configured(f"{GPT2} --cuda-graphs on")
    verdict = check_device_memory(
        config, 0, AvailableMemory("GPU", 8 * GIB, planned(f"{GPT2} --cuda-graphs on").total)
    )
    assert verdict is not None and "beside CUDA graphs " in verdict.sentence
    assert "try --cuda-graphs off, " in verdict.sentence
