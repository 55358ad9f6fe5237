"""Defines shapes, FLOPs and timed blocks of training steps, and the process that measures them.

Imports nothing of the package, because other libraries are measured with it too.
"""

import contextlib
import gc
import json
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch

PEAK_BF16 = 989e12
GIB = 2**30
# Untimed steps before the first block, and before a later block, which has to allocate its memory again.
WARM_UPS, LATER_WARM_UPS = 4, 2


@dataclass(frozen=True)
class Shape:
    """The sizes of an architecture that determine its arithmetic.

    `experts`: the number of experts, the experts of a token, and the width of an expert.
    """

    family: str
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    groups: int
    head_size: int
    vocabulary: int
    tied: bool
    theta: float = 1e6
    experts: tuple[int, int, int] | None = None

    def flops_per_token(self, sequence: int) -> float:
        """Returns six FLOPs per matrix parameter, head included, plus causal attention counted once."""
        attended = self.heads * self.head_size
        projections = self.hidden * (2 * attended + 2 * self.groups * self.head_size)
        inner = self.feed_forward if self.experts is None else self.experts[1] * self.experts[2]
        matrices = 2 if self.family == "gpt2" else 3
        layer = projections + matrices * self.hidden * inner
        return 6.0 * (self.layers * layer + self.vocabulary * self.hidden + self.layers * attended * sequence)


SHAPES = {
    "qwen2.5-1.5b": Shape("qwen2", 28, 1536, 8960, 12, 2, 128, 151936, True),
    "qwen3-8b-8l": Shape("qwen3", 8, 4096, 12288, 32, 8, 128, 151936, False),
    "qwen3-30b-a3b-4l": Shape("qwen3_moe", 4, 2048, 6144, 32, 4, 128, 151936, False, experts=(128, 8, 768)),
    # Dense counterpart of the shape with experts: as many multiplications per token, in one matrix each.
    "qwen3-dense-a3b-4l": Shape("qwen3", 4, 2048, 6144, 32, 4, 128, 151936, False),
    "gpt2-124m": Shape("gpt2", 12, 768, 3072, 12, 12, 64, 50304, True),
    # For trying out these scripts without a GPU.
    "tiny": Shape("qwen3", 2, 64, 128, 4, 2, 16, 512, False),
}


@dataclass(frozen=True)
class Case:
    """A program with its shape and sizes; `name` is `ours`, `hf:liger`, ..."""

    name: str
    shape: str
    micro_batch: int
    sequence: int
    device: str = "cuda"

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.sequence


Step = Callable[[], Any]


class Timed:
    """Runs a step in timed blocks.

    The step returns its loss, as a number or as a tensor that is read after the block.
    """

    def __init__(self, step: Step, device: str) -> None:
        self.step, self.on_gpu = step, device == "cuda"
        self.first_seconds: float | None = None
        self.loss: Any = None

    def warm_up(self, steps: int) -> None:
        for _ in range(steps):
            began = time.perf_counter()
            self.loss = self.step()
            self.wait()
            if self.first_seconds is None:
                self.first_seconds = time.perf_counter() - began

    def block(self, steps: int) -> list[float]:
        """Returns the seconds of each step; on a GPU by events in a stream that is idle before the step."""
        return [self._one() for _ in range(steps)]

    def _one(self) -> float:
        if not self.on_gpu:
            began = time.perf_counter()
            self.loss = self.step()
            return time.perf_counter() - began
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        self.loss = self.step()
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def milliseconds(
    work: Callable[[], object], times: int = 10, before: Callable[[], object] = lambda: None
) -> float:
    """Returns the median GPU time of some runs, after three warm-up runs.

    `before`: queues GPU work during which the measured work is launched.
    """
    found = []
    for _ in range(times + 3):
        before()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        ended.synchronize()
        found.append(began.elapsed_time(ended))
    return statistics.median(found[3:])


def milliseconds_in_a_row(work: Callable[[], object], times: int, warm: int = 2) -> float:
    """Returns the GPU time of one call when many follow each other without a pause."""
    for _ in range(warm):
        work()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(times):
        work()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / times


