"""Measures training steps on one GPU: our trainer beside torchtitan and transformers.

    python bench/gpu.py --shape qwen2.5-1.5b qwen3-8b-8l --micro-batch 4 --breakdown
    python bench/gpu.py --compare ours titan:compile hf:liger --shape qwen3-8b-8l --micro-batch 4 8
        --peers FOLDER --json bench/results
    python bench/gpu.py --through-train --shape qwen2.5-1.5b --micro-batch 4
    python bench/gpu.py --write-from bench/results

A case is `ours`, `ours:fp8` (or another name of VARIANTS in bench/ours.py), `ours:--compile off` (any flags
of `pentatron train`), or a case of bench/peers.py. Every case has its own process and compiles once. Cases
compute in turns, two at a time: three blocks of eight steps each, after four warm-up steps. More at a time
(`--at-once`) may fill the GPU, which makes the allocator return memory in every step. Times are those of CUDA
events around a whole step: forward, loss, backward, clipping at 1.0, AdamW. The rate is that of the median
step; `spread` compares the medians of the blocks.

`--peers` names a folder with the unpacked wheels of the other libraries. `--json FOLDER` writes every result
as a file. `--write-from FOLDER` writes the tables of docs/performance.md from such files and from those of
the other commands in bench/whole_page.py.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.kernel_groups import table
from bench.ours import words_of
from bench.performance_page import write_page
from bench.steps import SHAPES, Case, versions
from bench.through_train import through_train
from bench.turns import CaseProcess, Turns

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs/performance.md"
PACKAGES = ("transformers", "triton", "liger-kernel", "torchtitan", "torchao")
# Sequence lengths of the shapes that are not measured with 4096 tokens.
_USUAL_LENGTH = {"gpt2-124m": 1024, "tiny": 32}


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.environment = dict(os.environ)
        folders = [
            str(HERE.parent),
            *([options.peers] if options.peers else []),
            os.environ.get("PYTHONPATH", ""),
        ]
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        self.known = self._versions()

    def _versions(self) -> dict[str, str]:
        """Reads versions in a process that ends, because a CUDA context here would keep GPU memory."""
        code = f"import json; from bench.steps import versions; print(json.dumps(versions(*{PACKAGES!r})))"
        asked = subprocess.run(
            [sys.executable, "-c", code],
            env=self.environment,
            capture_output=True,
            text=True,
            cwd=HERE.parent,
        )
        return dict(json.loads(asked.stdout)) if asked.returncode == 0 else versions(*PACKAGES)

    def start(self, case: Case) -> CaseProcess:
        own = case.name.partition(":")[0] == "ours"
        script = HERE / "ours.py" if own else Path(self.options.peers_script)
        words = ["--case", case.name, "--shape", case.shape, "--micro-batch", str(case.micro_batch)]
        words += ["--seq", str(case.sequence), "--device", case.device]
        words += [f"--flags={self.options.flags}"] if own and self.options.flags else []
        return CaseProcess(case, [sys.executable, str(script), *words], self.environment)

    def tell(self, result: dict[str, Any]) -> None:
        self.show(result)
        if self.options.json:
            self._keep(result)

    def show(self, result: dict[str, Any]) -> None:
        found = dict(result)
        groups = found.pop("breakdown", None)
        if len(found.get("syncs", ())) > 8:
            found["syncs"] = [*found["syncs"][:8], f"and {len(found['syncs']) - 8} more"]
        print(json.dumps(found), flush=True)
        if groups is not None:
            print("\n".join(table(groups, found["mbs"] * found["seq"])), flush=True)

    def _keep(self, result: dict[str, Any]) -> None:
        folder = Path(self.options.json)
        folder.mkdir(parents=True, exist_ok=True)
        flags = self.options.flags if result["case"].startswith("ours") else ""
        facts = {"flags": flags, "versions": self.known, "command": self.command}
        name = f"{result['case']}{flags}-{result['shape']}-{result['mbs']}x{result['seq']}"
        file = folder / f"{''.join(c if c.isalnum() or c in '.-' else '_' for c in name)}.json"
        file.write_text(json.dumps(result | facts, indent=1) + "\n", encoding="utf-8")

    @property
    def command(self) -> str:
        return shlex.join(["python", "bench/gpu.py", *sys.argv[1:]])


def measure(bench: Bench, options: argparse.Namespace) -> None:
    began = time.monotonic()
    turns = Turns(
        bench.start,
        options.blocks,
        options.steps,
        options.timeout,
        options.breakdown or 0,
        options.at_once,
    )
    turns.run(
        [
            Case(name, shape, micro_batch, options.seq or _USUAL_LENGTH.get(shape, 4096), options.device)
            for shape in options.shape
            for micro_batch in options.micro_batch
            for name in options.compare
        ],
        bench.tell,
    )
    print(f"# {time.monotonic() - began:.0f} s", file=sys.stderr)


def against_train(bench: Bench, options: argparse.Namespace) -> None:
    """Measures `pentatron train` from `.bin/.idx` files beside the bare step."""
    for shape in options.shape:
        for micro_batch in options.micro_batch:
            length = options.seq or _USUAL_LENGTH.get(shape, 4096)
            case = Case("ours", shape, micro_batch, length, options.device)
            found: list[dict[str, Any]] = []
            Turns(bench.start, options.blocks, options.steps, options.timeout).run([case], found.append)
            # Not written: its file would replace that of the same case measured beside others.
            bench.show(found[0])
            if "tok_s" not in found[0]:
                continue
            with tempfile.TemporaryDirectory() as folder:
                words = words_of(case, options.flags, Path(folder) / "run", options.train_steps)
                bench.tell(through_train(case, words, Path(folder), found[0], bench.environment))


def read_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--compare", nargs="+", default=["ours"], metavar="CASE", help="cases to measure in turns"
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["qwen3-8b-8l"])
    parser.add_argument("--micro-batch", nargs="+", type=int, default=[4], metavar="N")
    parser.add_argument("--seq", type=int, help="tokens of a sequence (default: 4096; GPT-2: 1024)")
    parser.add_argument(
        "--flags", default="", help="further flags for pentatron train, in every case of ours"
    )
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a block")
    parser.add_argument(
        "--breakdown",
        type=int,
        nargs="?",
        const=2,
        metavar="STEPS",
        help="profile this many steps and print GPU time by kernel group",
    )
    parser.add_argument(
        "--at-once", type=int, default=2, help="cases that share the GPU and compute in turns"
    )
    parser.add_argument(
        "--through-train", action="store_true", help="measure pentatron train beside the bare step"
    )
    parser.add_argument("--train-steps", type=int, default=40, help="steps of the run with --through-train")
    parser.add_argument("--peers", help="folder with the unpacked wheels of the other libraries")
    parser.add_argument("--peers-script", default=str(HERE / "peers.py"))
    parser.add_argument(
        "--timeout", type=float, default=240.0, help="seconds to wait for an answer of a process"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to try out this script"
    )
    parser.add_argument("--json", metavar="FOLDER", help="write every result into this folder")
    parser.add_argument(
        "--write-from",
        metavar="FOLDER",
        help="write the tables of docs/performance.md from this folder without measuring",
    )
    return parser.parse_args(words)


def main() -> None:
    options = read_options()
    if options.write_from:
        write_page(PAGE, Path(options.write_from))
        return
    bench = Bench(options)
    print(json.dumps({"versions": bench.known}), flush=True)
    if options.through_train:
        against_train(bench, options)
    else:
        measure(bench, options)


if __name__ == "__main__":
    main()
