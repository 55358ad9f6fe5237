"""Tests CUDA graphs of micro-batches: same bits as eager, and notes where they cannot be captured."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pentatron.compare.trial import micro_batches
from pentatron.errors import UserError
from pentatron.optim.build import build_optimizer
from pentatron.optim.optimizer import Optimizer
from pentatron.parallel.world import single_process
from pentatron.plan.memory import memory_of
from pentatron.settings.decision_types import DeviceFacts
from pentatron.settings.decisions import decide
from pentatron.settings.model_sizes import layer_seconds
from pentatron.train import cuda_graphs
from pentatron.train.cuda_graphs import GraphReplay, build_graph_replay
from pentatron.train.health import repeat_step
from pentatron.train.model import ParallelModel, build_parallel_model, model_dtype
from pentatron.train.step import evaluate, train_step
from tests.support import resolved

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DROPOUT = "--hidden-dropout 0.2 --attention-dropout 0 --micro-batch-size 2"
# Micro-batches of each step. Steps with one, two and more use different graphs; the count changes as in a
# batch ramp-up.
COUNTS = (1, 1, 3, 3, 2, 4, 1)


class Rehearsed:
    """Imitates a CUDA graph on a CPU.

    A replay runs the work again on the same memory and reads its current values.
    """

    def __init__(self, optimizer: Optimizer, breaks: bool = False) -> None:
        self.optimizer, self.breaks = optimizer, breaks
        self.graphs = self.replays = self.pool_bytes = 0

    def memory_problem(self) -> str:
        return ""

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        before = self._values()
        kept = [None if t is None else t.clone() for t in before]
        generator = torch.get_rng_state()
        loss = work().clone()
        if self.breaks:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        after = self._values()
        # A capture computes nothing.
        for place, value in zip(before, kept):
            if place is not None and value is not None:
                place.copy_(value)
        torch.set_rng_state(generator)
        self.graphs += 1

        def replay() -> None:
            self.replays += 1
            for storage, value in zip(self.optimizer.gradient_storages, before):
                storage.values = value
            loss.copy_(work())
            for place, value in zip(after, self._values()):
                if place is not None and value is not None and place is not value:
                    place.copy_(value)

        return replay, loss

    def _values(self) -> list[Tensor | None]:
        return [storage.values for storage in self.optimizer.gradient_storages]


class Run:
    """Runs steps of a small model with a changing loss scale and an evaluation in between."""

    def __init__(self, words: str, device: torch.device = CPU, recorded: bool = False) -> None:
        self.config = resolved(f"{DROPOUT} {words}").config
        self.world = single_process(device)
        model = build_parallel_model(self.config, self.world)
        made = build_optimizer(
            model.stages, self.world, self.config.optim, model.decisions.optimizer, model_dtype(self.config)
        )
        assert isinstance(made, Optimizer)
        self.model, self.optimizer = model, made
        self.recorder = Rehearsed(made)
        if recorded:
            self.use(GraphReplay(self.recorder))

    def use(self, recording: GraphReplay) -> None:
        self.model = ParallelModel(**{**vars(self.model), "recording": recording})

    def numbers(self, counts: tuple[int, ...] = COUNTS, first: int = 0) -> list[float]:
        # Attention dropout draws from torch's generators, which all runs of a process share.
        torch.manual_seed(1)
        batches = micro_batches(self.config, self.world, 0)
        found = []
        for step, count in enumerate(counts, first):
            drawn = list(itertools.islice(batches, count))
            # The loss scale changes with each step, as in fp16.
            result = train_step(self.model, self.optimizer, drawn, 1e-2, step, 2.0**step)
            found += [result.loss, result.gradient_norm]
            if step == 3:
                found.append(evaluate(self.model, drawn, 2)[0])
        return found

    def weights(self) -> list[Tensor]:
        return [f.values.clone() for f in self.optimizer.fragments(owned_only=False)]


def same(one: Run, other: Run, counts: tuple[int, ...] = COUNTS) -> bool:
    numbers = one.numbers(counts) == other.numbers(counts)
    return numbers and all(map(torch.equal, one.weights(), other.weights()))


@pytest.mark.parametrize(
    ("words", "graphs_of"),
    [
        ("--bf16", 3),
        ("", 2),
        ("--fp16", 3),
        ("--zero-stage 2", 2),
        ("--attention-dropout 0.2", 2),
        ("--bf16 --fp8 hybrid", 3),
    ],
)
def test_replayed_steps_have_the_same_bits(words: str, graphs_of: int) -> None:
    recorded = Run(words, recorded=True)
    assert same(Run(words), recorded)
    # Each variant (no, one or several gradients so far) first runs eagerly. With fp32 gradients the second
    # micro-batch is the same variant as later ones.
    assert recorded.recorder.graphs == graphs_of and recorded.recorder.replays == sum(COUNTS) - graphs_of


def test_changing_inputs_are_copied_into_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control of the test above: an input that is not copied changes the numbers."""
    as_it_is = cuda_graphs._Inputs.take
    plain = Run("").numbers((1, 1, 1, 1))
    for forgotten in ("tokens", "keys", "divisor", "scale"):

        def take(own, batch, keys, divisor, scale, forgotten=forgotten):  # type: ignore[no-untyped-def]
            batch = own.batch if forgotten == "tokens" else batch
            keys = own.keys if forgotten == "keys" else keys
            divisor = own.divisor if forgotten == "divisor" else divisor
            as_it_is(own, batch, keys, divisor, 1.0 if forgotten == "scale" else scale)

        monkeypatch.setattr(cuda_graphs._Inputs, "take", take)
        found = Run("", recorded=True).numbers((1, 1, 1, 1))
        assert found[:2] == plain[:2] and found != plain, forgotten


