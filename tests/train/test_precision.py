"""Tests half precision in whole runs: overflowing steps change nothing, and resume is bit-exact."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pentatron.checkpoint.state import TrainState
from pentatron.checkpoint.store import Checkpoint, CheckpointStore
from pentatron.compare.trial import micro_batches
from pentatron.errors import AgreedError, UserError
from pentatron.optim.build import build_optimizer
from pentatron.parallel.world import create_groups, single_process
from pentatron.train.model import ParallelModel, build_parallel_model, model_dtype
from pentatron.train.session import run_training
from pentatron.train.step import train_step
from tests.harness import run_distributed
from tests.support import LLAMA, resolved

RUN = f"{LLAMA} --train-iters 6 --save-interval 3 --keep-checkpoints 9 --log-interval 1 --lr-warmup-iters 3"
# Gradients of this model overflow with the first scales.
FP16 = "--fp16 --initial-loss-scale 1048576 --hysteresis 1 --loss-scale-window 2"


def run(folder: Path, words: str) -> None:
    run_training(resolved(f"{RUN} --run-dir {folder} {words}"), single_process(), resumes=True)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def newest(folder: Path) -> Checkpoint:
    found, _ = CheckpointStore(folder / "checkpoints", keep=None).newest_valid(verify=True, set_aside=True)
    assert found is not None
    return found


def checksums(folder: Path) -> dict[str, str]:
    return {name: record.sha256 for name, record in newest(folder).manifest.files.items()}


def test_a_run_in_fp16_finds_its_scale_skips_and_resumes_to_the_last_bit(tmp_path: Path) -> None:
    run(tmp_path / "whole", FP16)
    state = TrainState.from_json(newest(tmp_path / "whole").manifest.run_state)
    assert 0 < state.skipped_steps < 5, "some steps must overflow and some not"
    assert state.nan_steps == 0, "the loss itself is a number"
    made = 6 - state.skipped_steps
    assert (state.updates, state.scheduled_samples, state.consumed_samples) == (made, 8 * made, 48)
    log = (tmp_path / "whole" / "train.log").read_text()
    skipped = [int(n) for n in re.findall(r"number of skipped iterations: +(\d) \|", log)]
    assert len(skipped) == 6 and sum(skipped) == state.skipped_steps and skipped[0] == 1
    assert re.findall(r"loss scale: ([\d.]+) \|", log)[-1] == f"{state.loss_scaling['scale']:.1f}"
    # The warm-up counts updates, not skipped steps.
    before = [sum(1 - s for s in skipped[:step]) for step in range(6)]
    rates = [row["learning_rate"] for row in rows(tmp_path / "whole")]
    assert rates == pytest.approx([1e-2 * count / 3 for count in before])
    run(tmp_path / "cut", f"{FP16} --train-iters 3 --lr-decay-iters 6")
    assert newest(tmp_path / "cut").manifest.run_state["loss_scaling"]["scale"] < 1048576
    run(tmp_path / "cut", FP16)
    assert checksums(tmp_path / "cut") == checksums(tmp_path / "whole")
    again = TrainState.from_json(newest(tmp_path / "cut").manifest.run_state)
    assert again.loss_scaling == state.loss_scaling and again.updates == made
    assert [r["loss"] for r in rows(tmp_path / "cut")] == [r["loss"] for r in rows(tmp_path / "whole")]


def test_nothing_but_skipped_steps_leaves_the_first_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "none", "--fp16 --train-iters 0 --lr-warmup-iters 0")
    run(tmp_path / "some", "--fp16 --initial-loss-scale 1e30 --train-iters 3 --lr-warmup-iters 0")
    state = TrainState.from_json(newest(tmp_path / "some").manifest.run_state)
    assert (state.skipped_steps, state.updates, state.consumed_samples) == (3, 0, 24)
    weights, after = (
        {n: s for n, s in checksums(tmp_path / name).items() if n.endswith(".safetensors")}
        for name in ("none", "some")
    )
    assert weights and weights == after
    assert (tmp_path / "some" / "loss.svg").is_file(), "losses of skipped steps are losses"
    told = capsys.readouterr().out
    assert told.count("the weights were never updated: every step was skipped") == 1, (
        "not where no steps are asked for"
    )


def test_a_loss_that_is_no_number_at_any_scale_ends_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights beyond the range of fp16: every forward overflows."""
    words = "--fp16 --initial-loss-scale 2 --init-method-std 1e6 --train-iters 60 --save-interval 60"
    with pytest.raises(AgreedError, match=r"step 2\d: fp16 overflows at every loss scale \(now 1\)"):
        run(tmp_path / "a", words)
    log = (tmp_path / "a" / "train.log").read_text()
    assert "number of skipped iterations:   1 | number of nan iterations:   1 |" in log


def test_a_fixed_scale_that_overflows_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(AgreedError, match="training stopped before the weight update"):
        run(tmp_path / "a", "--fp16 --loss-scale 1e30")


