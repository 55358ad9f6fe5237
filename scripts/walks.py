"""Lists the package files behind a forward step, a save, a batch, and the supervision of workers.

    python scripts/walks.py            # prints the files of each walk, from short CPU runs
    python scripts/walks.py --only forward save

A file counts once, if it is on the stack or entered on the way.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = f"{ROOT}/pentatron/"
WALKS = {
    "forward": "command → first F.linear of a step (files on the stack)",
    "save": "Trainer.save → fsync (files on the stack at fsync or rename)",
    "batch": "a batch from .bin to the optimizer update (files on the stack at its reading, forward, reduction and update)",
    "supervision": "supervision of workers (modules)",
}
MOST = {"forward": 12, "save": 8, "batch": 15, "supervision": 8}
RUN = (
    "train --nproc-per-node 1 --vocab-size 512 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --global-batch-size 2 --train-iters 3 --no-check-memory"
).split()


def stack_files(frame: FrameType | None) -> list[str]:
    """Returns the package files on the stack, outermost first, each once."""
    files: list[str] = []
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            files.append(name.removeprefix(PACKAGE))
        frame = frame.f_back
    return list(dict.fromkeys(reversed(files)))


def forward_walk(found: dict[str, list[str]]) -> None:
    import torch.nn.functional as functional

    linear: Callable[..., object] = functional.linear

    def watched(*given: object, **named: object) -> object:
        files = stack_files(sys._getframe(1))
        if "train/step.py" in files and "forward" not in found:
            found["forward"] = files
        return linear(*given, **named)

    functional.linear = watched  # type: ignore[assignment]


def save_walk(found: dict[str, list[str]]) -> None:
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        files = stack_files(sys._getframe(1))
        if any("checkpoint/" in file for file in files):
            start = next((i for i, file in enumerate(files) if file == "train/trainer.py"), 0)
            found["save"] = list(dict.fromkeys([*found.get("save", []), *files[start:]]))
        fsync(descriptor)

    os.fsync = watched  # type: ignore[assignment]


def batch_walk(found: dict[str, list[str]]) -> None:
    """Collects the stacks below the trainer at reading, forward, gradient reduction and weight update."""
    from pentatron.data.indexed import IndexedDataset
    from pentatron.models.causal_lm import CausalLM
    from pentatron.optim.update_rules import Adam
    from pentatron.parallel.reduction import Reduction

    def watch(owner: Any, name: str) -> None:
        function = getattr(owner, name)
        own_file = inspect.getsourcefile(inspect.unwrap(function)).removeprefix(PACKAGE)

        def watched(*given: Any, **named: Any) -> Any:
            files = stack_files(sys._getframe(1))
            if "train/trainer.py" in files and "train/evaluation.py" not in files:
                way = [*files[files.index("train/trainer.py") :], own_file]
                found["batch"] = list(dict.fromkeys([*found.get("batch", []), *way]))
            return function(*given, **named)

        setattr(owner, name, watched)

    watch(IndexedDataset, "get")
    watch(CausalLM, "forward")
    watch(Reduction, "end_backward")
    watch(Adam, "step")


def supervision_modules() -> list[str]:
    """Returns the modules that supervise workers: those of `supervise`, and the worker's side."""
    files = sorted((ROOT / "pentatron/supervise").glob("*.py"))
    return [*(f"supervise/{file.name}" for file in files if file.name != "__init__.py"), "cli/worker.py"]


def run(walks: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    if "supervision" in walks:
        found["supervision"] = supervision_modules()
    for walk, watch in (("forward", forward_walk), ("save", save_walk), ("batch", batch_walk)):
        if walk in walks:
            watch(found)
    from pentatron.__main__ import main

    with tempfile.TemporaryDirectory() as folder:
        write_pair(Path(folder) / "text")
        sys.argv = ["pentatron", *RUN, "--data-path", f"{folder}/text", "--run-dir", f"{folder}/run"]
        main()
    return found


def write_pair(prefix: Path) -> None:
    import numpy

    from pentatron.data.indexed_writer import IndexedDatasetWriter

    with IndexedDatasetWriter(prefix, numpy.uint16) as writer:
        for _ in range(20):
            writer.add_document(list(range(100)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=list(WALKS), default=list(WALKS))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print("WALKS " + json.dumps(run(options.only)))
        return
    made = subprocess.run(
        [sys.executable, __file__, "--inside", "--only", *options.only],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = json.loads(next(line for line in made.splitlines() if line.startswith("WALKS "))[6:])
    for walk, files in found.items():
        print(f"{WALKS[walk]}: {len(files)}, at most {MOST[walk]}")
        print("".join(f"  {file}\n" for file in files))


if __name__ == "__main__":
    main()