def test_scales_of_weights_are_written_where_a_graph_reads_them() -> None:
    run = Run("--bf16 --fp8 hybrid")

    def scales() -> list[Tensor]:
        run.model.weight_scales.refresh()
        linears = [m for m in run.model.stages[0].modules() if getattr(m, "fp8", None) is not None]
        return [scale for linear in linears for scale in linear.scale.known]

    before = scales()
    values = [scale.item() for scale in before]
    with torch.no_grad():
        for parameter in run.model.stages[0].parameters():
            parameter.mul_(16)
    after = scales()
    assert before and all(old is new for old, new in zip(before, after, strict=True))
    assert values != [scale.item() for scale in after]


@pytest.mark.parametrize(("words", "count"), [("--bf16", 1), ("--bf16", 2), ("--bf16", 3), ("", 3)])
def test_gradients_that_stay_are_those_that_are_planned(words: str, count: int) -> None:
    run = Run(f"{words} --global-batch-size {2 * count}", recorded=True)
    run.numbers((count,) * 3)
    graphs_of = run.model.recording._graphs.values()
    kept = {
        t.data_ptr(): t.nbytes for graph in graphs_of for t in (*graph.before, *graph.after) if t is not None
    }
    config = resolved(f"{DROPOUT} {words} --global-batch-size {2 * count} --cuda-graphs on").config
    planned = memory_of(config, on_gpu=True).largest
    assert run.recorder.graphs == min(count, 3 if words else 2)
    assert sum(kept.values()) == planned.static.gradients + planned.graphs


def test_a_batch_of_another_shape_runs_as_it_is() -> None:
    run = Run("", recorded=True)
    run.numbers((1, 1))
    short = [b.map(lambda t: t[:1]) for b in itertools.islice(micro_batches(run.config, run.world, 0), 2)]
    plain = Run("")
    plain.numbers((1, 1))
    for one in (run, plain):
        train_step(one.model, one.optimizer, short, 1e-2, 2)
    assert run.recorder.replays == 1 and all(map(torch.equal, run.weights(), plain.weights()))


# What is unusual in each step of two micro-batches: a shorter micro-batch, NaN, inf or nothing.
EVENTS = ("", "", "", "first short", "", "second short", "", "nan", "", "inf", "")
SOUND_SIZES = tuple(event for event in EVENTS if "short" not in event)


