"""Measures `pentatron train` from `.bin/.idx` files, log included, against the bare step."""

import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.steps import SHAPES, Case
from pentatron.data.indexed_writer import IndexedDatasetWriter
from pentatron.monitor.metrics import read_metrics

# Minimum share of the bare step's rate.
GOAL = 0.98
# Steps with compilation, first allocations and the start of data workers.
_WARM_UPS = 6
_DOCUMENT = 700


def write_pair(prefix: Path, tokens: int, vocabulary: int) -> None:
    """Writes random tokens in documents of random lengths."""
    random = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.int32 if vocabulary > 65535 else np.uint16) as writer:
        while tokens > 0:
            document = random.integers(0, vocabulary, size=int(random.integers(1, 2 * _DOCUMENT)))
            writer.add_document(document)
            tokens -= len(document)


def through_train(
    case: Case,
    words: Sequence[str],
    folder: Path,
    bare: Mapping[str, Any],
    environment: Mapping[str, str],
) -> dict[str, Any]:
    """Runs `pentatron train` in its own process; the rate is that of the median step in metrics.jsonl."""
    steps = int(words[words.index("--train-iters") + 1])
    prefix = folder / "data" / "tokens"
    write_pair(prefix, (steps + 2) * case.micro_batch * (case.sequence + 1), SHAPES[case.shape].vocabulary)
    command = [
        sys.executable,
        "-m",
        "pentatron",
        "train",
        *words,
        "--data-path",
        str(prefix),
        "--split",
        "100,0,0",
    ]
    ended = subprocess.run(command, env=dict(environment), capture_output=True, text=True)
    named = {"case": "train", "shape": case.shape, "mbs": case.micro_batch, "seq": case.sequence}
    if ended.returncode:
        print(ended.stdout[-2000:], ended.stderr[-2000:], sep="\n", file=sys.stderr)
        return named | {"error": f"pentatron train ended with {ended.returncode}"}
    rows = [row for row in read_metrics(folder / "run" / "metrics.jsonl") if row["step"] > _WARM_UPS]
    seconds = statistics.median(row["seconds"] for row in rows)
    rate = case.tokens / seconds
    # The host may run ahead, as the loop does not wait for every step: the mean shows what the median may
    # hide.
    mean = case.tokens / statistics.mean(row["seconds"] for row in rows)
    share = rate / bare["tok_s"]
    return named | {
        "tok_s": round(rate),
        "tok_s_mean": round(mean),
        "bare_tok_s": bare["tok_s"],
        "share": round(share, 4),
        "share_mean": round(mean / bare["tok_s"], 4),
        "steps": len(rows),
        "loss": round(rows[-1]["loss"], 3),
        "goal": f"{GOAL:.0%} of the bare step: {'holds' if share >= GOAL else 'MISSED'}",
    }
