"""Compares loss curves of bf16 and fp16 with fp32, fp8 with bf16, and bf16 layouts with each other.

Trains the demo's model on the demo's corpus in three groups of runs:

- **Precision.** fp32 with two seeds, bf16 and fp16 with the first seed. Curves are means over windows of
  steps. The distance between the two seeds of fp32 is the distance that bf16 and fp16 may have from fp32.
- **Layouts.** Runs in bf16 with the same seed and data, whose losses are compared step by step. One process
  with other micro-batch sizes only changes the order of additions: the distances between pairs of such runs
  limit those of layouts. A run with another learning rate shows that the measure detects a difference.
- **fp8** (only on a GPU with fp8 matmuls). A wider model in bf16 with two seeds, and with the first seed in
  every format and recipe of fp8. The distance between the two seeds is the distance that fp8 may have from
  bf16.

Processes that share one GPU exchange through the host. On a CPU fp16 runs only with `--fp16`: its matmuls are
hundreds of times slower there.

    python bench/precision.py --steps 400                    # on a GPU if there is one
    python bench/precision.py --steps 100 --only fp8
    python bench/precision.py --device cpu --steps 60 --only layouts
    python bench/precision.py --device cpu --steps 10 --only precision --fp16
"""

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from pentatron.parallel.world import single_process
from pentatron.settings.entry_points import TRAIN
from pentatron.settings.resolve import gather, resolve
from pentatron.settings.settings import ProcessFacts
from pentatron.train.session import run_training

ROOT = Path(__file__).parents[1]
ALONE = "--nproc-per-node 1 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1"
TWO = "--nproc-per-node 2 --pipeline-model-parallel-size 1"
SEEDS = (1234, 4321)
# Micro-batch sizes of the bf16 runs on one process.
CUTS = (16, 8, 4, 2, 1)
LAYOUTS = {
    "2 data": f"{TWO} --tensor-model-parallel-size 1",
    "2 data, ZeRO 1": f"{TWO} --tensor-model-parallel-size 1 --zero-stage 1",
    "2 data, ZeRO 3": f"{TWO} --tensor-model-parallel-size 1 --zero-stage 3",
    "2 tensor": f"{TWO} --tensor-model-parallel-size 2",
    "2 tensor + sequence": f"{TWO} --tensor-model-parallel-size 2 --sequence-parallel",
    "2 context": f"{TWO} --tensor-model-parallel-size 1 --context-parallel-size 2 --cp-comm-type all_gather",
    "2 pipeline": "--nproc-per-node 2 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2",
}
# Large enough that fp8 products are most of its arithmetic. Compiling would take longer than the steps.
FP8_MODEL = (
    "--num-layers 6 --hidden-size 512 --ffn-hidden-size 1536 --num-attention-heads 8 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope --seq-length 512 --max-position-embeddings 512 --lr 1e-3 "
    "--corpus python --corpus-bytes 1000000 --vocab-size 320 --compile off"
)
FP8 = {
    "hybrid": "--fp8 hybrid",
    "e4m3": "--fp8 e4m3",
    "hybrid, the head too": "--fp8 hybrid --fp8-output-layer",
    "hybrid rowwise": "--fp8 hybrid --fp8-recipe rowwise",
    "e4m3 rowwise, the head too": "--fp8 e4m3 --fp8-recipe rowwise --fp8-output-layer",
}
OTHER = "--lr 0.00306"
# Allowed distance between layouts, relative to the largest between runs of one layout: each is a single draw.
ALLOWED = 1.5


