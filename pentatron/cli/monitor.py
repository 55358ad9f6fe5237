"""`pentatron monitor [RUN_DIR]`: how a run is doing, from its metrics file; works on a finished run too."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pentatron.cli.options import read_options
from pentatron.cli.terminal import say
from pentatron.config.errors import UserError
from pentatron.monitor.metrics import read_metrics
from pentatron.monitor.report import duration

USAGE = """usage: pentatron monitor [RUN_DIR] [--interval SECONDS] [--once]

Prints how a run is doing, every few seconds, until it ends or you press Ctrl-C. Without RUN_DIR: the newest run
under runs/ and output_*/.
"""


def monitor_command(words: Sequence[str]) -> int:
    if "--help" in words or "-h" in words:
        say(USAGE)
        return 0
    once = "--once" in words
    options, plain = read_options([w for w in words if w != "--once"], {"interval": 5.0}, "pentatron monitor")
    if not 0 < options["interval"] < math.inf:
        raise UserError(f"--interval {options['interval']} must be a number of seconds above 0")
    folder = Path(plain[0]) if plain else newest_run(Path())
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        raise UserError(f"{folder} holds no metrics.jsonl; is it the folder of a run?")
    say(f"watching {folder}")
    shown = -1
    while True:
        rows = list(read_metrics(metrics))
        if rows and rows[-1]["step"] != shown:
            shown = rows[-1]["step"]
            say(status_line(rows, _total_steps(folder)))
        if once or (rows and shown >= _total_steps(folder)):
            return 0
        time.sleep(options["interval"])


def newest_run(root: Path) -> Path:
    """The run whose metrics were written last."""
    found = [*root.glob("runs/*/metrics.jsonl"), *root.glob("output_*/metrics.jsonl")]
    if not found:
        raise UserError(
            "there is no run under runs/ or output_*/ here; name its folder: pentatron monitor RUN_DIR"
        )
    return max(found, key=lambda path: path.stat().st_mtime).parent


def status_line(rows: Sequence[dict[str, Any]], total: int) -> str:
    last, recent = rows[-1], rows[-20:]
    seconds = sum(r["seconds"] for r in recent) / len(recent)
    loss = sum(r["loss"] for r in recent) / len(recent)
    left = duration(seconds * max(0, total - last["step"]))
    return (
        f"step {last['step']}/{total}  loss {last['loss']:.4f} (mean of {len(recent)}: {loss:.4f})  "
        f"{last['tokens_per_second']:,.0f} tokens/s  {last['memory_bytes'] / 2**20:,.0f} MiB  left {left}"
    )


def _total_steps(folder: Path) -> int:
    """Read from the saved configuration, so that the monitor needs nothing of the run but its folder."""
    saved = folder / "config.yaml"
    for line in saved.read_text(encoding="utf-8").splitlines() if saved.exists() else ():
        name, _, value = line.strip().lstrip("# ").partition(": ")
        if name == "train_iters":
            return int(value.split("#")[0])
    raise UserError(f"{saved} does not say how long the run is; is {folder} the folder of a run?")
