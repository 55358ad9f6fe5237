"""Tests NaN and inf: stop before the update, recompute, locate the origin; spikes, skipped steps."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import pentatron.train.health as health_module
import pentatron.train.trainer as trainer_module
from pentatron.checkpoint.state import TrainState
from pentatron.checkpoint.store import CheckpointStore
from pentatron.data.gpt_dataset import SyntheticDataset
from pentatron.data.indexed_writer import IndexedDatasetWriter
from pentatron.errors import AgreedError, NonFiniteError
from pentatron.layout.ranks import Grid
from pentatron.monitor.metrics import MetricsFollower
from pentatron.nn.attention import SelfAttention
from pentatron.parallel.world import World, create_groups, single_process
from pentatron.train.health import NumericsCheck
from pentatron.train.output import Output
from pentatron.train.session import RunOutcome, run_training
from pentatron.train.step import StepResult
from tests.harness import run_distributed
from tests.support import LLAMA, resolved

CPU = torch.device("cpu")
RUN = f"{LLAMA} --train-iters 6 --save-interval 4 --keep-checkpoints 9 --log-interval 1 --micro-batch-size 2"


def run(folder: Path, words: str = "", world: World | None = None) -> RunOutcome:
    size = 1 if world is None else world.all_ranks.size
    return run_training(resolved(f"{RUN} --run-dir {folder} {words}", size), world or single_process(), True)


def steps(folder: Path) -> list[str]:
    return sorted(p.name[-1] for p in (folder / "checkpoints").glob("step-*"))


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Poison:
    """Adds NaN to the output or gradient of one layer's attention in chosen calls, counted from 1."""

    def __init__(self, layer: int, is_due: Callable[[int], bool], of_gradient: bool = False) -> None:
        self.layer, self.is_due, self.of_gradient, self.calls = layer, is_due, of_gradient, 0
        self.original = SelfAttention.forward

    def install(self, patched: pytest.MonkeyPatch) -> None:
        poison, build = self, SelfAttention.__init__

        def numbered(module: SelfAttention, *arguments: Any, layer_number: int = 1, **named: Any) -> None:
            build(module, *arguments, layer_number=layer_number, **named)
            module.poisoned = layer_number == poison.layer  # type: ignore[assignment]

        def forward(module: SelfAttention, *arguments: Any, **named: Any) -> torch.Tensor:
            made = poison.original(module, *arguments, **named)
            if not torch.is_grad_enabled() or not module.poisoned:
                return made
            poison.calls += 1
            if not poison.is_due(poison.calls):
                return made
            if poison.of_gradient:
                made.register_hook(lambda gradient: gradient * math.nan)
                return made
            return made + math.nan

        patched.setattr(SelfAttention, "__init__", numbered)
        patched.setattr(SelfAttention, "forward", forward)


def test_reproducible_nan_is_located_and_the_step_before_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A step has four micro-batches, so NaN begins with the third micro-batch of step 3.
    Poison(2, lambda call: call >= 11).install(monkeypatch)
    with pytest.raises(NonFiniteError) as error:
        run(tmp_path / "a")
    assert error.value.exit_code == NonFiniteError.REPRODUCIBLE == 16
    text = str(error.value)
    assert text.startswith(
        "step 3: the loss is nan and the gradient norm nan; training stopped before the weight update"
    )
    # In the recomputation every micro-batch is poisoned.
    assert "begins with the output of layers.1.attention on rank 0, stage 0, micro-batch 0" in text
    assert "--iterations-to-skip 3 skips this step. The checkpoint of step 2" in text
    assert steps(tmp_path / "a") == ["2"]


def test_nan_error_is_the_last_line_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Poison(1, lambda call: call > 1).install(monkeypatch)
    with pytest.raises(NonFiniteError) as error:
        run(tmp_path)
    log = (tmp_path / "train.log").read_text()
    assert log.splitlines()[-1] == f"error: {error.value}"
    assert log.count(str(error.value)) == 1


def failing(folder: str, agreed: bool) -> str:
    """Fails on both ranks: with an agreed error, or on rank 0 only because rank 1 failed."""
    world = create_groups(Grid(data=2), dist.get_rank(), dist.get_rank(), CPU)

    def fail(trainer: object) -> None:
        if agreed:
            raise AgreedError("all met this")
        raise ValueError(f"met by rank {dist.get_rank()}") if dist.get_rank() else SystemExit(1)

    trainer_module.Trainer.run = fail  # type: ignore[assignment]
    try:
        run(Path(folder), "", world)
    except BaseException as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize(
    ("agreed", "line"),
    [(True, "error: all met this"), (False, "error: rank 1: ValueError: met by rank 1")],
)
def test_one_line_says_which_rank_failed(tmp_path: Path, agreed: bool, line: str) -> None:
    assert all(run_distributed(failing, world=2, folder=str(tmp_path), agreed=agreed))
    said = [text for text in (tmp_path / "train.log").read_text().splitlines() if text.startswith("error")]
    assert said == [line]


