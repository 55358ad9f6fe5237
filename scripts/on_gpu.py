"""Checks models, layouts over NCCL and gloo, resumed runs and generated text on a GPU.

    python scripts/on_gpu.py [--write] [--only "fp8"] [--table layouts]
    python scripts/on_gpu.py --device cpu --only "qwen3, tiny"     # a rehearsal without a GPU; writes nothing

References are the CPU, plain layers and transformers. The processes of a layout share the GPU.

Prints for every comparison its largest gap as a share of what is allowed, and the smallest gap caused by a
planted mistake. The exit code is 1 if a comparison fails. --write writes the tables, and what was not run,
into docs/cuda.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.util
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Compiler threads of each process: a dozen processes compile at the same time.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

import torch  # noqa: E402

from tests.cuda.catalogue import NOT_RUN, TABLES, Check, checks, measured, nothing_called  # noqa: E402
from tests.cuda.trials import Found, Rows  # noqa: E402

PAGE = ROOT / "docs" / "cuda.md"
Results = dict[str, Rows]


def run_all(
    wanted: Sequence[Check], device: str, jobs: int, groups: int
) -> Iterator[tuple[Check, Rows, float]]:
    """Runs checks of one process and of several in two pools, whose workers keep a GPU context."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools = [
            stack.enter_context(ProcessPoolExecutor(count, context, initializer=end_at_once))
            for count in (jobs, groups)
        ]
        under_way: dict[Future[tuple[Rows, float]], Check] = {
            pools[check.ranks > 1].submit(timed, check, device): check for check in wanted
        }
        for done in as_completed(under_way):
            yield under_way[done], *done.result()
        # Workers would wait for their own children, such as the compiler's processes.
        for child in multiprocessing.active_children():
            child.terminate()


def end_at_once() -> None:
    """Lets SIGTERM end a worker after multiprocessing's finalizers, without waiting for anything."""

    def leave(*_: object) -> None:
        multiprocessing.util._run_finalizers(0)  # type: ignore[attr-defined]
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)


def timed(check: Check, device: str) -> tuple[Rows, float]:
    torch.set_num_threads(1)
    started = time.perf_counter()
    return measured(check, device), time.perf_counter() - started


def line(name: str, row: Found) -> str:
    if row.left_out:
        return f"not run  {name}: {row.left_out}"
    verdict = "ok     " if row.passes else "FAILS  "
    controls = "".join(f"  {n}: {share:.3g}" for n, share in row.controls.items())
    why = f"  {row.note}" if row.note else ""
    return f"{verdict}  {name:<48} {row.share:>8.1%}{controls}{why}"


def about(device: str) -> str:
    parts = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    try:
        parts.append(f"transformers {metadata.version('transformers')}")
    except metadata.PackageNotFoundError:
        parts.append("no transformers")
    if device == "cuda":
        parts = [
            torch.cuda.get_device_name(),
            f"CUDA {torch.version.cuda}",
            f"cuDNN {torch.backends.cudnn.version()}",
            *parts,
        ]
    return ", ".join(parts)


def page(found: Results, device: str, seconds: float) -> str:
    rows = [row for table in found.values() for row in table.values()]
    left_out = [
        f"{name}: {row.left_out}" for table in found.values() for name, row in table.items() if row.left_out
    ]
    lines = [
        "# Correct on a GPU",
        "",
        "Written by `make cuda ARGS=--write` on a machine with a GPU; do not edit.",
        "",
        f"{held(rows)} ({about(device)}; TF32 off; {seconds:.0f} s). Each line below is a comparison.",
        "",
        "A gap is the largest over losses, gradient norms, every gradient, every weight after the last step and the validation loss, as a "
        "share of what is allowed (the tolerances of [parity.md](parity.md)). A control is the smallest gap that a planted mistake "
        "makes, as a multiple of what is allowed: one weight changed by a standard deviation (in half precision a matrix by 20 %), a RoPE base "
        "1 % off, a loss that takes no notice of its mask.",
    ]
    for table, text in TABLES.items():
        if table not in found:
            continue
        controlled = any(row.controls for row in found[table].values())
        lines += ["", f"## {table}", "", text, ""]
        lines.append(f"| case | gap |{' smallest control |' if controlled else ''}")
        lines.append(f"|---|---|{'---|' if controlled else ''}")
        lines += [cells(name, row, controlled) for name, row in sorted(found[table].items())]
    lines += ["", "## Not run", "", *(f"- {text}" for text in (*NOT_RUN, *sorted(left_out))), ""]
    return "\n".join(lines)


def held(rows: Sequence[Found]) -> str:
    """Returns how many comparisons hold; those that were not run are counted separately."""
    run = [row for row in rows if not row.left_out]
    left_out = f", {len(rows) - len(run)} not run" if len(run) < len(rows) else ""
    return f"{sum(row.passes for row in run)} of {len(run)} comparisons hold{left_out}"


def cells(name: str, row: Found, controlled: bool) -> str:
    gap = (
        "not run"
        if row.left_out
        else f"{row.share:.1%} {row.note}".strip()
        if row.passes
        else f"**fails: {row.share:.1%}** {row.note}"
    )
    smallest = f" {min(row.controls.values()):.3g} × |" if row.controls else " |" if controlled else ""
    return f"| {name} | {gap} |{smallest}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write docs/cuda.md")
    parser.add_argument("--only", default="", help="run only checks whose name contains this")
    parser.add_argument("--table", default="", help="run only tables whose heading contains this")
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a rehearsal without a GPU"
    )
    cores = os.cpu_count() or 1
    parser.add_argument(
        "--jobs",
        type=int,
        default=max(1, cores * 3 // 8),
        help="number of checks of one process that run at a time",
    )
    parser.add_argument(
        "--groups",
        type=int,
        default=max(1, cores // 3),
        help="number of checks of several processes that run at a time",
    )
    words = parser.parse_args()
    if words.device == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here that torch can use: nothing was run (--device cpu rehearses)")
        return 2
    wanted = [c for c in checks() if words.only in c.name and words.table.lower() in c.table.lower()]
    if not wanted:
        print(nothing_called(words.only, words.table))
        return 2
    started = time.perf_counter()
    # A check may have several comparisons; the numbers at the end count comparisons.
    print(f"{about(words.device)}; {len(wanted)} checks", flush=True)
    found: Results = {}
    for check, rows, seconds in run_all(wanted, words.device, words.jobs, words.groups):
        print(f"[{time.perf_counter() - started:5.0f} s] {check.table}: {check.name} ({seconds:.0f} s)")
        for name, row in rows.items():
            print(f"    {line(name, row)}", flush=True)
        found.setdefault(check.table, {}).update(rows)
    every = [row for table in found.values() for row in table.values()]
    bad = [
        (table, name, row) for table, rows in found.items() for name, row in rows.items() if not row.passes
    ]
    for table, name, row in bad:
        print(f"FAILS  {table}: {name}: {row.complaint} {row.note}")
    taken = time.perf_counter() - started
    print(f"{held(every)}, {taken:.0f} s")
    for text in NOT_RUN:
        print(f"not run: {text}")
    whole = not words.only and not words.table and words.device == "cuda"
    if words.write and whole:
        PAGE.write_text(page(found, words.device, taken), encoding="utf-8")
        print(f"written: {PAGE.relative_to(ROOT)}")
    elif words.write:
        print("docs/cuda.md is written of all checks on a GPU alone")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
