"""Loads forged checkpoints and Hugging Face folders; yields those that end with more than a sentence."""

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.adversary.bounded import Outcome, run_bounded
from tests.adversary.mutations import Place, mutations, write_manifest

# A run that saves every step: a test trains one step and resumes for another.
RUN = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --vocab-size 31 --seq-length 8 --dataset-size 64 --global-batch-size 4 "
    "--micro-batch-size 4 --eval-interval 0 --device cpu --progress-bar off --save-interval 1"
).split()
# Memory limit beyond what a test process has; a model of a few kilobytes needs no more.
MEMORY_BYTES = 1 << 30


def make_run(folder: Path, *words: str) -> Path:
    """Trains a run of one step."""
    outcome = run_bounded(["train", *RUN, *words, "--train-iters", "1", "--run-dir", folder], 4 << 30, 120)
    assert outcome.kind == "accepted", outcome.said
    return folder


def step_of(run: Path) -> Path:
    return next((run / "checkpoints").glob("step-*"))


def manifest_of(run: Path) -> dict[str, Any]:
    """The manifest of the run's step, without its checksum."""
    found: dict[str, Any] = json.loads((step_of(run) / "manifest.json").read_text(encoding="utf-8"))
    del found["sha256"]
    return found


def load_words(command: str, run: Path, out: Path) -> list[object]:
    """Returns a command line: `resume` continues the run, `finetune` begins another with its weights."""
    words: dict[str, list[object]] = {
        "resume": ["train", *RUN, "--train-iters", "2", "--run-dir", run],
        "finetune": ["train", *RUN[8:], "--train-iters", "1", "--run-dir", out, "--load", run, "--finetune"],
        "generate": ["generate", run, "--tokens", "1,2", "--max-new-tokens", "2"],
        "inspect": ["checkpoint", "inspect", step_of(run)],
        "export": ["export", run, out],
    }
    return words[command]


def load_forged(
    run: Path, work: Path, command: str, manifest: dict[str, Any], seconds: float = 20
) -> Outcome:
    """Loads a copy of the run with a forged, correctly signed manifest by a command."""
    copied, out = work / "run", work / "out"
    for folder in (copied, out):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run, copied)
    write_manifest(step_of(copied), manifest)
    return run_bounded(load_words(command, copied, out), MEMORY_BYTES, seconds)


def failures_of_manifests(
    run: Path,
    work: Path,
    command: str,
    rng: random.Random,
    limit: int | None,
    under: Sequence[Place] = ((),),
) -> Iterator[tuple[str, Outcome]]:
    """Yields those of `limit` forged manifests that neither load nor end with one sentence."""
    for label, manifest in mutations(manifest_of(run), rng, under=under, limit=limit):
        outcome = load_forged(run, work, command, manifest)
        if not outcome.is_good:
            yield label, outcome


def failures_of_configurations(
    model: Path, work: Path, command: str, rng: random.Random, limit: int | None
) -> Iterator[tuple[str, Outcome]]:
    """Yields those of `limit` changed config.json files that neither load nor end with one sentence.

    `command` is import or generate.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    for label, changed in mutations({"head_dim": None, **config}, rng, limit=limit):
        outcome = load_configuration(model, work, command, changed)
        if not outcome.is_good:
            yield label, outcome


def load_configuration(model: Path, work: Path, command: str, config: dict[str, Any]) -> Outcome:
    """Runs a command on a copy of the folder with another config.json."""
    copied, out = work / "model", work / "out"
    for folder in (copied, out):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, copied)
    (copied / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words: list[object] = (
        ["import", copied, out]
        if command == "import"
        else ["generate", copied, "--tokens", "1,2", "--max-new-tokens", "2"]
    )
    return run_bounded(words, MEMORY_BYTES)
