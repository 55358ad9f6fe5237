"""Tests the warning before a run that will not fit in memory, and the advice after an OOM."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pentatron.cli import worker_errors
from pentatron.cli.environment import RankInfo
from pentatron.cli.worker_errors import available_memory, check_memory, out_of_memory_message
from pentatron.errors import AgreedError, UserError
from pentatron.launch.machine import host_memory
from pentatron.plan.fit import AvailableMemory, check_device_memory, out_of_memory
from pentatron.plan.memory import memory_of
from tests.support import LLAMA, resolved

CPU = torch.device("cpu")
FIRST = RankInfo(0, 1, 0, 1, "none")
MODEL = f"{LLAMA} --micro-batch-size 4"


def needed() -> int:
    return memory_of(resolved(MODEL).config).largest.total


def test_sufficient_memory_gives_no_message() -> None:
    config = resolved(MODEL).config
    assert check_device_memory(config, 0, AvailableMemory("GPU", 2 * needed(), 2 * needed())) is None


def test_a_tight_run_is_warned_of_with_its_numbers_and_the_way_out() -> None:
    verdict = check_device_memory(resolved(MODEL).config, 0, AvailableMemory("GPU", needed(), 0.9 * needed()))
    assert verdict is not None and not verdict.impossible
    for part in (
        "may not fit",
        "activations",
        "--micro-batch-size (4 now",
        "--recompute-granularity",
        "--bf16",
    ):
        assert part in verdict.sentence
    assert "\n" not in verdict.sentence


def test_only_static_memory_makes_a_run_impossible() -> None:
    held = memory_of(resolved(MODEL).config).largest.static.on_device
    just, less = (
        check_device_memory(resolved(MODEL).config, 0, AvailableMemory("GPU", room, room))
        for room in (held, held - 1)
    )
    assert just is not None and not just.impossible
    assert less is not None and less.impossible and "cannot fit" in less.sentence


def test_remedies_that_are_taken_are_not_named_again() -> None:
    words = (
        f"{MODEL} --micro-batch-size 1 --bf16 --recompute-granularity full --zero-stage 1 --sequence-parallel"
    )
    config = resolved(f"{words} --tensor-model-parallel-size 2", 4).config
    verdict = check_device_memory(config, 0, AvailableMemory("GPU", 1e9, 1.0))
    assert verdict is not None
    for part in ("--bf16", "--recompute-granularity", "--micro-batch-size", "--sequence-parallel"):
        assert part not in verdict.sentence
    assert "--zero-stage 2" in verdict.sentence


def use_room(monkeypatch: pytest.MonkeyPatch, total: float, free: float) -> None:
    monkeypatch.setattr(
        worker_errors, "available_memory", lambda device, processes: AvailableMemory("host", total, free)
    )


def test_the_first_of_a_stage_warns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_room(monkeypatch, needed(), 0.5 * needed())
    config = resolved(f"{MODEL} --micro-batch-size 1", 2).config
    for rank in (0, 1):
        check_memory(config, CPU, RankInfo(rank, 2, rank, 2, "none"))
    assert capsys.readouterr().err.count("pentatron: warning: this run may not fit") == 1


def test_too_large_run_is_refused_unless_the_check_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    use_room(monkeypatch, 1000.0, 1000.0)
    with pytest.raises(UserError, match=r"cannot fit.*--no-check-memory") as refused:
        check_memory(resolved(MODEL).config, CPU, FIRST)
    assert not isinstance(refused.value, AgreedError), "the first of a machine says it"
    check_memory(resolved(f"{MODEL} --no-check-memory").config, CPU, FIRST)


def test_an_optimizer_in_host_memory_is_compared_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks host memory also if the memory of the GPU is large enough."""
    config = resolved(f"{MODEL} --optimizer-cpu-offload").config
    host = memory_of(config).largest.static.in_host
    monkeypatch.setattr(
        worker_errors, "available_memory", lambda device, processes: AvailableMemory("GPU", 1e12, 1e12)
    )
    for total, free in ((10 * host, 10 * host), (10 * host, host)):
        monkeypatch.setattr(worker_errors, "host_memory", lambda total=total, free=free: (total, free))
        check_memory(config, torch.device("cuda"), FIRST)
    said = capsys.readouterr().err
    assert said.count("may not fit: --optimizer-cpu-offload keeps") == 1
    monkeypatch.setattr(worker_errors, "host_memory", lambda: (host - 1, host - 1))
    with pytest.raises(UserError, match="cannot fit: --optimizer-cpu-offload"):
        check_memory(config, torch.device("cuda"), FIRST)
    check_memory(resolved(MODEL).config, torch.device("cuda"), FIRST)
    with pytest.raises(
        UserError, match=r"cannot fit: --async-save keeps a copy of .*try saving without --async-save"
    ):
        check_memory(resolved(f"{MODEL} --async-save").config, torch.device("cuda"), FIRST)


