"""Writes the tables of docs/performance.md from stored results.

bench/gpu.py and the other commands of bench/whole_page.py write these results.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.kernel_groups import GROUPS
from bench.steps import GIB
from bench.through_train import GOAL

# A measured step (has `case`), or the result of another command (has `kind`).
Result = Mapping[str, Any]
# The case to which ratios refer.
REFERENCE = "titan:compile"
NAMES = {
    "ours": "Pentatron, bf16",
    "ours:fp8": "Pentatron, fp8",
    "ours:fp8-e4m3": "Pentatron, fp8, gradients in e4m3 too",
    "ours:fp8-head": "Pentatron, fp8, the head too",
    "ours:fp8-rowwise": "Pentatron, fp8, a scale for each row",
    "ours:recompute": "Pentatron, full recompute",
    "ours:selective": "Pentatron, selective recompute",
    "titan:compile": "torchtitan",
    "hf:liger": "transformers + liger-kernel",
    "hf:eager": "transformers, eager",
    "hf:compile": "transformers + torch.compile",
    "train": "`pentatron train`",
}
_OTHERS = {"titan": "torchtitan", "hf": "transformers"}
# The case to compare with where torchtitan was not measured: the best of the others.
BEST_OF_OTHERS = "hf:compile"
# Dense shape with as many multiplications per token as the shape with experts, in one matrix each.
DENSE_OF = {"qwen3-30b-a3b-4l": "qwen3-dense-a3b-4l"}
_KINDS = ("small models", "experts against dense", "long sequences", "recompute", "others")
_USUAL_LENGTH = 4096
NOT_YET = "Not measured yet."


def read_results(folder: Path) -> list[Result]:
    """Reads the newest result of each measurement, sorted by shape and batch, ours first."""
    newest: dict[tuple[Any, ...], Result] = {}
    for file in sorted(folder.glob("**/*.json"), key=lambda file: (file.stat().st_mtime, file)):
        result = json.loads(file.read_text(encoding="utf-8"))
        if "case" in result:
            newest[(result["case"], result.get("flags", ""), *_where(result))] = result
        elif "kind" in result:
            newest[(result["kind"], result.get("settings", ""))] = result
    steps = [result for result in newest.values() if "case" in result]
    rest = [result for result in newest.values() if "case" not in result]
    return sorted(steps, key=_order) + sorted(rest, key=lambda r: (r["kind"], r.get("settings", "")))


def _order(result: Result) -> tuple[Any, ...]:
    case, order = result["case"], list(NAMES)
    known = order.index(case) if case in order else len(order)
    return (*_where(result), not case.startswith("ours"), known, case)


def name_of(result: Result) -> str:
    """Returns the name of a case in the tables, followed by its flags."""
    case, flags = result["case"], result.get("flags", "")
    who, _, variant = case.partition(":")
    if case in NAMES:
        name = NAMES[case]
    elif who == "ours":
        name, flags = (
            ("Pentatron, fp8" if "--fp8" in variant else NAMES["ours"]),
            f"{variant} {flags}".strip(),
        )
    else:
        name = f"{_OTHERS.get(who, who)}, {variant}"
    return f"{name}, `{flags}`" if flags else name


def place_of(result: Result) -> str:
    return f"{result['shape']}, {result['mbs']} × {result['seq']}"


def divided(results: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    """Splits measured steps by whether torchtitan was measured with the same shape and batch."""
    steps = [r for r in results if "case" in r and r["case"] != "train" and r["shape"] != "tiny"]
    compared = {_where(r) for r in steps if r["case"].startswith("titan:")}
    return (
        [r for r in steps if _where(r) in compared],
        sorted(
            (r for r in steps if _where(r) not in compared),
            key=lambda r: (_KINDS.index(kind_of(r)), *_order(r)),
        ),
    )


def beside_reference(results: Sequence[Result]) -> list[tuple[Result, float | None]]:
    """Returns the steps measured where torchtitan was, with their rates relative to torchtitan's.

    The ratio is None unless the same command measured torchtitan. It refers to torchtitan's fastest block:
    where memory is short beside other cases, the blocks of one case may differ by a tenth.
    """
    measured, _ = divided(results)
    rates = {_run(r): max(r["blocks"]) for r in measured if r["case"] == REFERENCE and "tok_s" in r}
    return [(r, r["tok_s"] / rates[_run(r)] if "tok_s" in r and _run(r) in rates else None) for r in measured]


def kind_of(result: Result) -> str:
    shape = result["shape"]
    if shape == "gpt2-124m":
        return "small models"
    if shape in DENSE_OF or shape in DENSE_OF.values():
        return "experts against dense"
    if result["seq"] > _USUAL_LENGTH:
        return "long sequences"
    return "recompute" if result["case"] in ("ours:recompute", "ours:selective") else "others"


def comparison(results: Sequence[Result]) -> str:
    """Returns the table of all cases against torchtitan, by shape and batch."""
    measured = beside_reference(results)
    rows = [
        "| shape, micro-batch × sequence | case | tokens/s | TFLOP/s | MFU | GiB | × torchtitan's fastest block | spread | first step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r, against in measured:
        if "tok_s" not in r:
            rows.append(f"| {place_of(r)} | {name_of(r)} | {_failure(r)} | | | | | | |")
            continue
        alone = ", alone" if against is not None and not r.get("in_turns", True) else ""
        ratio = "" if against is None else f"{against:.2f}"
        rows.append(
            f"| {place_of(r)} | {name_of(r)} | {_rates(r)} | {ratio} | {r['spread']:.1%}{alone} | {r['first_step_s']:.0f} s |"
        )
    return "\n".join(rows) if measured else NOT_YET


def without_torchtitan(results: Sequence[Result]) -> str:
    """Returns the table of shapes and batches without torchtitan."""
    _, measured = divided(results)
    rows = [
        "| | shape, micro-batch × sequence | case | tokens/s | TFLOP/s | MFU | GiB | compared | spread |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    before = ""
    for r in measured:
        kind, before = ("" if kind_of(r) == before else kind_of(r)), kind_of(r)
        if "tok_s" not in r:
            rows.append(f"| {kind} | {place_of(r)} | {name_of(r)} | {_failure(r)} | | | | | |")
            continue
        rows.append(
            f"| {kind} | {place_of(r)} | {name_of(r)} | {_rates(r)} | {_compared(r, measured)} | {r['spread']:.1%} |"
        )
    return "\n".join(rows) if measured else NOT_YET


def _compared(result: Result, measured: Sequence[Result]) -> str:
    """Compares experts with the dense shape in TFLOP/s, and ours with the best of the others.

    The dense shape may come from another command; the best of the others must come from the same one.
    """
    dense = DENSE_OF.get(result["shape"])
    for r in measured:
        if "tok_s" not in r:
            continue
        same = _where(r)[1:] == _where(result)[1:] and r["case"] == result["case"]
        if r["shape"] == dense and same and r.get("flags") == result.get("flags"):
            return f"{result['tflops'] / r['tflops']:.1%} of the TFLOP/s of {dense}"
        if r["case"] == BEST_OF_OTHERS and _run(r) == _run(result) and result["case"].startswith("ours"):
            return f"{result['tok_s'] / r['tok_s']:.2f} × {name_of(r)}"
    return ""


def _rates(result: Result) -> str:
    return f"{result['tok_s']:,} | {result['tflops']:.0f} | {result['mfu989']:.3f} | {result['mem_gib']:.1f}"


def _failure(result: Result) -> str:
    return "out of memory" if result.get("oom") else str(result.get("error", "failed"))


def kernels(measured: Sequence[Result]) -> str:
    """Returns the table of milliseconds of GPU time per step, by kernel group."""
    profiled = [r for r in measured if r.get("breakdown", {}).get("groups")]
    heads = [f"{place_of(r)}, {name_of(r)}" for r in profiled]
    rows = ["| group | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for group in GROUPS:
        cells = [r["breakdown"]["groups"].get(group) for r in profiled]
        if any(cells):
            rows.append(f"| {group} | " + " | ".join("" if c is None else f"{c:.1f}" for c in cells) + " |")
    rows.append("| whole step | " + " | ".join(f"{r['breakdown']['step_ms']:.1f}" for r in profiled) + " |")
    return "\n".join(rows) if profiled else NOT_YET


def loops(results: Sequence[Result]) -> str:
    goal = f"at least {GOAL:.0%}"
    rows = [
        f"| shape, micro-batch × sequence | bare step | `pentatron train` | share | of the mean step | {goal} |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        if r.get("case") == "train" and "share" in r:
            mean = f"{r['share_mean']:.1%}" if "share_mean" in r else ""
            holds = "holds" if r["share"] >= GOAL else "missed"
            rows.append(
                f"| {place_of(r)} | {r['bare_tok_s']:,} | {r['tok_s']:,} | {r['share']:.1%} | {mean} | {holds} |"
            )
    return "\n".join(rows) if len(rows) > 2 else NOT_YET


def micro_batches(results: Sequence[Result]) -> str:
    rows = [
        "| settings | estimated by `pentatron plan` | largest that fits | GiB | tokens/s | fastest | tried |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in _of_kind(results, "micro-batch"):
        fitting = {trial["size"]: trial for trial in r["trials"] if trial["fits"]}
        tried = " ".join(str(trial["size"]) for trial in r["trials"])
        if r["largest"] is None:
            rows.append(f"| `{r['settings']}` | {r['foreseen'] or 'none'} | none | | | | {tried} |")
            continue
        most = fitting[r["largest"]]
        fastest = max(fitting.values(), key=lambda trial: trial["rate"] or 0.0)
        rows.append(
            f"| `{r['settings']}` | {r['foreseen'] or 'none'} | {most['size']} | {most['memory'] / GIB:.1f} | {most['rate']:,.0f} | "
            f"{fastest['size']} with {fastest['rate']:,.0f} | {tried} |"
        )
    return "\n".join(rows) if len(rows) > 2 else NOT_YET


def planned(results: Sequence[Result]) -> str:
    """Returns the table of the peak memory of a step, by formula and by the allocator."""
    parts = ("weights", "optimizer", "gradients", "activations", "logits", "working")
    rows = [
        f"| GiB | {' | '.join(parts)} | planned | measured | difference | a layer, MiB: planned | measured |",
        "|---" * (len(parts) + 6) + "|",
    ]
    for r in (row for result in _of_kind(results, "plan") for row in result["rows"]):
        plan, found = r["planned"], r["measured"]
        cells = " | ".join(f"{plan[part] / GIB:.2f}" for part in parts)
        rows.append(
            f"| {r['name']} | {cells} | {plan['total'] / GIB:.2f} | {found['peak'] / GIB:.2f} | {plan['total'] / found['peak'] - 1:+.1%} | "
            f"{plan['layer'] / 2**20:.0f} | {found['layer'] / 2**20:.0f} |"
        )
    return "\n".join(rows) if len(rows) > 2 else NOT_YET


def on_a_cpu(results: Sequence[Result]) -> str:
    lines = []
    for r in _of_kind(results, "cpu"):
        lines += [
            f"{r['where']}:",
            "",
            f"| | Pentatron, tokens/s | transformers, tokens/s | ratio | of single rounds | at least {r['goal']:.2f} |",
            "|---|---|---|---|---|---|",
        ]
        for row in r["rows"]:
            least, most = row["rounds"]
            holds = "holds" if row["ratio"] >= r["goal"] else "missed"
            lines.append(
                f"| {row['precision']} | {row['ours']:,.0f} | {row['transformers']:,.0f} | {row['ratio']:.2f} | {least:.2f} to {most:.2f} | "
                f"{holds} |"
            )
    return "\n".join(lines) or NOT_YET


def _of_kind(results: Sequence[Result], kind: str) -> list[Result]:
    return [result for result in results if result.get("kind") == kind]


def versions_and_commands(results: Sequence[Result]) -> str:
    """Lists the versions of the machine with the GPU, and all commands, each once."""
    known: dict[str, str] = {}
    commands: list[str] = []
    for r in results:
        known |= r.get("versions", {})
        command = _without_local_paths(r.get("command", ""))
        if command and command not in commands:
            commands.append(command)
    facts = ", ".join(f"{name} {version}" for name, version in known.items())
    return "\n".join([facts, "", "```", *commands, "```"])


def _without_local_paths(command: str) -> str:
    """Removes the folders of the measuring machine and the timeout from a command."""
    for flag in ("json", "peers"):
        folder = {"json": "bench/results"}.get(flag, flag)
        command = re.sub(rf"--{flag}[ =]\S+", f"--{flag} {folder}", command)
    return re.sub(r" --timeout[ =]\S+", "", command)


TABLES = {
    "comparison": comparison,
    "others": without_torchtitan,
    "kernels": lambda results: kernels(divided(results)[0]),
    "kernels of others": lambda results: kernels(divided(results)[1]),
    "loop": loops,
    "micro-batches": micro_batches,
    "planned": planned,
    "cpu": on_a_cpu,
    "surroundings": versions_and_commands,
}


def with_tables(page: str, results: Sequence[Result]) -> str:
    """Replaces the tables between the marks of the page."""
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
