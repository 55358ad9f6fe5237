"""Runs every command behind docs/performance.md, then writes the page. Needs an idle GPU.

    python bench/whole_page.py --list
    python bench/whole_page.py --only gpt2        # commands that contain this; other results stay

A command that fails or takes too long is reported at the end; the others still run. The folders are `peers`
and `bench/results`, as on the page. Without a folder `peers`, cases that need it are left out.
"""

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PEERS, RESULTS = "peers", "bench/results"
COMPARED = f"--compare ours titan:compile ours:fp8 hf:liger --peers {PEERS} --breakdown --json {RESULTS}"
# The most important first, in case the time runs out.
COMMANDS = (
    f"python bench/gpu.py --shape qwen3-8b-8l --micro-batch 4 8 {COMPARED}",
    f"python bench/gpu.py --shape qwen2.5-1.5b --micro-batch 4 8 {COMPARED}",
    f"python bench/gpu.py --through-train --shape qwen2.5-1.5b --micro-batch 4 --json {RESULTS}",
    f"python bench/gpu.py --shape gpt2-124m --micro-batch 8 16 --compare ours 'ours:--cuda-graphs on' 'ours:--cuda-graphs off' hf:compile --at-once 4 --breakdown --json {RESULTS}",
    f"python bench/gpu.py --shape qwen3-30b-a3b-4l qwen3-dense-a3b-4l --micro-batch 4 --breakdown --json {RESULTS}",
    f"python bench/gpu.py --shape qwen2.5-1.5b --micro-batch 1 --seq 32768 --compare ours:recompute --breakdown --json {RESULTS}",
    f"python bench/gpu.py --shape qwen2.5-1.5b --micro-batch 16 --compare ours:selective ours:recompute ours:fp8-head --json {RESULTS}",
    f"python scripts/plan_check.py --device cuda --json {RESULTS}",
    f"python -m pentatron bench --find-micro-batch --preset qwen2.5-1.5b --seq-length 4096 --bf16 --out {RESULTS}/micro-batch-qwen2.5-1.5b",
    f"python -m pentatron bench --find-micro-batch --preset qwen3-8b --num-layers 8 --seq-length 4096 --bf16 --out {RESULTS}/micro-batch-qwen3-8b-8l",
    f"python bench/cpu.py --json {RESULTS}",
)
WRITE = f"python bench/gpu.py --write-from {RESULTS}"
_OF_PEERS = ("titan:compile", "hf:liger")


def words_of(command: str, has_peers: bool) -> list[str]:
    words = shlex.split(command)
    if not has_peers and "--peers" in words:
        at = words.index("--peers")
        words = [word for word in [*words[:at], *words[at + 2 :]] if word not in _OF_PEERS]
    return [sys.executable, *words[1:]]


def run(commands: Sequence[str], limit: float, has_peers: bool) -> list[str]:
    """Runs the commands; returns those that failed or timed out."""
    failed = []
    for number, command in enumerate(commands, 1):
        began = time.monotonic()
        words = words_of(command, has_peers)
        print(f"# {number} of {len(commands)}: {shlex.join(['python', *words[1:]])}", flush=True)
        try:
            ended = subprocess.run(words, cwd=ROOT, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            ended = None
        if ended != 0:
            why = f"ended after {limit:.0f} s" if ended is None else f"ended with {ended}"
            failed.append(f"{command}: {why}")
        print(f"# {time.monotonic() - began:.0f} s", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="run only commands that contain this")
    parser.add_argument("--list", action="store_true", help="print the commands without running them")
    parser.add_argument("--limit", type=float, default=1800.0, help="time limit of a command in seconds")
    options = parser.parse_args()
    wanted = [command for command in COMMANDS if options.only in command]
    if not wanted:
        print(f"no command contains {options.only!r}; --list shows them")
        return 2
    if options.list:
        print("\n".join([*wanted, WRITE]))
        return 0
    has_peers = (ROOT / PEERS).is_dir()
    if not has_peers:
        print(f"# there is no folder {PEERS}, so {' and '.join(_OF_PEERS)} are left out")
    failed = run(wanted, options.limit, has_peers)
    failed += run([WRITE], options.limit, has_peers)
    print("\n".join(f"failed: {command}" for command in failed))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