def synchronisations(step: Step) -> list[str]:
    """Returns `file:line` of each place where a step waits for the GPU."""
    with warnings.catch_warnings(record=True) as met:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # Leaves out the warning that this debug mode is a prototype.
    places = [w for w in met if "called a synchronizing" in str(w.message)]
    return [f"{'/'.join(w.filename.split('/')[-3:])}:{w.lineno}" for w in places]


# --- a process that runs commands, line by line ---


class Server:
    """Answers each JSON line on standard input with one: blocks of steps, a breakdown, the end.

    All other output goes to stderr.
    """

    def __init__(
        self, case: Case, build: Callable[[], Step], leave: Callable[[], Any] = lambda: None
    ) -> None:
        """`leave` is called last; then the process exits at once."""
        self.case, self.build, self.leave = case, build, leave
        self.timed: Timed | None = None

    def run(self) -> None:
        out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "end":
                break
            if not self._answered(command, out):
                break
        self.leave()
        # Skips the clean-up of process groups and compilers, which may take seconds or hang.
        out.flush()
        sys.stderr.flush()
        os._exit(0)

    def _answered(self, command: dict[str, Any], out: TextIO) -> bool:
        try:
            answer = getattr(self, f"_{command.pop('do')}")(**command)
        except torch.OutOfMemoryError:
            traceback.print_exc()
            answer = {"oom": True}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": repr(error)[:400]}
        out.write(json.dumps(answer) + "\n")
        out.flush()
        return not ("oom" in answer or "error" in answer)

    def _block(self, steps: int) -> dict[str, Any]:
        if self.timed is None:
            self.timed = Timed(self.build(), self.case.device)
            self.timed.warm_up(WARM_UPS)
        else:
            self.timed.warm_up(LATER_WARM_UPS)
        if self.case.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = self.timed.block(steps)
        peak, held, total = _memory(self.case.device)
        return {
            "seconds": seconds,
            "loss": float(self.timed.loss),
            "first_seconds": self.timed.first_seconds,
            "peak": peak,
            "held": held,
            "total": total,
        }

    def _breakdown(self, steps: int) -> dict[str, Any]:
        from bench.kernel_groups import breakdown

        assert self.timed is not None, "after a block"
        self.timed.warm_up(1)
        return {"breakdown": breakdown(self.timed.step, steps)}

    def _synchronisations(self) -> dict[str, Any]:
        assert self.timed is not None, "after a block"
        return {"syncs": synchronisations(self.timed.step) if self.case.device == "cuda" else []}


def _memory(device: str) -> tuple[int, int, int]:
    """Returns peak allocated bytes, bytes reserved after emptying the cache, and bytes of the device.

    Memory of a CUDA graph counts as reserved only, so the peak is at least the reserved bytes.
    """
    if device != "cuda":
        return 0, 0, 0
    peak = torch.cuda.max_memory_allocated()
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    return max(peak, held), held, torch.cuda.mem_get_info()[1]


# --- results ---


def record(case: Case, blocks: Sequence[Sequence[float]], last: dict[str, Any]) -> dict[str, Any]:
    """Returns the result of a case.

    The rate is that of the median step of all blocks. `spread` is the largest median of a block relative to
    the smallest.
    """
    median = statistics.median(second for block in blocks for second in block)
    of_blocks = [statistics.median(block) for block in blocks]
    rate = case.tokens / median
    flops = rate * SHAPES[case.shape].flops_per_token(case.sequence)
    return {
        "case": case.name,
        "shape": case.shape,
        "mbs": case.micro_batch,
        "seq": case.sequence,
        "tok_s": round(rate),
        "tflops": round(flops / 1e12, 1),
        "mfu989": round(flops / PEAK_BF16, 3),
        "mem_gib": round(last["peak"] / GIB, 1),
        "loss": round(last["loss"], 3),
        "step_ms": round(1e3 * median, 2),
        "spread": round(max(of_blocks) / min(of_blocks) - 1, 4),
        "blocks": [round(case.tokens / seconds) for seconds in of_blocks],
        "first_step_s": round(last["first_seconds"], 1),
        "held_gib": round(last["held"] / GIB, 1),
    }


def versions(*packages: str) -> dict[str, str]:
    """Returns the versions of torch, the GPU and its libraries, and of `packages` that are installed."""
    from importlib import metadata

    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    if torch.cuda.is_available():
        found |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name()}
        found["cudnn"] = str(torch.backends.cudnn.version())
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
