"""Resolves a path to checkpoint steps: a step, a folder of steps, or a run.

Also lists steps and reads their saved settings.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.checkpoint import format
from pentatron.checkpoint.format import DamagedCheckpoint, Manifest, read_manifest, verify_files
from pentatron.checkpoint.load import ROUTERS, WEIGHTS
from pentatron.checkpoint.manifest_checks import size_problem
from pentatron.checkpoint.retention import read_base_steps
from pentatron.checkpoint.store import TRACKER, Checkpoint, CheckpointStore, require_one_step
from pentatron.checkpoint.verify import Check
from pentatron.errors import UserError
from pentatron.settings.declaration import Setting
from pentatron.settings.model import MoEConfig, TransformerConfig
from pentatron.settings.run_config import all_settings
from pentatron.settings.settings import Settings

LATEST = "latest"
# File patterns of Megatron-LM's checkpoints, by the value of --ckpt-format.
_MEGATRON_FILES = {"torch_dist": (".metadata", "*.distcp"), "torch": ("mp_rank_*",)}


def default_checkpoint_folder(run: Path) -> Path:
    """Default folder of a run's checkpoints."""
    return run / "checkpoints"


def resolve_latest(path: Path) -> Path:
    """Resolves a `latest` file to the step it names; returns other paths unchanged."""
    if path.name != LATEST or not path.is_file():
        return path
    step_name = _read_line(path)
    # Untrusted: a name from a file must not contain a path.
    step = path.parent / step_name
    return step if Path(step_name).name == step_name and is_step(step) else path


def _read_line(path: Path) -> str:
    """Content of `latest` or a tracker file, or an empty string."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def is_step(path: Path) -> bool:
    """Whether the path is a step: it has a manifest."""
    return (path / format.MANIFEST_FILE).is_file()


def find_steps_folder(path: Path) -> Path | None:
    """Returns the folder of steps for a path: the path or its `checkpoints`.

    None if neither has steps, not even damaged ones.
    """
    stores = (CheckpointStore(folder, keep=None) for folder in (path, default_checkpoint_folder(path)))
    return next((store.folder for store in stores if store.steps() or store.damaged()), None)


def read_step(folder: Path, verify: bool, check: Check = verify_files) -> Checkpoint:
    """Reads the step in this folder. `verify`: compare digests with `check`."""
    # Resolved, as related files are in the parent folder, which a symbolic link or `.` would hide.
    folder = folder.resolve()
    try:
        manifest = read_manifest(folder)
        require_one_step(folder, manifest)
        if verify:
            check(folder, manifest)
    except DamagedCheckpoint as damage:
        raise UserError(f"{damage}; name another step") from None
    return Checkpoint(folder, manifest)


def find_megatron_checkpoint(path: Path) -> tuple[Path, str] | None:
    """Returns the Megatron-LM checkpoint for a path and its format, or None. Reads only the tracker file."""
    for folder in filter(None, (path, _newest_iteration(path))):
        for name, patterns in _MEGATRON_FILES.items():
            if any(next(folder.glob(pattern), None) for pattern in patterns):
                return folder, name
    return None


def _newest_iteration(path: Path) -> Path | None:
    """Returns the folder that Megatron-LM's tracker names, else its newest iteration, or None."""
    iteration = _read_line(path / TRACKER)
    if iteration.isdecimal():
        return path / f"iter_{int(iteration):07d}"
    if iteration == "release":
        return path / iteration
    return max(path.glob("iter_" + "[0-9]" * 7), default=None)