def disturbed(run: Run, events: tuple[str, ...]) -> list[str]:
    """Returns loss and gradient norm of each step as text, since NaN is not equal to itself."""
    torch.manual_seed(1)
    batches, told = micro_batches(run.config, run.world, 0), []
    for step, event in enumerate(events):
        drawn = list(itertools.islice(batches, 2))
        if "short" in event:
            at = 0 if event == "first short" else 1
            drawn[at] = drawn[at].map(lambda t: t[:1])
        if event == "nan":
            # Two tokens with huge loss weights of opposite sign: the loss is inf - inf.
            mask = drawn[0].loss_mask.clone()
            mask[0, 0], mask[0, 1] = 3e38, -3e38
            drawn[0] = replace(drawn[0], loss_mask=mask)
        before = run.weights()
        scale = float("inf") if event == "inf" else 1.0
        result = train_step(run.model, run.optimizer, drawn, 1e-2, step, scale)
        stood_still = all(map(torch.equal, before, run.weights()))
        assert result.updated is (event not in ("nan", "inf")) is not stood_still, (step, event)
        told.append(f"{result.loss!r} {result.gradient_norm!r}")
    return told


def replays_of(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Records from now on whether each micro-batch is replayed."""
    found: list[bool] = []
    as_it_is = GraphReplay.forward

    def forward(recording: GraphReplay, *given: Any) -> Tensor | None:
        made = as_it_is(recording, *given)
        found.append(made is not None)
        return made

    monkeypatch.setattr(GraphReplay, "forward", forward)
    return found


def expected_replays(events: tuple[str, ...]) -> list[bool]:
    """Returns which micro-batches are replayed.

    The first step runs eagerly, and so do a short micro-batch and one that adds to its gradients.
    """
    kinds = {"first short": [False, False], "second short": [True, False]}
    return [False, False, *itertools.chain(*(kinds.get(event, [True, True]) for event in events[1:]))]


@pytest.mark.parametrize("words", ["--bf16", "", "--fp16", "--bf16 --fp8 hybrid"])
def test_after_steps_out_of_the_ordinary_replays_have_the_same_bits(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, recorded = Run(words), Run(words, recorded=True)
    expected = disturbed(plain, EVENTS)
    replayed = replays_of(monkeypatch)
    assert disturbed(recorded, EVENTS) == expected
    assert replayed == expected_replays(EVENTS)
    assert all(map(torch.equal, plain.weights(), recorded.weights()))
    assert all("nan" in expected[EVENTS.index(event)] for event in ("nan", "inf"))


def test_a_step_that_is_looked_into_runs_as_it_is() -> None:
    run = Run("", recorded=True)
    run.numbers((1, 1))
    batches = list(itertools.islice(micro_batches(run.config, run.world, 0), 1))
    assert repeat_step(run.model, run.optimizer, batches, 2, 1.0)[1] is None
    assert run.recorder.replays == 1


def test_failed_recording_is_reported_once_or_ends_the_run() -> None:
    run = Run("--bf16")
    run.use(GraphReplay(Rehearsed(run.optimizer, breaks=True)))
    assert same(Run("--bf16"), run)
    (line,) = run.model.recording.pop_lines()
    assert "CUDA graphs are not used" in line and "(RuntimeError: operation not permitted)" in line
    assert list(run.model.recording.pop_lines()) == []
    required = Run("")
    required.use(GraphReplay(Rehearsed(required.optimizer, breaks=True), required=True))
    with pytest.raises(UserError, match="--cuda-graphs on: a micro-batch cannot be captured"):
        required.numbers((1, 1))


def test_recording_time_is_reported() -> None:
    run = Run("", recorded=True)
    run.numbers((1, 2, 2))
    (line,) = run.model.recording.pop_lines()
    assert "recorded as 2 CUDA graphs in " in line


H200 = DeviceFacts("cuda", "NVIDIA H200", (9, 0), 989)


def recording_of(words: str, device: torch.device = CUDA, has_custom_program: bool = False) -> GraphReplay:
    config = resolved(words).config
    facts = H200 if device == CUDA else DeviceFacts(device.type)
    return build_graph_replay(config, decide(config, facts, has_custom_program).graphs, device)


GPT2 = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257 --bf16 --cuda-graphs auto "
    "--global-batch-size 64 --micro-batch-size {}"
)


def test_by_default_where_launching_takes_longer_than_computing() -> None:
    small, large = (resolved(GPT2.format(size)).config for size in (8, 32))
    seconds = [layer_seconds(c.model, c.moe, c.train.micro_batch_size or 1, 989) for c in (small, large)]
    assert 0.9e-3 < seconds[0] < 1.5e-3 < 3e-3 < seconds[1]
    assert recording_of(GPT2.format(8)).recorder is not None
    assert recording_of(GPT2.format(32)).recorder is None
    assert recording_of(GPT2.format(32).replace("auto", "on")).recorder is not None
    for words in (GPT2.format(8).replace("auto", "off"), GPT2.format(8).replace("auto", "none")):
        assert recording_of(words).recorder is None
    assert recording_of(GPT2.format(8), CPU).recorder is None
    # fp8 has more kernels to launch and less to compute.
    for size, records in ((8, True), (32, True), (128, False)):
        words = (
            f"{GPT2.format(size).replace('--global-batch-size 64', '--global-batch-size 128')} --fp8 hybrid"
        )
        assert (recording_of(words).recorder is not None) is records


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--num-experts 4 --moe-router-topk 2 --disable-bias-linear", "an expert"),
        ("--reset-attention-mask", "document boundaries"),
        ("--timing-log-level 2", "separately"),
        ("--recompute-granularity selective --attention-dropout 0.1", "random generator"),
    ],
)
def test_reasons_against_recording_are_reported(words: str, reason: str) -> None:
    found = recording_of(f"--bf16 --cuda-graphs auto {words}")
    assert found.recorder is None and reason in found.notes[0]
    with pytest.raises(UserError, match=reason):
        resolved(f"--bf16 --cuda-graphs on {words}")


def test_recording_leaves_memory_for_the_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory held by graphs is not available to a later evaluation."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 30 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30 * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * 2**30, 40 * 2**30))
    for evaluated, lacking in ((8, ""), (512, "the rest of the run")):
        words = f"--eval-interval 10 --eval-micro-batch-size {evaluated} --eval-global-batch-size {evaluated}"
        recorder = recording_of(f"{GPT2.format(8)} {words}").recorder
        assert (
            recorder is not None
            and lacking in recorder.memory_problem()
            and bool(recorder.memory_problem()) is bool(lacking)
        )


def test_programs_of_users_are_not_recorded() -> None:
    (note,) = recording_of("--bf16 --cuda-graphs auto", has_custom_program=True).notes
    assert "a custom model" in note
    with pytest.raises(UserError, match="a custom model"):
        recording_of("--bf16 --cuda-graphs on", has_custom_program=True)
    with pytest.raises(UserError, match="no NVIDIA GPU"):
        recording_of("--bf16 --cuda-graphs on", CPU)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "words",
    [
        "--bf16 --compile off",
        "--bf16 --compile on",
        "--bf16 --compile off --attention-dropout 0.1",
        "--bf16 --compile on --attention-dropout 0.1",
        "--fp16 --compile off",
        "--compile off --no-fused-update --no-cross-entropy-loss-fusion",
        "--bf16 --compile off --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--bf16 --compile on --recompute-granularity selective --recompute-modules core_attn mlp",
        "--bf16 --compile off --fp8 hybrid",
        "--bf16 --compile on --fp8 hybrid",
        "--bf16 --compile on --fp8 e4m3 --fp8-output-layer",
        "--bf16 --compile off --fp8 hybrid --fp8-recipe rowwise",
    ],
)
def test_graphs_on_the_gpu_have_the_same_bits(words: str) -> None:
    plain, replayed = (Run(f"{words} --cuda-graphs {how}", CUDA) for how in ("off", "on"))
    assert same(plain, replayed)
    assert len(replayed.model.recording._graphs) == (3 if "16" in words else 2)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("words", "events"),
    [
        ("--bf16 --compile off", EVENTS),
        ("--fp16 --compile off", EVENTS),
        ("--compile off --no-fused-update --no-cross-entropy-loss-fusion", EVENTS),
        ("--bf16 --compile off --fp8 hybrid", EVENTS),
        # Another size may lead torch.compile to dynamic-shape kernels, whose bits may differ from captured
        # ones.
        ("--bf16 --compile on", SOUND_SIZES),
    ],
)
def test_graphs_on_the_gpu_have_the_same_bits_after_steps_out_of_the_ordinary(
    words: str, events: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, recorded = (Run(f"{words} --cuda-graphs {how}", CUDA) for how in ("off", "on"))
    expected = disturbed(plain, events)
    replayed = replays_of(monkeypatch)
    assert disturbed(recorded, events) == expected
    assert replayed == expected_replays(events)
    assert all(map(torch.equal, plain.weights(), recorded.weights()))
