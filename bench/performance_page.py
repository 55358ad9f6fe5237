"""The tables of docs/performance.md, made of results that bench/gpu.py kept."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.kernel_groups import GROUPS

Result = Mapping[str, Any]
# Whom the others are compared with.
REFERENCE = "titan:compile"
NAMES = {
    "ours": "Pentatron, bf16",
    "ours:fp8": "Pentatron, fp8",
    "ours:fp8-e4m3": "Pentatron, fp8, gradients in e4m3 too",
    "ours:fp8-head": "Pentatron, fp8, the head too",
    "ours:recompute": "Pentatron, full recompute",
    "ours:selective": "Pentatron, selective recompute",
    "titan:compile": "torchtitan",
    "hf:liger": "transformers + liger-kernel",
    "hf:eager": "transformers, eager",
    "hf:compile": "transformers + torch.compile",
    "train": "`pentatron train`",
}


def read_results(folder: Path) -> list[Result]:
    """By shape and batch, us first; of what was measured several times, the newest."""
    newest: dict[tuple[Any, ...], Result] = {}
    for file in sorted(folder.glob("**/*.json"), key=lambda file: file.stat().st_mtime):
        result = json.loads(file.read_text(encoding="utf-8"))
        if "case" in result:
            newest[(result["case"], result.get("flags", ""), *_where(result))] = result
    order = list(NAMES)
    return sorted(
        newest.values(),
        key=lambda r: (r["shape"], r["seq"], r["mbs"], order.index(r["case"]) if r["case"] in order else 99),
    )


def name_of(result: Result) -> str:
    name = NAMES.get(result["case"], result["case"].replace("ours:", "Pentatron, "))
    return f"{name} `{result['flags']}`" if result.get("flags") else name


def comparison(results: Sequence[Result]) -> str:
    """Every shape and batch, each case against torchtitan where that was measured by the same command.

    Against its fastest block: where memory is short beside the others, those of one case may differ by a tenth."""
    measured = [r for r in results if r["case"] != "train"]
    rates = {_run(r): max(r["blocks"]) for r in measured if r["case"] == REFERENCE and "tok_s" in r}
    rows = [
        "| shape, micro-batch × sequence | case | tokens/s | TFLOP/s | MFU | GiB | × torchtitan's fastest block | spread | first step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in measured:
        where = f"{r['shape']}, {r['mbs']} × {r['seq']}"
        if "tok_s" not in r:
            why = "out of memory" if r.get("oom") else r.get("error", "failed")
            rows.append(f"| {where} | {name_of(r)} | {why} | | | | | | |")
            continue
        alone = ", alone" if _run(r) in rates and not r.get("in_turns", True) else ""
        ratio = f"{r['tok_s'] / rates[_run(r)]:.2f}" if _run(r) in rates else ""
        rows.append(
            f"| {where} | {name_of(r)} | {r['tok_s']:,} | {r['tflops']:.0f} | {r['mfu989']:.3f} | {r['mem_gib']:.1f} | {ratio} | "
            f"{r['spread']:.1%}{alone} | {r['first_step_s']:.0f} s |"
        )
    return "\n".join(rows)


def kernels(results: Sequence[Result]) -> str:
    """Milliseconds of GPU time a step, by group."""
    profiled = [r for r in results if r.get("breakdown", {}).get("groups")]
    heads = [f"{r['shape']}, {r['mbs']} × {r['seq']}, {name_of(r)}" for r in profiled]
    rows = ["| group | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for group in GROUPS:
        cells = [r["breakdown"]["groups"].get(group) for r in profiled]
        if any(cells):
            rows.append(f"| {group} | " + " | ".join("" if c is None else f"{c:.1f}" for c in cells) + " |")
    rows.append("| whole step | " + " | ".join(f"{r['breakdown']['step_ms']:.1f}" for r in profiled) + " |")
    return "\n".join(rows) if profiled else "(none)"


def loops(results: Sequence[Result]) -> str:
    rows = ["| shape, micro-batch × sequence | bare step | `pentatron train` | share |", "|---|---|---|---|"]
    for r in results:
        if r["case"] == "train" and "share" in r:
            where = f"{r['shape']}, {r['mbs']} × {r['seq']}"
            rows.append(f"| {where} | {r['bare_tok_s']:,} | {r['tok_s']:,} | {r['share']:.1%} |")
    return "\n".join(rows) if len(rows) > 2 else "Not measured yet."


def surroundings(results: Sequence[Result]) -> str:
    """Versions and commands, each once."""
    known: dict[str, str] = {}
    commands: list[str] = []
    for r in results:
        known |= r.get("versions", {})
        command = _anywhere(r.get("command", ""))
        if command and command not in commands:
            commands.append(command)
    facts = ", ".join(f"{name} {version}" for name, version in known.items())
    return "\n".join([facts, "", "```", *commands, "```"])


def _anywhere(command: str) -> str:
    """Without the folders of the machine it ran on, and what only says how long to wait."""
    for flag in ("json", "peers"):
        folder = {"json": "results"}.get(flag, flag)
        command = re.sub(rf"--{flag}[ =]\S+", f"--{flag} {folder}", command)
    return re.sub(r" --timeout[ =]\S+", "", command)


TABLES = {"comparison": comparison, "kernels": kernels, "loop": loops, "surroundings": surroundings}


def with_tables(page: str, results: Sequence[Result]) -> str:
    """The page with what stands between its marks made anew."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        assert pattern.search(page), f"the page has no place for {name}"
        text = f"{begin}\n{make(results)}\n{end}"
        page = pattern.sub(lambda _, text=text: text, page)
    return page


def _where(result: Result) -> tuple[str, int, int]:
    return result["shape"], result["mbs"], result["seq"]


def _run(result: Result) -> tuple[Any, ...]:
    return (*_where(result), result.get("command"))


def write_page(page: Path, folder: Path) -> None:
    results = read_results(folder)
    page.write_text(with_tables(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    print(f"{page}: {len(results)} results")