def refuse_other_formats(path: Path) -> None:
    """Raises UserError if the folder contains a Megatron-LM checkpoint, with the option to read it."""
    if (step := find_megatron_checkpoint(path)) is not None:
        folder, kind = step
        described = "format torch_dist" if kind == "torch_dist" else "older format, one file for each rank"
        raise UserError(
            f"{folder} is a checkpoint of Megatron-LM in its {described}; its files contain pickle, so reading them must be permitted: add "
            f"--ckpt-format {kind} to pentatron train or export (a sandboxed process reads them and runs none of their code)"
        )
    # Our saves write the tracker file too, but always with `latest`.
    if (path / TRACKER).is_file() and not (path / LATEST).exists():
        raise UserError(
            f"{path / TRACKER} was written by Megatron-LM, but {_newest_iteration(path)} contains no checkpoint; give the folder of a checkpoint"
        )


def find_step(path: Path, check: Check | None = None) -> tuple[Checkpoint, list[str]]:
    """Returns the step for a path, or its newest valid one, and a message about each newer invalid one.

    Compares digests only if `check` is given.
    """
    path = resolve_latest(path)
    if is_step(path):
        return read_step(path, check is not None, check or verify_files), []
    if not path.is_dir():
        raise UserError(f"the folder {path} does not exist; name a run, its checkpoints, or one step of them")
    store = CheckpointStore(find_steps_folder(path) or path, keep=None)
    newest, messages = store.newest_valid(check is not None, set_aside=False, check=check or verify_files)
    if newest is None:
        refuse_other_formats(path)
        missing = "it is a Hugging Face folder" if (path / "config.json").exists() else "it has no step"
        reason = messages[0] if messages else missing
        raise UserError(
            f"{store.folder} holds no usable checkpoint ({reason}); name a run, its checkpoints, or one step of them"
        )
    return newest, messages


# --- listing of steps ---


# Prefixes of tensors without which a run can still start from the step, but not resume.
_NOT_OPTIMIZER = (WEIGHTS, ROUTERS, "rng/")
_PARALLEL_SIZES = (
    ("tp", "tensor_model_parallel_size"),
    ("pp", "pipeline_model_parallel_size"),
    ("vp", "virtual_pipeline_model_parallel_size"),
    ("cp", "context_parallel_size"),
    ("ep", "expert_model_parallel_size"),
    ("dp", "data_parallel_size"),
)


@dataclass(frozen=True)
class ListedStep:
    """A listed step. `manifest` is None if `problem` is set. Digests are not compared."""

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
        """`whole`, `damaged` or `set aside`, followed by `base` and `latest` if they apply."""
        condition = "set aside" if self.is_set_aside else "damaged" if self.manifest is None else "whole"
        return ", ".join([condition, *["base"] * self.is_base, *["latest"] * self.is_latest])


def list_steps(path: Path) -> list[ListedStep]:
    """Lists the steps for a path, oldest first, including those set aside."""
    path = resolve_latest(path)
    if is_step(path):
        folder = path.resolve()
        return [_facts(folder, _read_line(folder.parent / LATEST), read_base_steps(folder.parent).steps)]
    if (steps := find_steps_folder(path)) is None:
        return []
    store = CheckpointStore(steps, keep=None)
    latest, bases = _read_line(steps / LATEST), read_base_steps(steps).steps
    return [_facts(folder, latest, bases) for folder in (*store.steps(), *store.damaged())]


