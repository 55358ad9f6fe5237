"""Tests whether a run is compiled, and which notes it prints."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pentatron.train.compilation as compilation
import pentatron.train.model as parallel_model
from pentatron.errors import UserError
from pentatron.layout.ranks import Grid
from pentatron.models.causal_lm import build_model
from pentatron.nn.compiled import CompileReport
from pentatron.nn.options import ModelOptions
from pentatron.parallel.rank_status import RankStatus
from pentatron.parallel.world import create_groups
from pentatron.settings.decision_types import DeviceFacts
from pentatron.settings.decisions import decide
from pentatron.train.compilation import Compilation, check_compilation, track_compilation
from pentatron.train.session import run_training
from tests.harness import run_distributed
from tests.support import LLAMA, model_config, resolved

CPU = torch.device("cpu")


def settled(
    words: str, monkeypatch: pytest.MonkeyPatch, problem: str = "", device: str = "cuda"
) -> Compilation:
    monkeypatch.setattr(compilation, "_trial", lambda device: problem)
    repeatable = {"deterministic": True} if "--deterministic-mode" in words else None

    decided = decide(resolved(words).config, DeviceFacts(device)).compilation
    compile, notes = check_compilation(decided, torch.device(device))
    assert compile is None or compile.options == repeatable, (
        "kernels that are chosen by the clock are others in the next run"
    )
    model = build_model(model_config("--num-layers 3"), 1, CPU, options=ModelOptions(compile=compile))
    return track_compilation(compile, notes, [model], RankStatus())


@pytest.mark.parametrize(
    ("words", "device", "layers"),
    [
        ("", "cuda", 3),
        ("", "cpu", 0),
        ("--compile on", "cpu", 3),
        ("--compile off", "cuda", 0),
        ("--deterministic-mode", "cuda", 0),
        ("--deterministic-mode --compile on", "cuda", 3),
    ],
)
def test_by_default_on_gpus_alone(
    words: str, device: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settled(words, monkeypatch, device=device).compiled.layers == layers


def test_missing_compiler_is_reported_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    (note,) = settled("", monkeypatch, "no g++").notes
    assert "layers run uncompiled" in note and "(no g++)" in note
    with pytest.raises(UserError, match=r"--compile on: torch.compile fails on this machine \(no g\+\+\)"):
        settled("--compile on", monkeypatch, "no g++")


class Stubborn(nn.Module):
    """Recompiles for every value of `number`."""

    number = 0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.number


def test_compile_time_and_fallbacks_are_reported() -> None:
    torch._dynamo.reset()
    where, told = RankStatus(), Compilation(CompileReport(2, ()))
    where.phase = "step"
    told.watch(where)
    phases = []

    def backend(graph: torch.fx.GraphModule, examples: object) -> object:
        phases.append(where.phase)
        return graph

    module = Stubborn()
    run = torch.compile(module, backend=backend)
    with torch._dynamo.config.patch(recompile_limit=2):
        for module.number in range(4):
            run(torch.ones(2))
    assert phases == ["compiling"] * 2 and where.phase == "step"
    (first,), (second,) = told.time_lines(1.5), told.unreported_fallbacks()
    assert first.startswith("compiled 2 layers in ") and first.endswith("; the first step took 1.5 s with it")
    assert second.startswith("torch's recompile limit is reached for 'forward' (") and "number == " in second
    told.mark_reported()
    assert list(told.time_lines(1.5)) == told.unreported_fallbacks() == []
    filters = len(logging.getLogger("torch._dynamo.convert_frame").filters)
    del told
    assert len(logging.getLogger("torch._dynamo.convert_frame").filters) == filters - 1


def test_code_that_cannot_be_compiled_runs_eagerly_and_is_reported() -> None:
    torch._dynamo.reset()
    told = Compilation(CompileReport(2, ()))
    told.watch(RankStatus())

    def backend(graph: object, examples: object) -> object:
        raise RuntimeError("no such kernel")

    with torch._dynamo.config.patch(suppress_errors=True):
        assert torch.compile(Stubborn(), backend=backend)(torch.ones(2)).tolist() == [1, 1]
    (line,) = told.unreported_fallbacks()
    assert line.startswith("torch cannot compile forward ") and "no such kernel" in line


def test_eager_where_hooks_must_run() -> None:
    torch._dynamo.reset()
    runs = []

    def backend(graph: torch.fx.GraphModule, examples: object) -> object:
        runs.append(graph)
        return graph

    run = torch.compile(Stubborn(), backend=backend)
    with Compilation(CompileReport(1, ())).off():
        run(torch.ones(2))
    assert runs == []
    run(torch.ones(2))
    assert len(runs) == 1


def with_a_stubborn_stage(folder: str) -> None:
    """Trains with a note of both ranks, and with a note and a failed compilation of rank 1 alone."""

    def compiled(*_: object) -> Compilation:
        if dist.get_rank() == 0:
            return Compilation(notes=("of both",))
        made = Compilation(notes=("not compiled: a layer of your own", "of both"))
        made.give_up("WON'T CONVERT forward\nTypeError: no such kernel")
        return made

    words = "--pipeline-model-parallel-size 2 --train-iters 3 --log-interval 3"
    trained(f"{words} --run-dir {folder}", Grid(pipeline=2), compiled)


def trained(words: str, grid: Grid, compiled: Callable[..., Compilation]) -> None:
    """Trains on two ranks with `compiled` in place of `track_compilation`."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(parallel_model, "track_compilation", compiled)
        world = create_groups(grid, dist.get_rank(), dist.get_rank(), CPU)
        run_training(resolved(f"{LLAMA} {words} --no-save-checkpoints", 2), world, True)


def test_fallback_on_another_rank_is_reported_once_with_the_rank(tmp_path: Path) -> None:
    run_distributed(with_a_stubborn_stage, world=2, folder=str(tmp_path / "a"))
    log = (tmp_path / "a" / "train.log").read_text().splitlines()
    assert [line for line in log if "of both" in line] == ["note: of both"]
    assert log.count("note: not compiled: a layer of your own (rank 1)") == 1
    (given_up,) = [line for line in log if "torch cannot compile" in line]
    assert given_up.endswith("(TypeError: no such kernel) (rank 1)")


class Late(Compilation):
    """Fails to compile on rank 1 in step 2, after which no line of the log is due."""

    steps = 0

    def time_lines(self, step_seconds: float) -> Iterator[str]:
        self.steps += 1
        if self.steps == 2 and dist.get_rank() == 1:
            self.give_up("WON'T CONVERT forward\nTypeError: no such kernel")
        return iter(())


def ended_between_two_lines(folder: str) -> None:
    words = "--train-iters 9 --log-interval 9 --exit-interval 2"
    trained(f"{words} --run-dir {folder}", Grid(data=2), lambda *_: Late())


def test_fallback_after_the_last_step_line_is_reported_at_the_end(tmp_path: Path) -> None:
    run_distributed(ended_between_two_lines, world=2, folder=str(tmp_path / "a"))
    log = (tmp_path / "a" / "train.log").read_text().splitlines()
    (given_up,) = [line for line in log if "torch cannot compile" in line]
    assert given_up.endswith("(TypeError: no such kernel) (rank 1)")
