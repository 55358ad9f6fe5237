"""What lies in a folder of steps: every one of them with its size, its age, and what it is good for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.checkpoint.bases import read_bases
from pentatron.checkpoint.find import followed, is_step, pointed_at, steps_at
from pentatron.checkpoint.load import ROUTERS, WEIGHTS
from pentatron.checkpoint.manifest import DamagedCheckpoint, Manifest, read_manifest
from pentatron.checkpoint.store import CheckpointStore
from pentatron.config.settings import Settings
from pentatron.errors import UserError

# What a step has beside weights without being able to go on from it.
_NO_OPTIMIZER = (WEIGHTS, ROUTERS, "rng/")
_SIZES = (
    ("tp", "tensor_model_parallel_size"),
    ("pp", "pipeline_model_parallel_size"),
    ("vp", "virtual_pipeline_model_parallel_size"),
    ("cp", "context_parallel_size"),
    ("ep", "expert_model_parallel_size"),
    ("dp", "data_parallel_size"),
)


@dataclass(frozen=True)
class StepFacts:
    """`manifest` is None where `problem` says why; sums are not compared here."""

    folder: Path
    saved_at: float
    bytes: int
    manifest: Manifest | None
    problem: str = ""
    is_base: bool = False
    is_latest: bool = False
    is_set_aside: bool = False

    @property
    def state(self) -> str:
        """`whole`, `damaged` or `set aside`, and what else is to be known of it."""
        first = "set aside" if self.is_set_aside else "damaged" if self.manifest is None else "whole"
        return ", ".join([first, *["base"] * self.is_base, *["latest"] * self.is_latest])


def survey(path: Path) -> list[StepFacts]:
    """The steps that a path means, oldest first, with those that were set aside; a step is one of its folder."""
    path = followed(path)
    if is_step(path):
        folder = path.resolve()
        return [_facts(folder, pointed_at(folder.parent), read_bases(folder.parent) or frozenset())]
    steps = steps_at(path)
    if steps is None:
        return []
    store, pointed, bases = CheckpointStore(steps, keep=None), pointed_at(steps), read_bases(steps)
    return [_facts(folder, pointed, bases or frozenset()) for folder in (*store.steps(), *store.damaged())]


def _facts(folder: Path, pointed: str, bases: frozenset[str]) -> StepFacts:
    manifest, problem = None, ""
    try:
        manifest = read_manifest(folder)
    except (DamagedCheckpoint, UserError) as error:
        problem = str(error)
    files = [path.lstat() for path in folder.iterdir() if path.is_file()]
    return StepFacts(
        folder,
        max((file.st_mtime for file in files), default=folder.stat().st_mtime),
        sum(file.st_size for file in files),
        manifest,
        problem,
        is_base=folder.name in bases,
        is_latest=folder.name == pointed,
        is_set_aside=".damaged" in folder.name,
    )


def is_resumable(manifest: Manifest) -> bool:
    """Whether training can go on from it, rather than begin with its weights. Plain gradient descent remembers nothing."""
    if any(not name.startswith(_NO_OPTIMIZER) for name in manifest.tensors):
        return True
    plain_descent = Settings.of_sections(manifest.config).optimizer == "sgd"
    return plain_descent and not manifest.run_state.get("weights_only", False)


def layout_words(config: Mapping[str, Any]) -> str:
    """`tp2 pp2 dp2 zero1`, `one process`."""
    saved = Settings.of_sections(config)
    sizes = [f"{short}{getattr(saved, name)}" for short, name in _SIZES if (getattr(saved, name) or 1) != 1]
    if sizes and saved.zero_stage:
        sizes.append(f"zero{saved.zero_stage}")
    return " ".join(sizes) or "one process"


def count_elements(manifest: Manifest, begin: str) -> int:
    """Of all tensors whose name begins so."""
    return sum(math.prod(r.shape) for name, r in manifest.tensors.items() if name.startswith(begin))