def test_transient_nan_is_distinguished_from_a_reproducible_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Poison(2, lambda call: call == 11).install(monkeypatch)
    with pytest.raises(
        NonFiniteError,
        match=r"the loss of rank 0\). Recomputed, the loss is [1-9].*a transient hardware fault",
    ) as error:
        run(tmp_path / "a")
    assert error.value.exit_code == NonFiniteError.TRANSIENT == 17
    assert steps(tmp_path / "a") == [], "what a faulty machine holds is not saved"


def test_a_bad_gradient_behind_a_sound_loss_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Poison(2, lambda call: call >= 5, of_gradient=True).install(monkeypatch)
    with pytest.raises(NonFiniteError, match=r"the loss is \d.* and the gradient norm nan") as error:
        run(tmp_path / "a")
    assert "begins with the gradient of layers.1.attention.linear_proj.weight before it was summed" in str(
        error.value
    )


def test_a_bad_weight_comes_before_all_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = trainer_module.train_step

    def damaging(model: Any, *arguments: Any) -> StepResult:
        if arguments[3] == 2:
            with torch.no_grad():
                next(model.stages[0].layers["0"].mlp.parameters()).view(-1)[0] = math.inf
        return original(model, *arguments)

    monkeypatch.setattr(trainer_module, "train_step", damaging)
    with pytest.raises(NonFiniteError, match=r"begins with the weight layers\.0\.mlp\.\S+ on rank 0\."):
        run(tmp_path / "a")


def test_a_mask_that_is_no_number_is_followed_to_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A custom dataset may return such a mask."""
    as_it_is = SyntheticDataset.__getitem__

    def masked(samples: SyntheticDataset, index: int) -> Any:
        sample = as_it_is(samples, index)
        return {**sample, "loss_mask": sample["loss_mask"] * (math.nan if index == 7 else 1.0)}

    monkeypatch.setattr(SyntheticDataset, "__getitem__", masked)
    with pytest.raises(
        NonFiniteError, match=r"the loss is nan .* begins with the loss on rank 0, stage 0"
    ) as error:
        run(tmp_path / "a", "--dataset-size 8")
    assert error.value.exit_code == NonFiniteError.REPRODUCIBLE


def test_without_the_second_look_the_run_just_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Poison(2, lambda call: call >= 5).install(monkeypatch)
    with pytest.raises(AgreedError, match=r"check the data; no checkpoint is saved yet$") as error:
        run(tmp_path / "a", "--rerun-mode disabled")
    assert error.value.exit_code == 2


def test_no_checkpoint_is_promised_where_none_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Poison(2, lambda call: call >= 11).install(monkeypatch)
    with pytest.raises(NonFiniteError, match=r"skips this step\. Nothing is saved$"):
        run(tmp_path / "a", "--no-save-checkpoints")
    assert steps(tmp_path / "a") == []


def test_without_the_check_such_a_step_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Poison(2, lambda call: call == 11).install(monkeypatch)
    assert run(tmp_path / "a", "--no-check-for-nan-in-loss-and-grad").ending is None
    assert [row.get("skipped", False) for row in rows(tmp_path / "a")] == [
        False,
        False,
        True,
        False,
        False,
        False,
    ]
    (line,) = [
        x for x in (tmp_path / "a" / "train.log").read_text().splitlines() if " iteration        3/" in x
    ]
    assert "number of skipped iterations:   1 | number of nan iterations:   1 |" in line


def poisoned(folder: str, words: str, grid: dict[str, int], rank: int) -> str:
    world = create_groups(Grid(**grid), dist.get_rank(), dist.get_rank(), CPU)
    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == rank:
            Poison(2, lambda call: call >= 3).install(patched)
        with pytest.raises(NonFiniteError) as error:
            run(Path(folder), words, world)
    return str(error.value)


@pytest.mark.parametrize(
    ("words", "grid", "rank"),
    [
        ("--zero-stage 1", {"data": 2}, 1),
        ("--zero-stage 3", {"data": 2}, 1),
        ("--tensor-model-parallel-size 2 --sequence-parallel", {"tensor": 2}, 1),
        ("--pipeline-model-parallel-size 2", {"pipeline": 2}, 1),
    ],
)
def test_the_rank_is_named_by_all(tmp_path: Path, words: str, grid: dict[str, int], rank: int) -> None:
    """One rank of two is poisoned; loss or gradients are NaN on both."""
    told = run_distributed(poisoned, world=2, folder=str(tmp_path / "a"), words=words, grid=grid, rank=rank)
    assert told[0] == told[1]
    stage = 1 if "pipeline" in grid else 0
    assert (
        f"begins with the output of layers.1.attention on rank {rank}, stage {stage}, micro-batch 0"
        in told[0]
    )


def test_attention_dropout_is_drawn_alike_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recomputing after a transient hardware fault gives the loss of a run without the fault."""
    run(tmp_path / "whole", "--attention-dropout 0.3")
    Poison(2, lambda call: call == 5).install(monkeypatch)
    with pytest.raises(NonFiniteError) as error:
        run(tmp_path / "a", "--attention-dropout 0.3")
    assert f"the loss is {rows(tmp_path / 'whole')[1]['loss']:.6g} and" in str(error.value)