@dataclasses.dataclass(frozen=True)
class Machine:
    device: str
    steps: int
    folder: Path

    def losses(self, name: str, words: str) -> list[float]:
        """Trains in a process of its own; returns the losses of all steps that were not skipped."""
        command = [sys.executable, "-m", "pentatron", "train", *self._words(name, words)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(
                f"{name}: {' '.join(command)} failed\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        return self._read(name)

    def losses_here(self, name: str, words: str) -> list[float]:
        """Trains in this process, because most of a short run on a GPU is its start."""
        told = io.StringIO()
        resolved = resolve(gather(self._words(name, words), TRAIN), ProcessFacts(1))
        with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
            run_training(resolved, single_process(torch.device(self.device)), resumes=False)
        return self._read(name)

    def _words(self, name: str, words: str) -> list[str]:
        schedule = f"--train-iters {self.steps} --lr-decay-iters {max(self.steps, 400)} --lr-warmup-iters 20"
        quiet = f"--eval-interval 0 --save-interval {self.steps} --sample-tokens 0 --progress-bar off"
        return f"{words} {schedule} {quiet} --device {self.device} --run-dir {self._folder(name)}".split()

    def _folder(self, name: str) -> Path:
        return self.folder / "".join(c if c.isalnum() else "-" for c in name)

    def _read(self, name: str) -> list[float]:
        rows = [json.loads(line) for line in (self._folder(name) / "metrics.jsonl").read_text().splitlines()]
        made = [float(row["loss"]) for row in rows if not row.get("skipped")]
        skipped = f", {len(rows) - len(made)} steps skipped" if len(made) < len(rows) else ""
        print(f"  {name:<34} loss {made[0]:.4f} → {statistics.mean(made[-10:]):.4f}{skipped}", flush=True)
        return made


def windows(losses: Sequence[float], size: int) -> list[float]:
    return [statistics.mean(losses[i : i + size]) for i in range(0, len(losses) - size + 1, size)]


def curve_gap(one: Sequence[float], other: Sequence[float], size: int) -> tuple[float, float]:
    """Returns the largest and the mean distance of two curves."""
    apart = [abs(a - b) for a, b in zip(windows(one, size), windows(other, size))]
    return max(apart), statistics.mean(apart)


def step_gap(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the root mean square of the relative distance at each step."""
    return math.sqrt(statistics.mean(((a - b) / b) ** 2 for a, b in zip(one, other, strict=True)))


def precisions(machine: Machine, fp16: bool) -> bool:
    size = max(1, machine.steps // 20)
    print(f"\nprecision: one process, {machine.steps} steps, windows of {size}", flush=True)
    base = f"{ALONE} --micro-batch-size 16"
    exact = machine.losses("fp32", f"{base} --seed {SEEDS[0]}")
    other = machine.losses("fp32, another seed", f"{base} --seed {SEEDS[1]}")
    rounded = {"bf16": machine.losses("bf16", f"{base} --seed {SEEDS[0]} --bf16")}
    if fp16:
        words = f"{base} --seed {SEEDS[0]} --fp16"
        rounded["fp16 from 2^16"] = machine.losses("fp16 from 2^16", f"{words} --initial-loss-scale 65536")
        rounded["fp16 static 2^12"] = machine.losses("fp16 static 2^12", f"{words} --loss-scale 4096")
        if machine.steps >= 100:
            rounded["fp16 from 2^32"] = machine.losses("fp16 from 2^32", words)
    return within_seeds("fp32", exact, other, rounded, size)


def within_seeds(
    what: str,
    exact: Sequence[float],
    other: Sequence[float],
    rounded: Mapping[str, Sequence[float]],
    size: int,
) -> bool:
    """Checks whether curves are as near to `exact` as `other`, a run with another seed."""
    allowed = curve_gap(other, exact, size)
    print(f"\n  {f'distance from {what}':<34} {'largest':>10} {'mean':>10}")
    print(f"  {'another seed (what is allowed)':<34} {allowed[0]:>10.4f} {allowed[1]:>10.4f}")
    agrees = True
    for name, losses in rounded.items():
        found = curve_gap(losses, exact, size)
        within = found[0] <= allowed[0] and found[1] <= allowed[1]
        agrees &= within
        print(f"  {name:<34} {found[0]:>10.4f} {found[1]:>10.4f}   {'within' if within else 'NOT WITHIN'}")
    return agrees


def eight_bits(machine: Machine) -> bool:
    size = max(1, machine.steps // 20)
    print(f"\nfp8: one process, {machine.steps} steps, windows of {size}", flush=True)
    base = f"--micro-batch-size 16 --global-batch-size 16 --bf16 {FP8_MODEL} --no-save-checkpoints"
    wanted = {"bf16": f"--seed {SEEDS[0]}", "bf16, another seed": f"--seed {SEEDS[1]}"}
    wanted |= {name: f"--seed {SEEDS[0]} {words}" for name, words in FP8.items()}
    curves = {name: machine.losses_here(name, f"{base} {words}") for name, words in wanted.items()}
    shown = [round(i * (machine.steps - size) / 5) for i in range(6)]
    print(f"\n  {'means from step':<34} " + " ".join(f"{i + 1:>8}" for i in shown))
    for name, losses in curves.items():
        print(f"  {name:<34} " + " ".join(f"{statistics.mean(losses[i : i + size]):>8.4f}" for i in shown))
    return within_seeds(
        "bf16", curves["bf16"], curves["bf16, another seed"], {n: curves[n] for n in FP8}, size
    )


def layouts(machine: Machine) -> bool:
    print(f"\nlayouts: bf16, {machine.steps} steps, the same samples in all runs", flush=True)
    words = f"--bf16 --seed {SEEDS[0]}"
    cut = {
        f"one process, micro-batch {n}": machine.losses(
            f"one process, micro-batch {n}", f"{ALONE} {words} --micro-batch-size {n}"
        )
        for n in CUTS
    }
    spread = {
        name: machine.losses(name, f"{flags} {words} --micro-batch-size 4") for name, flags in LAYOUTS.items()
    }
    control = machine.losses(f"control: {OTHER}", f"{ALONE} {words} --micro-batch-size 16 {OTHER}")
    own = [step_gap(a, b) for a, b in itertools.combinations(cut.values(), 2)]
    reference = next(iter(cut.values()))
    print(f"\n  {'relative distance of losses, root mean square over the steps':<62}")
    print(
        f"  one layout in other orders, {len(own)} pairs: largest {max(own):.2e}, median {statistics.median(own):.2e}"
    )
    for name, losses in spread.items():
        print(f"  {name:<34} from one process: {step_gap(losses, reference):.2e}")
    pairs = {(a, b): step_gap(spread[a], spread[b]) for a, b in itertools.combinations(spread, 2)}
    (first, second), largest = max(pairs.items(), key=lambda item: item[1])
    between = max(largest, *(step_gap(losses, reference) for losses in spread.values()))
    print(f"  furthest pair of layouts: {first} and {second}, {largest:.2e}")
    print(f"  control, learning rate 2 % higher: {step_gap(control, reference):.2e}")
    agrees = between <= ALLOWED * max(own)
    print(
        f"  layouts are {'' if agrees else 'NOT '}as near to each other as one layout to itself: {between:.2e} against "
        f"{max(own):.2e} (allowed: {ALLOWED} ×)"
    )
    return agrees


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--only", choices=("precision", "layouts", "fp8"))
    parser.add_argument("--fp16", action="store_true", help="run fp16 on a CPU too")
    options = parser.parse_args()
    on_gpu = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    if options.only == "fp8" and not on_gpu:
        sys.exit("--only fp8 needs a GPU with fp8 matmuls; there is none here")
    place = torch.cuda.get_device_name() if on_gpu else f"CPU ({platform.machine()})"
    print(f"torch {torch.__version__}, {place}")
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine("cuda" if on_gpu else "cpu", options.steps, Path(folder))
        verdicts = []
        if options.only in (None, "precision"):
            if not on_gpu and not options.fp16:
                print("fp16 is left out on a CPU (--fp16 asks for it)")
            verdicts.append(precisions(machine, fp16=on_gpu or options.fp16))
        if options.only in (None, "layouts"):
            verdicts.append(layouts(machine))
        if options.only == "fp8" or (options.only is None and on_gpu):
            verdicts.append(eight_bits(machine))
    sys.exit(0 if all(verdicts) else 1)


if __name__ == "__main__":
    main()