# A step that overflows on one rank is skipped by all ranks, in every layout.

LAYOUTS = {
    "tp2 pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "dp2 zero1 overlap": (2, "--zero-stage 1 --overlap-grad-reduce --overlap-param-gather"),
    "dp2 zero2": (2, "--zero-stage 2"),
    "dp2 zero3": (2, "--zero-stage 3"),
    "cp2 ep2": (2, "--context-parallel-size 2 --expert-model-parallel-size 2 --num-experts 4"),
    "pp2 zbv full": (
        2,
        "--pipeline-model-parallel-size 2 --pipeline-schedule zbv --num-layers 4 --recompute-granularity full",
    ),
}


def poison(model: ParallelModel) -> Any:
    """Makes gradients of this rank overflow in the backward of its first layer."""
    stage = model.stages[min(model.stages)]
    layer = next(iter(stage.layers.values()))

    def overflow(module: Any, inputs: Any, output: Tensor) -> Tensor:
        output.register_hook(lambda gradient: gradient * torch.inf)
        return output

    return layer.register_forward_hook(overflow)


def weights_after(words: str, steps: tuple[int, ...], poisoned: int | None) -> tuple[list[bool], list[bytes]]:
    """Returns which steps made an update, and the bits of all state that this rank then has."""
    config = resolved(f"{LLAMA} --micro-batch-size 2 {words} --fp16", dist.get_world_size()).config
    world = create_groups(config.grid, dist.get_rank(), dist.get_rank(), torch.device("cpu"))
    model = build_parallel_model(config, world)
    optimizer = build_optimizer(
        model.stages, world, config.optim, model.decisions.optimizer, model_dtype(config)
    )
    batches = micro_batches(config, world, 0)
    chunks = [list(itertools.islice(batches, config.accumulation)) for _ in range(3)]
    made = []
    for step in steps:
        is_bad = step == poisoned
        # Only the last rank overflows.
        handle = poison(model) if is_bad and world.all_ranks.rank == world.all_ranks.size - 1 else None
        made.append(train_step(model, optimizer, chunks[step], 1e-3, step, 1024.0).updated)
        if handle is not None:
            handle.remove()
    kept = itertools.chain(optimizer.fragments(owned_only=False), model.routers.fragments(owned_only=False))
    return made, [f.values.detach().clone().view(torch.uint8).numpy().tobytes() for f in kept]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_on_one_rank_is_a_step_that_never_was(layout: str) -> None:
    ranks, words = LAYOUTS[layout]
    with_it = run_distributed(weights_after, ranks, words=words, steps=(0, 1, 2), poisoned=1)
    without = run_distributed(weights_after, ranks, words=words, steps=(0, 2), poisoned=None)
    assert [made for made, _ in with_it] == [[True, False, True]] * ranks
    assert [made for made, _ in without] == [[True, True]] * ranks
    assert [bits for _, bits in with_it] == [bits for _, bits in without]


# State of one optimizer in a run with another.


def test_sgd_resumes_and_refuses_the_state_of_another_optimizer(tmp_path: Path) -> None:
    sgd = "--optimizer sgd --lr 0.1"
    run(tmp_path / "whole", sgd)
    run(tmp_path / "cut", f"{sgd} --train-iters 3 --lr-decay-iters 6")
    with pytest.raises(UserError, match=r"holds the state of --optimizer sgd; .*--no-load-optim"):
        run(tmp_path / "cut", "")
    run(tmp_path / "cut", sgd)
    assert checksums(tmp_path / "cut") == checksums(tmp_path / "whole")
    assert any(name.startswith("momentum_buffer/") for name in newest(tmp_path / "cut").manifest.tensors)
    # Without momentum there is no optimizer state, so a run with momentum cannot resume from it.
    run(tmp_path / "plain", f"{sgd} --sgd-momentum 0 --train-iters 3 --lr-decay-iters 6")
    with pytest.raises(UserError, match="holds no momentum, which --sgd-momentum needs"):
        run(tmp_path / "plain", sgd)
    run(tmp_path / "plain", f"{sgd} --sgd-momentum 0")
    run(tmp_path / "new", f"--load {tmp_path / 'plain' / 'checkpoints'} --no-load-optim --train-iters 8")
    state = TrainState.from_json(newest(tmp_path / "new").manifest.run_state)
    assert (state.step, state.updates) == (8, 2)


def test_the_state_of_a_run_is_saved_whole() -> None:
    state = TrainState(step=9, consumed_samples=72, scheduled_samples=64, updates=5, drawn={"a": 3})
    assert TrainState.from_json(state.to_json()) == state


def test_another_first_scale_is_not_taken_for_the_current_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "a", f"{FP16} --train-iters 3 --lr-decay-iters 6")
    before = newest(tmp_path / "a").manifest.run_state["loss_scaling"]["scale"]
    run(tmp_path / "a", f"{FP16} --initial-loss-scale 16")
    assert f"the loss scale continues at {before:g}" in capsys.readouterr().out