def _facts(folder: Path, pointed: str, bases: frozenset[str]) -> ListedStep:
    manifest, problem = None, ""
    try:
        manifest = read_manifest(folder)
    except (DamagedCheckpoint, UserError) as error:
        problem = str(error)
    files = [path.lstat() for path in folder.iterdir() if path.is_file()]
    return ListedStep(
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
    """Whether training can resume from the step, with its optimizer state. SGD without momentum has none."""
    if any(not name.startswith(_NOT_OPTIMIZER) for name in manifest.tensors):
        return True
    is_sgd = Settings.of_sections(manifest.config).optimizer == "sgd"
    return is_sgd and not manifest.run_state.get("weights_only", False)


def format_layout(config: Mapping[str, Any]) -> str:
    """Formats the parallel sizes of a step: `tp2 pp2 dp2 zero1`, or `one process`."""
    saved = Settings.of_sections(config)
    known = ((short, getattr(saved, name) or 1) for short, name in _PARALLEL_SIZES)
    sizes = [f"{short}{size}" for short, size in known if size != 1]
    if sizes and saved.zero_stage:
        sizes.append(f"zero{saved.zero_stage}")
    return " ".join(sizes) or "one process"


def count_elements(manifest: Manifest, begin: str) -> int:
    """Number of elements of all tensors whose name starts with `begin`."""
    return sum(math.prod(r.shape) for name, r in manifest.tensors.items() if name.startswith(begin))


# --- saved settings and architecture ---


# Sections whose values are used in computations; others are only compared and shown.
_USED = ("model", "moe", "optim", "train")
_DERIVED = (
    *("ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups"),
    *("max_position_embeddings", "vocab_size", "padded_vocab_size"),
)
# Limit of numbers in settings. NaN fails every comparison with it.
_LARGEST = 2**63 - 1


def saved_settings(found: Checkpoint) -> dict[str, Any]:
    """Saved settings by name, from all sections.

    An unknown setting of the model is refused: it may change the model.
    """
    config = found.manifest.config
    architecture = (*config.get("model", ()), *config.get("moe", ()))
    unknown = [name for name in architecture if name not in all_settings()]
    if "model" not in config or unknown:
        raise UserError(
            f"{found.folder} describes a model this version does not know ({', '.join(unknown) or 'it has no settings'}); use the "
            f"version that saved it"
        )
    saved = {name: value for section in config.values() for name, value in section.items()}
    # Settings unknown to this version (older or newer) are passed through unchecked.
    saved |= {name: _typed(found, name, value) for name, value in saved.items() if name in all_settings()}
    if problem := size_problem(saved, {n: r.shape for n, r in found.manifest.tensors.items()}):
        raise UserError(f"{found.folder} cannot be the model it describes ({problem}); name another step")
    return saved


def _typed(found: Checkpoint, name: str, value: Any) -> Any:
    """Returns a saved value in the type of its setting. Raises UserError if it has another type."""
    item = all_settings()[name]
    absent = value is None and (item.optional or item.section not in _USED)
    items = value if isinstance(value, list) else [value]
    valid = absent or (isinstance(value, list) == item.is_list and all(_is_valid(item, one) for one in items))
    if not valid:
        raise UserError(
            f"{found.folder} has {name} {value!r:.60}, which is not a value of that setting; use the version that saved it, or name "
            f"another step"
        )
    return tuple(value) if isinstance(value, list) else value


def _is_valid(item: Setting, value: Any) -> bool:
    """Whether a value has the setting's type and is within its limits or choices."""
    kind = (int, float) if item.base_type is float else item.base_type
    if not isinstance(value, kind) or isinstance(value, bool) != (item.base_type is bool):
        return False
    if isinstance(value, int | float) and not -_LARGEST <= value <= _LARGEST:
        return False
    # Choices of other sections may be of another version and do not change the model.
    return not item.choices or item.section not in _USED or value in item.choices


def saved_architecture(found: Checkpoint) -> tuple[TransformerConfig, MoEConfig]:
    """Model configuration of a step. Settings it lacks are newer than the step and have their defaults."""
    saved = saved_settings(found)
    model_settings, moe_settings = (
        {field.name: saved[field.name] for field in dataclasses.fields(kind) if field.name in saved}
        for kind in (TransformerConfig, MoEConfig)
    )
    model, moe = TransformerConfig(**model_settings), MoEConfig(**moe_settings)
    # A run derives these before it saves.
    missing = [name for name in _DERIVED if getattr(model, name) is None]
    if moe.num_experts is not None and moe.moe_ffn_hidden_size is None:
        missing.append("moe_ffn_hidden_size")
    if missing:
        raise UserError(
            f"{found.folder} lacks {missing[0]}, without which its model cannot be built; name another step"
        )
    return model, moe
