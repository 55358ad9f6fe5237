"""Tests timers, profiles, garbage collection, weight comparison and start-up times of a run."""

import gc
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import pentatron.train.trainer as trainer_module
from pentatron.checkpoint.store import CheckpointStore
from pentatron.errors import AgreedError
from pentatron.layout.ranks import Grid
from pentatron.monitor.display import SilentDisplay
from pentatron.parallel.timers import Timers, block_of
from pentatron.parallel.world import create_groups, single_process
from pentatron.settings.decision_types import DeviceFacts
from pentatron.settings.decisions import decide
from pentatron.train.output import Output
from pentatron.train.session import run_training
from pentatron.train.step import StepResult
from pentatron.train.step_hooks import StepHooks
from tests.harness import run_distributed
from tests.support import LLAMA, resolved

RUN = f"{LLAMA} --train-iters 4 --save-interval 4 --log-interval 2 --micro-batch-size 2"


def run(folder: Path, words: str = "", started: float | None = None) -> str:
    """Trains and returns the log."""
    settings = resolved(f"{RUN} --run-dir {folder} {words}")
    run_training(settings, single_process(), True, started=started)
    return (folder / "train.log").read_text()


def on_ranks(folder: str, words: str, grid: dict[str, int]) -> None:
    world = create_groups(Grid(**grid), dist.get_rank(), dist.get_rank(), torch.device("cpu"))
    run_training(resolved(f"{RUN} --run-dir {folder} {words}", world.all_ranks.size), world, True)


def test_a_block_reads_as_megatrons() -> None:
    ranks = [{"optimizer": 2.0, "forward-backward": 10.123}, {"optimizer": 3.5, "forward-backward": 9.0}]
    assert block_of(ranks, "minmax").splitlines() == [
        "(min, max) time across ranks (ms):",
        "    forward-backward ...............................: (9.00, 10.12)",
        "    optimizer ......................................: (2.00, 3.50)",
    ]
    assert block_of(ranks, "max").splitlines()[1].endswith(".: 10.12")
    assert block_of(ranks, "all").splitlines()[2:4] == ["     rank  0: 10.12", "     rank  1: 9.00"]


def test_timer_excludes_waiting_inside_a_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    timers, clock = Timers(2), iter([0.0, 0.0, 1.0, 4.0, 9.0, 9.0])
    monkeypatch.setattr(timers, "now", lambda: next(clock))
    with timers("forward-backward", 1), timers("forward-compute", 2), timers("forward-recv", 2):
        pass
    block = timers.block(single_process().all_ranks)
    assert block is not None
    shown = dict(re.findall(r"    (\S+) \.*: \((\S+),", block))
    assert shown == {"forward-backward": "9000.00", "forward-compute": "6000.00", "forward-recv": "3000.00"}
    assert timers.block(single_process().all_ranks) is None


def test_timers_show_the_parts_of_their_level(tmp_path: Path) -> None:
    words = "--pipeline-model-parallel-size 2 --timing-log-level 2"
    run_distributed(on_ranks, world=2, folder=str(tmp_path / "a"), words=words, grid={"pipeline": 2})
    log = (tmp_path / "a" / "train.log").read_text()
    _, _, block = log.partition("iteration        4/")
    names = re.findall(r"^    (\S+) \.+: \(\d+\.\d\d, \d+\.\d\d\)$", block, re.M)
    assert {
        "forward-backward",
        "forward-compute",
        "backward-compute",
        "forward-recv",
        "backward-send",
    } <= set(names)
    assert {"batch-generator", "all-grads-sync", "optimizer"} <= set(names)
    one = run(tmp_path / "b", "--timing-log-level 1")
    assert one.count("forward-backward ...") == 2 and "forward-compute" not in one
    # The default level logs only the start and work outside steps.
    assert "forward-backward ..." not in run(tmp_path / "c")