def test_steps_are_left_out_by_the_number_the_log_gives_them(tmp_path: Path) -> None:
    run(tmp_path / "whole")
    run(tmp_path / "a", "--iterations-to-skip 2 3 --exit-interval 3")
    run(tmp_path / "a", "--iterations-to-skip 2 3")
    every, whole = rows(tmp_path / "a"), rows(tmp_path / "whole")
    assert every[1:3] == [{"step": n, "left_out": True, "consumed_samples": 8 * n} for n in (2, 3)]
    found = [row for row in every if "left_out" not in row]
    assert [row["step"] for row in found] == [1, 4, 5, 6]
    assert found[0]["loss"] == whole[0]["loss"]
    # Left-out steps consume samples, but do not advance the schedule.
    assert [row["consumed_samples"] for row in found] == [8, 32, 40, 48]
    assert found[1]["learning_rate"] == whole[1]["learning_rate"]
    assert found[1]["loss"] != whole[1]["loss"] and found[1]["loss"] != whole[3]["loss"]
    assert "| skipped samples:           16 |" in (tmp_path / "a" / "train.log").read_text()
    store = CheckpointStore(tmp_path / "a" / "checkpoints", keep=None)
    last, _ = store.newest_valid(verify=False, set_aside=False)
    assert last is not None and last.manifest.run_state["updates"] == 4


def test_the_last_losses_are_kept_though_the_last_step_is_left_out(tmp_path: Path) -> None:
    run(tmp_path / "a", "--iterations-to-skip 6 --eval-iters 1 --eval-interval 100 --split 8,1,1")
    last = rows(tmp_path / "a")[-1]
    assert last["step"] == 6 and last["left_out"] and "loss" not in last
    assert last["validation_loss"] > 0 and last["test_loss"] > 0
    seen = MetricsFollower(tmp_path / "a/metrics.jsonl").poll()
    assert (
        seen.step == 6 and seen.recent[-1]["step"] == 5 and seen.validations == {6: last["validation_loss"]}
    )


def test_spikes_are_reported_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(health_module, "_STEPS_BEFORE", 2)
    original = trainer_module.train_step

    def spiking(*arguments: Any) -> StepResult:
        result = original(*arguments)
        factor = 100 if arguments[4] == 4 else 1
        return StepResult(factor * result.loss, factor * result.gradient_norm, result.tokens)

    monkeypatch.setattr(trainer_module, "train_step", spiking)
    run(tmp_path / "a", "--check-for-spiky-loss --check-for-large-grads")
    shown = capsys.readouterr().out
    assert shown.count("warning: step 5: the loss") == 1 and shown.count("warning: ") == 2
    assert "warning: step 5: the gradient norm" in shown
    run(tmp_path / "b")
    assert "warning" not in capsys.readouterr().out


def test_a_run_of_skipped_steps_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run without steps left to train does not print the warning."""
    run(tmp_path / "whole")
    run(tmp_path / "again", f"--load {tmp_path / 'whole'}")
    assert "never updated" not in capsys.readouterr().out
    Poison(2, lambda call: True).install(monkeypatch)
    run(tmp_path / "none", "--no-check-for-nan-in-loss-and-grad")
    assert "every step was skipped, because its loss or a gradient was NaN or inf" in capsys.readouterr().out


def test_a_run_that_left_all_its_steps_out_says_so(tmp_path: Path) -> None:
    run(tmp_path / "a", "--iterations-to-skip 1 2 3 4 5 6")
    log = (tmp_path / "a" / "train.log").read_text()
    assert "finished, but every step was skipped (--iterations-to-skip), so nothing was trained\n" in log
    assert "finished: loss" not in log


def test_first_updates_report_no_spike(tmp_path: Path) -> None:
    """Resumes from a checkpoint without a largest loss, as older ones are."""
    settings = resolved(f"{RUN} --run-dir {tmp_path} --check-for-spiky-loss --check-for-large-grads").config
    told: list[str] = []
    output = Output(SimpleNamespace(say=told.append))  # type: ignore[arg-type]
    state = TrainState(updates=100)
    model: Any = SimpleNamespace(config=settings, world=single_process())
    optimizer: Any = None
    health = NumericsCheck(model, optimizer, state, output)
    health.watch(StepResult(2.0, 1.0, 8))
    assert told == [] and (state.largest_loss, state.largest_norm) == (2.0, 1.0)
    health.watch(StepResult(30.0, 1.0, 8))
    assert len(told) == 1


def test_steps_without_a_label_are_reported(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "ends", np.uint16) as writer:
        for _ in range(40):
            writer.add_document([256] * 9)
    data = f"--data-path {tmp_path / 'ends'} --split 1 --tokenizer-type ByteTokenizer --vocab-size 257 --eod-mask-loss"
    run(tmp_path / "a", f"{data} --eval-interval 0 --train-iters 11")
    log = (tmp_path / "a" / "train.log").read_text()
    assert re.findall(
        r"warning: step (\d+): loss and gradients are 0, in (\d+) steps? so far: no label counts", log
    ) == [
        ("1", "1"),
        ("10", "10"),
    ]
    run(tmp_path / "b")
    assert "no label counts" not in (tmp_path / "b" / "train.log").read_text()
