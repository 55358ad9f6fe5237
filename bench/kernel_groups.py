"""Groups the GPU time of a step by kind of kernel, from a trace of torch's profiler."""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

# Labels of `record_function` around parts of a step: kernels with generic names are counted by them.
OPTIMIZER, GRADIENT_NORM, LOSS = "bench: optimizer", "bench: gradient norm", "bench: loss"
GROUPS = (
    "matmul",
    "attention",
    "norms and elementwise",
    "fp8 rounding",
    "loss",
    "gradient norm and clip",
    "optimizer",
    "copies and memsets",
    "communication",
    "gaps",
)
# The first pattern that matches a name decides.
_BY_NAME = (
    ("communication", r"nccl"),
    ("attention", r"flash|fmha|sdpa|cudnn::fusion|cudnn.*(?:bprop|fprop)|_attn_|attention"),
    ("loss", r"cross_entropy|softmax|logsumexp|nll_loss"),
    ("optimizer", r"adam|lamb|^_update$"),
    ("gradient norm and clip", r"l2norm|lpnorm|foreach_norm|squared_norm|sum_of_squares"),
    ("fp8 rounding", r"^_write_rounded|^_largest_of_tiles|amax|float8|fp8|e4m3.*(?:cast|quant)"),
    ("matmul", r"gemm|nvjet|cutlass|cublas|matmul|_scaled_mm|wgmma|xmma|splitkreduce"),
    ("copies and memsets", r"memcpy|memset|copy_kernel|direct_copy|catarraybatched|fill_kernel|fillfunctor"),
)
# Loops compiled by inductor. Their names list the operations whose results they combine, matmuls among them,
# so they are matched before _BY_NAME.
_LOOP = re.compile(r"triton_(?:poi|per|red)_")
_LOOPS_OF_LOSS = re.compile(r"log_softmax|logsumexp|nll_loss|cross_entropy")


def group_of(name: str) -> str:
    """Returns the group of a kernel by its name alone."""
    lowered = name.lower()
    if _LOOP.match(lowered):
        return "loss" if _LOOPS_OF_LOSS.search(lowered) else "norms and elementwise"
    if lowered.startswith("triton_tem"):
        return "matmul"
    for group, pattern in _BY_NAME:
        if re.search(pattern, lowered):
            return group
    return "norms and elementwise"


Interval = tuple[float, float]


def breakdown(step: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Returns the milliseconds per step of every group, and the kernels that take longest."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        torch.cuda.synchronize()
        for _ in range(steps):
            step()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return grouped(events, steps)


def grouped(events: Iterable[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Sums up the kernels of a trace by group.

    Gaps are the time between the first and the last kernel of all steps in which no kernel ran.
    """
    kernels, marks = [], defaultdict(list)
    for event in events:
        kind = event.get("cat", "")
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append((event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"])))
        elif kind == "gpu_user_annotation":
            span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            marks[_marked(event["name"])].append(span)
    if not kernels:
        return {"groups": {}, "kernels": [], "step_ms": 0.0}
    spent: dict[str, float] = defaultdict(float)
    by_kernel: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, start, end in kernels:
        group = _group(name, start, marks)
        spent[group] += end - start
        by_kernel[group, name][0] += end - start
        by_kernel[group, name][1] += 1
    whole = max(end for _, _, end in kernels) - min(start for _, start, _ in kernels)
    spent["gaps"] = whole - _covered([(start, end) for _, start, end in kernels])
    per_step = 1e3 * steps
    longest = sorted(by_kernel.items(), key=lambda item: -item[1][0])[:24]
    return {
        "groups": {group: round(spent[group] / per_step, 2) for group in GROUPS if spent[group]},
        "kernels": [
            {"group": group, "name": name[:110], "ms": round(us / per_step, 2), "calls": round(n / steps, 1)}
            for (group, name), (us, n) in longest
        ],
        "launches": round(len(kernels) / steps),
        "step_ms": round(whole / per_step, 2),
    }


def _marked(name: str) -> str:
    if name == OPTIMIZER or name.startswith("Optimizer.step"):
        return "optimizer"
    return {GRADIENT_NORM: "gradient norm and clip", LOSS: "loss"}.get(name, "")


def _group(name: str, start: float, marks: Mapping[str, Sequence[Interval]]) -> str:
    """Returns the group by name, or for a generic name the label around the kernel."""
    group = group_of(name)
    if group in ("norms and elementwise", "copies and memsets", "gradient norm and clip"):
        for marked in ("gradient norm and clip", "optimizer", "loss"):
            if any(first <= start < last for first, last in marks.get(marked, ())):
                return marked
    return group


def _covered(intervals: Sequence[Interval]) -> float:
    """Returns the length of the union of the intervals: overlapping kernels of two streams count once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def table(found: Mapping[str, Any], tokens: int) -> list[str]:
    """Formats groups, then the longest kernels, for the terminal."""
    whole = found["step_ms"]
    if not whole:
        return ["no kernel ran on a GPU"]
    lines = [f"  {'group':<24} {'ms':>8} {'share':>6}"]
    for group, ms in found["groups"].items():
        lines.append(f"  {group:<24} {ms:>8.2f} {ms / whole:>6.1%}")
    lines.append(
        f"  {'step under the profiler':<24} {whole:>8.2f}        {found['launches']} kernels, {1e3 * tokens / whole:,.0f} tokens/s"
    )
    lines += [
        f"    {k['ms']:>7.2f} ms {k['calls']:>6.0f}x  {k['group']:<22} {k['name']}" for k in found["kernels"]
    ]
    return lines
