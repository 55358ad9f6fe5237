"""Runs whole trainings, launches, generation and the suite's GPU tests on a GPU."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pentatron.checkpoint.find import find_step
from pentatron.generate.continue_text import Ranks
from pentatron.generate.generate import Sampling
from tests.checkpoint.digest import StateDigest, state_digest
from tests.cuda import on_ranks
from tests.cuda.trials import Found, Rows
from tests.harness import run_distributed
from tests.parity.cases import MIXTURES
from tests.train.test_bit_exact import FP16, MODEL, RUN, STOP, write_corpora
from tests.train.texts import texts

ROOT = Path(__file__).parents[2]
TIMEOUT = 220.0
# With the flag, runs must be repeatable. Without it, attention over long sequences and kernels that the
# compiler selects by timing are not: a resumed run then fails only if two undisturbed runs are equal.
_REPEATABLE, _COMPILED = "--deterministic-mode", "--deterministic-mode --compile on"
RESUMED = {
    "one process, bf16": (1, f"{_REPEATABLE} --bf16"),
    "one process, bf16, compiled": (1, f"{_COMPILED} --bf16"),
    "one process, bf16, as by default": (1, "--bf16"),
    "one process, bf16, cuDNN, not deterministic": (1, "--compile off --attention-backend cudnn --bf16"),
    "one process, fp16 with a scale that overflows": (1, f"{_REPEATABLE} {FP16}"),
    "one process, bf16, saved in the background": (1, f"{_REPEATABLE} --bf16 --async-save"),
    "one process, experts, bf16": (1, f"{_REPEATABLE} {MIXTURES['qwen3-moe']} --bf16"),
    "two processes, tensor, fp16": (2, f"{_REPEATABLE} --tp_size 2 --sequence-parallel {FP16}"),
    "two processes, tensor, fp16, compiled": (2, f"{_COMPILED} --tp_size 2 --sequence-parallel {FP16}"),
    "two processes, ZeRO 1, bf16": (2, f"{_REPEATABLE} --zero-stage 1 --bf16"),
    "two processes, ZeRO 3, bf16": (2, f"{_REPEATABLE} --zero-stage 3 --bf16"),
    "two processes, pipeline, bf16": (2, f"{_REPEATABLE} --pp_size 2 --pipeline-schedule zero-bubble --bf16"),
}
# These tests skip themselves without a GPU.
OWN_TESTS = "nn/test_dropout.py optim/test_offload.py parallel/test_executor.py parallel/test_reduction.py parallel/test_messages.py checkpoint/test_background.py nn/test_loss.py nn/test_experts_on_device.py train/test_prefetch.py train/test_cuda_graphs.py ops"


def _state(folder: Path, ranks: int, words: str, device: str, cache: Path) -> StateDigest:
    command = f"{RUN} {MODEL} {words} --run-dir {folder}"
    run_distributed(
        on_ranks.train, ranks, timeout=TIMEOUT, words=command, device=device, compiled_into=str(cache)
    )
    found, complaints = find_step(folder)
    assert not complaints
    return state_digest(found.folder, found.manifest)


def resumed(name: str, device: str) -> Rows:
    """Stops and resumes a run; its last state must equal that of an undisturbed run, bit for bit.

    As a control, the weights at the stop must differ. If the last states differ, the undisturbed run is
    repeated, which tells whether resuming is the cause. The resumed and the repeated run compile their layers
    again, because a run may resume without the compiler's cache.
    """
    ranks, words = RESUMED[name]
    if device == "cpu":
        words = words.replace("--attention-backend cudnn", "")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        flags = f"{words} {write_corpora(folder)}"

        def state(run: str, more: str = "", cache: str = "first") -> StateDigest:
            return _state(folder / run, ranks, f"{flags} {more}", device, folder / cache)

        whole = state("whole")
        stopped = state("cut", f"--exit-interval {STOP}")
        found = state("cut", cache="second")
        again = state("again", cache="second") if found != whole else whole
    gap, note = verdict(found, whole, again, "--deterministic-mode" in words)
    control = {"not resumed": float("inf") if "weights" in stopped.differences(whole) else 0.0}
    return {name: Found(gap, control, note)}


def verdict(
    found: StateDigest, whole: StateDigest, again: StateDigest, repeatable: bool
) -> tuple[float, str]:
    """Returns the gap between a resumed and the undisturbed run, and a note.

    `again` is a second undisturbed run, made if the first differs from the resumed one.
    """
    if found == whole:
        return 0.0, ""
    apart = ", ".join(found.differences(whole))
    if again == whole:
        return float("inf"), f"{apart}; the same run made twice is equal, so resuming is to blame"
    what = f"the same run made twice differs ({', '.join(again.differences(whole))})"
    if repeatable:
        return float("inf"), f"{apart}; {what}: what is computed is not repeatable"
    return 0.0, f"{what}; resumed it is {'the second of them' if found == again else 'neither of them'}"


LAUNCHED = {
    "2 tensor": "--nproc-per-node 2 --tensor-model-parallel-size 2",
    "2 pipeline": "--nproc-per-node 2 --pipeline-model-parallel-size 2",
    "2 data, ZeRO 3": "--nproc-per-node 2 --zero-stage 3",
    "2 context, ring": "--nproc-per-node 2 --context-parallel-size 2",
}
_STEPS = 8


def _losses(folder: Path, words: str, device: str) -> list[float]:
    command = (
        f"--mock-data --vocab-size 256 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters {_STEPS} "
        f"--global-batch-size 8 --micro-batch-size 2 --lr 1e-3 --eval-interval 0 --no-save-checkpoints --sample-tokens 0 "
        f"--progress-bar off --log-interval 1 --device {device} --run-dir {folder} {words}"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pentatron", "train", *command.split()],
        cwd=folder.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{words}: {done.stdout[-1500:]}{done.stderr[-1500:]}"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [float(row["loss"]) for row in rows]


def launched(name: str, more: str, device: str) -> Rows:
    """Compares `pentatron train` on two processes with one process: every loss within 1e-5.

    The processes share the GPU if there is only one.
    """
    alone = "--nproc-per-node 1"
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        exact = _losses(folder / "alone", f"{alone} {more}", device)
        found = _losses(folder / "spread", f"{LAUNCHED[name]} {more}", device)
        other = _losses(folder / "other", f"{alone} --lr 1.01e-3 {more}", device)

    def apart(losses: list[float]) -> float:
        return max(abs(f / e - 1) for f, e in zip(losses, exact, strict=True)) / 1e-5

    return {name: Found(apart(found), {"learning rate + 1 %": apart(other)})}


SPOKEN = ("gpt2", "llama", "mistral with a window", "qwen2", "qwen3", "qwen3_moe")


def spoken(name: str, device: str) -> Rows:
    """Compares texts on the GPU with the CPU, greedy and sampled.

    Tokens must be equal and log probabilities agree within 1e-4.
    """
    # Imported here, because they import `transformers`.
    from tests.hf.support import save, theirs
    from tests.train.test_generation import CASES

    model_type, config = CASES[name]
    hot = Sampling(1.2, top_k=30, top_p=0.95, seed=4)
    with tempfile.TemporaryDirectory() as made:
        folder = save(theirs(model_type, **config), Path(made))
        expected, _ = texts(folder, Ranks(), [Sampling(), hot])
        found, _ = texts(folder, Ranks(), [Sampling(), hot], device=device)
        other, _ = texts(folder, Ranks(), [hot, Sampling()], device=device)

    def apart(mine: list) -> float:  # type: ignore[type-arg]
        pairs = [(a, b) for ours, cpus in zip(mine, expected) for a, b in zip(ours, cpus)]
        if any(a.tokens != b.tokens for a, b in pairs):
            return float("inf")
        return max(abs(p - q) for a, b in pairs for p, q in zip(a.logprobs, b.logprobs)) / 1e-4

    return {name: Found(apart(found), {"the other way to choose": apart(other)})}


def own_tests() -> Rows:
    """Runs the tests of the suite that need a GPU."""
    files = [f"tests/{path}" for path in OWN_TESTS.split()]
    # Prints three lines for a failure: its assertion, its place and its name.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-rfE",
        "--tb=short",
        *files,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment, timeout=TIMEOUT
    )
    good = done.returncode == pytest.ExitCode.OK
    return {
        "tests that need a GPU": Found(
            0.0 if good else float("inf"), note=told_by_pytest(done.stdout) or done.stderr[-200:]
        )
    }


def told_by_pytest(printed: str) -> str:
    """Returns the counts of tests, and names and assertions of those that failed."""
    summary = re.findall(r"^=*\s*(\d+ (?:passed|failed|error).*?)=*$", printed, re.MULTILINE)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S.*)$", printed, re.MULTILINE)
    asserted = [line.strip() for line in re.findall(r"^E  +(.*)$", printed, re.MULTILINE)]
    return "; ".join([*summary[-1:], *failed[:5], *asserted[:5]])