def test_timers_of_saves_and_evaluations_are_reported_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports saves and evaluations undivided; averages step timers over the steps since the last line."""
    start = CheckpointStore.start

    def slowly(*arguments: Any) -> Any:
        time.sleep(0.2)
        return start(*arguments)

    monkeypatch.setattr(CheckpointStore, "start", slowly)
    asked: list[int] = []
    block = Timers.block

    def noting(timers: Timers, group: Any, steps: int = 1, only: str | None = None) -> str | None:
        asked.append(steps) if only is None else None
        return block(timers, group, steps, only)

    monkeypatch.setattr(Timers, "block", noting)
    words = "--log-interval 3 --save-interval 2 --eval-interval 2 --eval-iters 1 --timing-log-level 1"
    log = run(tmp_path / "a", words)
    found = re.findall(
        r"successfully saved .*\n\(min, max\) .*\n    save-checkpoint \.+: \((\d+\.\d\d), .*\n(?!    )", log
    )
    assert len(found) == 2 and all(float(time) >= 200 for time in found)
    assert len(re.findall(r"^-+\n\(min, max\) .*\n    evaluate \.+: \(.*\n(?!    )", log, re.M)) == 2
    run(tmp_path / "a", f"{words} --train-iters 7")
    # The first start, steps 1 to 3, the second start, steps 5 and 6.
    assert asked == [1, 3, 1, 2]


def test_the_start_is_measured_from_the_first_process(tmp_path: Path) -> None:
    began = time.time() - 100
    log = run(tmp_path / "a", started=began)
    (seconds,) = re.findall(r"^time to initialize \(seconds\): (\d+\.\d{3})$", log, re.M)
    assert 100 <= float(seconds) < 200
    setup = log[log.index("done with setup ...\n(min, max) time across ranks (ms):\n") :]
    assert re.search(r"^    model-and-optimizer-setup \.+: \(", setup, re.M)
    assert re.search(r"^    train/valid/test-data-iterators-setup \.+: \(", setup, re.M)
    moments = json.loads((tmp_path / "a" / "app_metrics.json").read_text())
    assert list(moments) == [
        "app_start_time",
        "app_model_init_start_time",
        "app_model_init_finish_time",
        "app_build_optimizer_start_time",
        "app_build_optimizer_finish_time",
        "app_build_dataiters_start_time",
        "app_build_dataiters_finish_time",
        "app_train_loop_finish_time",
        "app_finish_time",
    ]
    assert list(moments.values()) == sorted(moments.values())
    assert moments["app_start_time"] == pytest.approx(began * 1000, abs=1)


def test_chosen_steps_and_ranks_are_profiled(tmp_path: Path) -> None:
    words = "--profile --profile-step-start 1 --profile-step-end 3 --profile-ranks 1"
    run_distributed(on_ranks, world=2, folder=str(tmp_path / "a"), words=words, grid={"data": 2})
    assert [p.name for p in (tmp_path / "a" / "profile").iterdir()] == ["rank-00001.json"]
    events = json.loads((tmp_path / "a" / "profile" / "rank-00001.json").read_text())["traceEvents"]
    # Two steps of two micro-batches with one embedding each.
    assert sum(e.get("name") == "aten::embedding" for e in events) == 2 * 2


def test_profile_start_before_the_resume_step_is_reported(tmp_path: Path) -> None:
    words = "--profile --profile-step-start 1 --profile-step-end 3"
    assert "nothing is profiled" not in run(tmp_path / "a")
    assert "after step 4, beyond --profile-step-start 1, so nothing is profiled" in run(
        tmp_path / "a", f"{words} --train-iters 5"
    )


def test_manual_garbage_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, seen = trainer_module.train_step, []

    def watched(*arguments: Any) -> StepResult:
        seen.append(gc.isenabled())
        return original(*arguments)

    monkeypatch.setattr(trainer_module, "train_step", watched)
    run(tmp_path / "a", "--manual-gc --manual-gc-interval 2")
    assert seen == [False] * 4 and gc.isenabled()


def with_a_difference(folder: str, words: str, grid: dict[str, int], rank: int) -> str:
    original = trainer_module.train_step

    def drifting(model: Any, *arguments: Any) -> StepResult:
        result = original(model, *arguments)
        if dist.get_rank() == rank and arguments[3] == 1:
            with torch.no_grad():
                model.stages[0].layers["1"].mlp_norm.weight.data[3] += 1e-3
        return result

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trainer_module, "train_step", drifting)
        try:
            on_ranks(folder, words, grid)
        except AgreedError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("words", "grid"),
    [("", {"data": 2}), ("--tensor-model-parallel-size 2", {"tensor": 2})],
    ids=["data", "tensor"],
)
def test_weights_that_differ_are_noticed_and_named(tmp_path: Path, words: str, grid: dict[str, int]) -> None:
    words += " --check-weight-hash-across-dp-replicas-interval 2"
    sound = {"world": 2, "folder": str(tmp_path / "a"), "words": words, "grid": grid, "rank": -1}
    assert run_distributed(with_a_difference, **sound) == ["", ""]  # type: ignore[arg-type]
    log = (tmp_path / "a" / "train.log").read_text()
    counts = re.findall(r"weights of replicas are the same after iteration (\d) \((\d+) comparisons\)", log)
    assert [step for step, _ in counts] == ["2", "4"] and int(counts[0][1]) > 0
    hurt = {**sound, "folder": str(tmp_path / "b"), "rank": 1}
    told = run_distributed(with_a_difference, **hurt)  # type: ignore[arg-type]
    assert told[0] == told[1]
    assert told[0].startswith(
        "after step 2 the weights of ranks 0 and 1 are not the same: layers.1.mlp_norm.weight differs;"
    )


def test_a_history_of_memory_needs_a_gpu_and_says_so(tmp_path: Path) -> None:
    assert "note: --record-memory-history: only GPU allocations are recorded" in run(
        tmp_path / "a", "--record-memory-history"
    )


def test_a_history_of_memory_is_recorded_and_left_in_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the calls to torch.cuda.memory, as there is no GPU to record."""
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **named: asked.append(named))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", asked.append)
    world: Any = SimpleNamespace(device=torch.device("cuda"), all_ranks=SimpleNamespace(rank=3))
    optimizer: Any = None
    config = resolved("--record-memory-history").config
    decisions = decide(config, DeviceFacts("cuda"))
    StepHooks(config, decisions, world, optimizer, tmp_path, Output(SilentDisplay())).close()
    assert (
        asked[0]["max_entries"] == 100_000 and asked[0]["context"] == "all" and asked[0]["enabled"] == "all"
    )
    assert asked[1:] == [str(tmp_path / "snapshot-rank-00003.pickle"), {"enabled": None}]
