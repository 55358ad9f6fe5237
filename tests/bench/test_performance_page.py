"""Tests the tables of docs/performance.md: the place of each result, and the commands for them."""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import cpu
from bench.gpu import read_options
from bench.performance_page import NOT_YET, TABLES, name_of, read_results, with_tables
from bench.steps import GIB, Case, record
from bench.whole_page import COMMANDS, WRITE, run, words_of
from bench.whole_page import RESULTS as RESULTS_FOLDER
from scripts import plan_check

PAGE = Path(__file__).parents[2] / "docs/performance.md"
KEPT = Path(__file__).parents[2] / RESULTS_FOLDER
LAST = {"peak": 60 * GIB, "held": 40 * GIB, "total": 139 * GIB, "loss": 11.5, "first_seconds": 30.0}
PROFILE = {"groups": {"matmul": 8.5}, "step_ms": 30.0}


def measured(name: str, shape: str, batch: int, length: int, seconds: float, **more: Any) -> dict[str, Any]:
    command = {"command": f"python bench/gpu.py --shape {shape}", "flags": "", "versions": {"torch": "2.11"}}
    return record(Case(name, shape, batch, length), [[seconds] * 3], LAST) | command | more


RESULTS: list[dict[str, Any]] = [
    measured("ours", "qwen3-8b-8l", 4, 4096, 0.40, breakdown=PROFILE),
    measured("titan:compile", "qwen3-8b-8l", 4, 4096, 0.44),
    measured("ours", "gpt2-124m", 8, 1024, 0.025, breakdown=PROFILE),
    measured("ours:--cuda-graphs off", "gpt2-124m", 8, 1024, 0.030),
    measured("hf:compile", "gpt2-124m", 8, 1024, 0.024),
    measured("ours", "qwen3-30b-a3b-4l", 4, 4096, 0.20),
    measured("ours", "qwen3-dense-a3b-4l", 4, 4096, 0.15),
    measured("ours:recompute", "qwen2.5-1.5b", 1, 32768, 0.9),
    measured("ours:selective", "qwen2.5-1.5b", 8, 4096, 0.7),
    {"case": "ours:fp8-head", "shape": "qwen2.5-1.5b", "mbs": 8, "seq": 4096, "oom": True},
    {
        "case": "train",
        "shape": "qwen2.5-1.5b",
        "mbs": 4,
        "seq": 4096,
        "tok_s": 51000,
        "bare_tok_s": 51500,
        "share": 0.9903,
        "share_mean": 0.9795,
    },
    {
        "kind": "micro-batch",
        "settings": "--preset qwen2.5-1.5b",
        "command": "pentatron bench --find-micro-batch",
        "foreseen": 12,
        "largest": 13,
        "trials": [
            {"size": 12, "fits": True, "memory": 120 * GIB, "rate": 51000.0, "reason": ""},
            {"size": 13, "fits": True, "memory": 130 * GIB, "rate": 50900.0, "reason": ""},
            {"size": 14, "fits": False, "memory": None, "rate": None, "reason": "out of memory"},
        ],
    },
    {
        "kind": "plan",
        "command": "python scripts/plan_check.py --device cuda --json /some/where",
        "rows": [
            {
                "name": "Qwen2.5-1.5B",
                "planned": {
                    **dict.fromkeys("weights optimizer gradients activations logits".split(), 10 * GIB),
                    "working": GIB,
                    "total": 51 * GIB,
                    "layer": 700 * 2**20,
                },
                "measured": {"peak": 50 * GIB, "between": 20 * GIB, "layer": 690 * 2**20},
            }
        ],
    },
    {
        "kind": "cpu",
        "command": "python bench/cpu.py --json results",
        "where": "4 layers, 2 threads",
        "goal": 1.0,
        "rows": [
            {
                "precision": "fp32",
                "ours": 1234.0,
                "transformers": 1200.0,
                "ratio": 1.03,
                "rounds": [0.99, 1.07],
            }
        ],
    },
]


def tables(results: list[dict[str, Any]]) -> dict[str, str]:
    page = with_tables(PAGE.read_text(encoding="utf-8"), results)
    assert with_tables(page, results) == page
    return {
        name: page.partition(f"<!-- {name} -->\n")[2].partition(f"\n<!-- end of {name} -->")[0]
        for name in TABLES
    }


