"""Measures import and export against a plain copy of the same folder.

Makes a Llama-like model of random bf16 weights in a temporary folder. Then measures in turns a copy of its
files with fsync, `pentatron import`, and `pentatron export`. Each runs in its own process, whose anonymous
memory is sampled. The files are in the page cache for all three.

    python bench/convert.py --gigabytes 2.5 --repeats 3
"""

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pentatron.checkpoint.links import their_shapes
from pentatron.checkpoint.streaming import split_into_files
from pentatron.checkpoint.tensor_file import BLOCK_BYTES, TensorSpec, write_blocks
from pentatron.hf.convert import config_for
from pentatron.hf.model_config import settings_from_config
from pentatron.hf.tensor_names import tensor_links
from pentatron.parallel.sharding import Shape

ROOT = Path(__file__).resolve().parents[1]
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
SHARD_BYTES = 10**9
COPY = """
import os, shutil, sys
source, out = sys.argv[1:]
os.mkdir(out)
for name in sorted(os.listdir(source)):
    with open(os.path.join(source, name), "rb") as there, open(os.path.join(out, name), "xb") as here:
        shutil.copyfileobj(there, here, 16 * 2**20)
        here.flush()
        os.fsync(here.fileno())
"""
LEAST_SHARE = 0.5


@dataclass(frozen=True)
class Measured:
    """Minimum and median seconds, bytes per second of the median, and peak anonymous memory of all runs."""

    best_seconds: float
    seconds: float
    bytes_per_second: float
    anonymous_bytes: int


def make_model(folder: Path, wanted: float) -> tuple[int, int]:
    """Writes a model folder of at least `wanted` bytes; returns its bytes and those of its largest tensor."""
    layers = 1
    while True:
        description = {**SHAPE, "num_hidden_layers": layers}
        config = config_for(settings_from_config(description))
        shapes = their_shapes(tensor_links("llama", config.model, config.moe))
        outlines = {name: TensorSpec(torch.bfloat16, shape) for name, shape in shapes.items()}
        total = sum(outline.bytes for outline in outlines.values())
        if total >= wanted:
            break
        layers += 1
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(description))
    groups = list(split_into_files(outlines, SHARD_BYTES))
    names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    # One block of random numbers is repeated: drawing them takes longer than writing them.
    values = torch.randn(BLOCK_BYTES // 2).bfloat16()

    def block(_: str, start: Shape, size: Shape) -> Tensor:
        return values[: math.prod(size)].view(size)

    for name, group in zip(names, groups, strict=True):
        write_blocks(folder / name, group, block, {"format": "pt"}, hashed=False)
    index = {"metadata": {}, "weight_map": {t: n for n, g in zip(names, groups, strict=True) for t in g}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total, max(outline.bytes for outline in outlines.values())


def run(command: list[str]) -> tuple[float, int]:
    """Runs a command; returns its seconds and its peak anonymous memory."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    start, most = time.perf_counter(), 0
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            most = max(most, anonymous(process.pid))
            time.sleep(0.02)
    if process.returncode:
        sys.exit(f"{command} failed")
    return time.perf_counter() - start, most


def anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")), 0)


def measure(total: int, folder: Path, repeats: int) -> dict[str, Measured]:
    """Runs the commands in turns, with a copy before and after each.

    A disk may be several times slower after some GB than before.
    """
    pentatron = [sys.executable, "-m", "pentatron"]
    source, made = folder / "theirs", {way: folder / way for way in ("copy", "import", "export")}
    commands = {
        "copy": [sys.executable, "-c", COPY, str(source), str(made["copy"])],
        "import": [*pentatron, "import", str(source), str(made["import"])],
        "export": [*pentatron, "export", str(made["import"]), str(made["export"]), "--max-shard-size", "1GB"],
    }
    results: dict[str, list[tuple[float, int]]] = {way: [] for way in commands}
    for _ in range(repeats):
        for way in ("copy", "import", "copy", "export", "copy"):
            os.sync()
            results[way].append(run(commands[way]))
            shutil.rmtree(made["copy"], ignore_errors=True)
        for way in ("import", "export"):
            shutil.rmtree(made[way])
    return {
        way: Measured(
            min(seconds for seconds, _ in found),
            middle := statistics.median(seconds for seconds, _ in found),
            total / middle,
            max(memory for _, memory in found),
        )
        for way, found in results.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=2.5, metavar="N", help="minimum size of the model")
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="number of runs; the median counts"
    )
    parser.add_argument(
        "--folder", type=Path, help="parent of the temporary folder, which is removed at the end"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        total, largest = make_model(Path(temporary) / "theirs", options.gigabytes * 1e9)
        limit = 2**30 + 2 * largest
        print(
            f"{total / 1e9:.2f} GB, largest tensor {largest / 1e9:.2f} GB; torch {torch.__version__}, ",
            end="",
        )
        print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
        measured = measure(total, Path(temporary), options.repeats)
    print(f"{'':8}{'seconds':>10}{'MB/s':>8}{'of the copy':>13}{'anonymous memory':>19}")
    for way, found in measured.items():
        share = found.bytes_per_second / measured["copy"].bytes_per_second
        print(
            f"{way:8}{found.seconds:>10.1f}{found.bytes_per_second / 1e6:>8.0f}{share:>12.0%} "
            f"{found.anonymous_bytes / 2**20:>15,.0f} MiB"
        )
    ways = [measured["import"], measured["export"]]
    fast = all(way.bytes_per_second >= LEAST_SHARE * measured["copy"].bytes_per_second for way in ways)
    small = all(way.anonymous_bytes < limit for way in ways)
    print(f"\nat least {LEAST_SHARE:.0%} of the copy's speed: {'yes' if fast else 'NO'}; ", end="")
    print(f"memory under {limit / 2**20:,.0f} MiB: {'yes' if small else 'NO'}; load {os.getloadavg()[0]:.1f}")
    print(json.dumps({"bytes": total, "largest": largest, **{way: asdict(m) for way, m in measured.items()}}))


if __name__ == "__main__":
    main()