def test_processes_share_the_machine() -> None:
    one, four = available_memory(CPU, 1), available_memory(CPU, 4)
    assert one is not None and four is not None
    assert four.total == pytest.approx(one.total / 4)
    assert 0 < one.free <= one.total


def test_host_memory_respects_the_control_group(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 800 kB\nSwapTotal: 24 kB\nSwapFree: 24 kB\n"
    )
    assert host_memory(tmp_path) == (1024 * 1024, 824 * 1024)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5\n")
    assert host_memory(tmp_path) == (1024 * 1024, 824 * 1024)
    (group / "memory.max").write_text("600000\n")
    assert host_memory(tmp_path) == (600000, 599995)
    # The control group counts the page cache of files as used, but the inactive part can be reclaimed.
    (group / "memory.current").write_text("600000\n")
    (group / "memory.stat").write_text("anon 100000\nfile 500000\ninactive_file 450000\nactive_file 50000\n")
    assert host_memory(tmp_path) == (600000, 450000)
    assert host_memory(tmp_path / "elsewhere") is None


CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.02 GiB is free. "
    "Including non-PyTorch memory, this process has 78.00 GiB memory in use."
)
HOST = "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
LEVERS = (
    "--batch-size",
    "--micro-batch-size",
    "--hidden-size",
    "--num-layers",
    "--seq-length",
    "--bf16 or --fp16",
)
ADVICE = ("--recompute-granularity", "--tensor-model-parallel-size", "--pipeline-model-parallel-size")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError(CUDA), "GPU"),
        (RuntimeError(HOST), "host"),
        (MemoryError(), "host"),
    ],
)
def test_running_out_of_memory_is_one_sentence_with_the_plan_and_the_advice(
    error: Exception, kind: str
) -> None:
    config = resolved(f"{MODEL} --micro-batch-size 2 --seq-length 4096", 2).config
    said = out_of_memory_message(error, config, 1)
    assert said is not None and "\n" not in said
    assert said.startswith(f"out of {kind} memory (")
    for part in (
        *LEVERS,
        *ADVICE,
        "--use-distributed-optimizer",
        "such as 2048, 4096 now",
        "weights",
        "activations",
    ):
        assert part in said, part
    assert "this process has" not in said


def test_graphs_that_were_recorded_can_be_done_without() -> None:
    """Advises `--cuda-graphs off` also for `--cuda-graphs auto`, whose graphs the plan does not count."""
    allocated = "Of the allocated memory 70.00 GiB is allocated by PyTorch, "
    private = "with 1.50 GiB allocated in private pools (e.g., CUDA Graphs), "
    config = resolved(f"{MODEL} --micro-batch-size 2").config
    assert config.kernels.cuda_graphs == "auto"
    for pools, is_advised in (("", False), (private, True)):
        text = f"{CUDA} {allocated}{pools}and 2.00 GiB is reserved by PyTorch but unallocated."
        said = out_of_memory_message(torch.OutOfMemoryError(text), config, 0)
        assert said is not None
        assert ("Try --cuda-graphs off, " in said) == is_advised, said


def test_other_errors_are_not_about_memory() -> None:
    assert out_of_memory_message(RuntimeError("shape mismatch"), resolved(MODEL).config, 0) is None
    assert "TypeName" not in out_of_memory(resolved(MODEL).config, 0, "why", "GPU")


RAISING = """
import sys, torch
from pentatron.train import session, trainer
import pentatron.train.step as step
def no_room(*words, **named):
    raise torch.OutOfMemoryError({message!r})
trainer.train_step = no_room
from pentatron.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_rank_that_runs_out_of_memory_ends_without_a_traceback(tmp_path: Path) -> None:
    words = "train --mock-data --num-layers 1 --hidden-size 32 --seq-length 16 --vocab-size 61 --train-iters 1 --nproc-per-node 1"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            RAISING.format(message=CUDA),
            *words.split(),
            "--device",
            "cpu",
            "--run-dir",
            tmp_path / "run",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert (
        done.stderr.count("pentatron: out of GPU memory (CUDA out of memory. Tried to allocate 2.00 GiB)")
        == 1
    )
    log = (tmp_path / "run/train.log").read_text().splitlines()
    assert log[-1].startswith("error: out of GPU memory (CUDA out of memory. Tried to allocate 2.00 GiB)")
    assert "out of GPU memory" not in done.stdout