def test_every_result_is_in_the_table_where_it_belongs(tmp_path: Path) -> None:
    for number, result in enumerate(RESULTS):
        (tmp_path / f"{number}.json").write_text(json.dumps(result))
    (tmp_path / "summary.json").write_text(json.dumps({"of": "somebody else"}))
    made = tables([dict(result) for result in read_results(tmp_path)])
    compared, others = made["comparison"].splitlines()[2:], made["others"].splitlines()[2:]
    assert len(compared) == 2 and all("qwen3-8b-8l" in row for row in compared) and "| 1.10 |" in compared[0]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in others]
    assert [row[0] for row in cells if row[0]] == [
        *("small models", "experts against dense", "long sequences", "recompute", "others")
    ]
    by_case = {(row[1].partition(",")[0], row[2]): row for row in cells}
    assert by_case["gpt2-124m", "Pentatron, bf16"][7] == "0.96 × transformers + torch.compile"
    assert by_case["gpt2-124m", "Pentatron, bf16, `--cuda-graphs off`"][7].startswith("0.80 ×")
    assert by_case["gpt2-124m", "transformers + torch.compile"][7] == ""
    # The dense model has as many FLOPs and takes a quarter less time.
    assert by_case["qwen3-30b-a3b-4l", "Pentatron, bf16"][7] == "75.0% of the TFLOP/s of qwen3-dense-a3b-4l"
    assert by_case["qwen2.5-1.5b", "Pentatron, full recompute"][1] == "qwen2.5-1.5b, 1 × 32768"
    assert by_case["qwen2.5-1.5b", "Pentatron, fp8, the head too"][3] == "out of memory"
    assert "qwen3-8b-8l" in made["kernels"] and "gpt2" not in made["kernels"]
    assert "gpt2-124m" in made["kernels of others"] and "qwen3" not in made["kernels of others"]
    assert (
        made["loop"].endswith("| 51,500 | 51,000 | 99.0% | 98.0% | holds |")
        and "at least 98%" in made["loop"]
    )
    assert made["micro-batches"].endswith(
        "| `--preset qwen2.5-1.5b` | 12 | 13 | 130.0 | 50,900 | 12 with 51,000 | 12 13 14 |"
    )
    assert made["planned"].endswith("| 51.00 | 50.00 | +2.0% | 700 | 690 |")
    assert made["cpu"].endswith("| fp32 | 1,234 | 1,200 | 1.03 | 0.99 to 1.07 | holds |")
    said = made["surroundings"]
    assert said.startswith("torch 2.11\n") and "/some/where" not in said and "pentatron bench --find" in said


def test_nothing_is_typed() -> None:
    """Without results no table has a number; with the kept results, the page is unchanged."""
    made = tables([])
    assert {made[name] for name in TABLES if name != "surroundings"} == {NOT_YET}
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page, read_results(KEPT)) == page


def test_the_newest_counts(tmp_path: Path) -> None:
    for number, seconds in enumerate((0.5, 0.4)):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(measured("ours", "qwen3-8b-8l", 4, 4096, seconds)))
        os.utime(file, (number, number))
    (found,) = read_results(tmp_path)
    assert found["step_ms"] == 400.0


def test_names() -> None:
    def name(case: str, flags: str = "") -> str:
        return name_of({"case": case, "flags": flags})

    assert name("ours:--compile off", "--seed 7") == "Pentatron, bf16, `--compile off --seed 7`"
    assert name("ours:--fp8 hybrid --cuda-graphs on") == "Pentatron, fp8, `--fp8 hybrid --cuda-graphs on`"
    assert name("ours:fp8", "--no-fused-update") == "Pentatron, fp8, `--no-fused-update`"
    assert name("titan:eager") == "torchtitan, eager" and name("hf:liger") == "transformers + liger-kernel"


def test_the_page_names_every_command_and_they_are_understood() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert "\n".join([*COMMANDS, WRITE]) in page
    for command in COMMANDS:
        words = shlex.split(command)
        if words[1] == "bench/gpu.py":
            read_options(words[2:])
    alone = words_of(COMMANDS[0], has_peers=False)
    assert "titan:compile" in COMMANDS[0] and not {"titan:compile", "hf:liger", "--peers", "peers"} & set(
        alone
    )


def test_page_reads_results_of_the_other_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"precision": "bf16", "ours": 2.0, "transformers": 1.0, "ratio": 2.0, "rounds": [1.9, 2.1]}]
    cpu.keep(tmp_path / "a", "somewhere", rows)
    said = json.dumps({"between": 20 * GIB, "layer": 690 * 2**20, "peak": 50 * GIB})
    ended = subprocess.CompletedProcess([], 0, stdout=f"{said}\n", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **named: ended)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plan_check.on_a_gpu("Qwen2.5-1.5B", str(tmp_path / "b"))
    made = tables([dict(result) for result in read_results(tmp_path)])
    assert made["cpu"].endswith("| bf16 | 2 | 1 | 2.00 | 1.90 to 2.10 | holds |")
    shown = made["planned"].splitlines()[2:]
    assert len(shown) == 2 and all("| 50.00 |" in row and row.endswith("| 690 |") for row in shown)


def test_a_command_that_fails_or_hangs_does_not_end_the_others(tmp_path: Path) -> None:
    done = tmp_path / "done"
    commands = ["python -c 'raise SystemExit(3)'", "python -c 'import time; time.sleep(60)'"]
    commands.append(f'python -c \'open("{done}", "w")\'')
    found = run(commands, 2.0, has_peers=True)
    assert [line.rpartition(": ")[2] for line in found] == [
        "ended with 3",
        "ended after 2 s",
    ] and done.exists()
