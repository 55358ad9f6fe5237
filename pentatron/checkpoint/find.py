"""The steps that a path means: a step itself, a folder of steps, or a run that has one."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.checkpoint.format import FILE_NAME, DamagedCheckpoint, Manifest, read_manifest, verify_files
from pentatron.checkpoint.load import ROUTERS, WEIGHTS
from pentatron.checkpoint.retention import read_bases
from pentatron.checkpoint.store import TRACKER, CheckpointStore, Found, require_one_step
from pentatron.checkpoint.untrusted import implausible
from pentatron.checkpoint.verify import Check
from pentatron.errors import UserError
from pentatron.settings.declaration import Setting
from pentatron.settings.model import MoEConfig, TransformerConfig
from pentatron.settings.run import table
from pentatron.settings.settings import Settings

LATEST = "latest"
# What Megatron-LM leaves in one checkpoint, by the value of --ckpt-format that stands for it.
_OF_MEGATRON = {"torch_dist": (".metadata", "*.distcp"), "torch": ("mp_rank_*",)}


def checkpoints_of(run: Path) -> Path:
    """Where a run keeps its checkpoints unless it is told otherwise."""
    return run / "checkpoints"


def followed(path: Path) -> Path:
    """The step that a pointer names, if the path is one; else the path."""
    if path.name != LATEST or not path.is_file():
        return path
    named = pointed_at(path.parent)
    # A name from a file is not to be trusted with a path.
    step = path.parent / named
    return step if Path(named).name == named and is_step(step) else path


def pointed_at(steps: Path) -> str:
    """What `latest` says; nothing relies on it unless the user names it."""
    try:
        return (steps / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def is_step(path: Path) -> bool:
    return (path / FILE_NAME).is_file()


def steps_at(path: Path) -> Path | None:
    """The folder of steps that a path means: itself, or the checkpoints of a run; None: neither has any, not even damaged ones."""
    for folder in (path, checkpoints_of(path)):
        store = CheckpointStore(folder, keep=None)
        if store.steps() or store.damaged():
            return folder
    return None


def read_step(folder: Path, verify: bool, check: Check = verify_files) -> Found:
    """The step of this folder; with `verify`, its sums are compared, by `check`."""
    # What belongs to it lies beside it, also where it is named by a link or as the current folder.
    folder = folder.resolve()
    try:
        manifest = read_manifest(folder)
        require_one_step(folder, manifest)
        if verify:
            check(folder, manifest)
    except DamagedCheckpoint as damage:
        raise UserError(f"{damage}; name another step") from None
    return Found(folder, manifest)


def megatron_step(path: Path) -> tuple[Path, str] | None:
    """The checkpoint of Megatron-LM that a path means, and its format; nothing of it is read but the tracker."""
    for folder in (path, _newest_iteration(path)):
        if folder is None or not folder.is_dir():
            continue
        for name, patterns in _OF_MEGATRON.items():
            if any(next(folder.glob(pattern), None) for pattern in patterns):
                return folder, name
    return None


def _newest_iteration(path: Path) -> Path | None:
    try:
        said = (path / TRACKER).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        said = ""
    if said.isdecimal():
        return path / f"iter_{int(said):07d}"
    if said == "release":
        return path / said
    return max(path.glob("iter_" + "[0-9]" * 7), default=None)


def refuse_other_formats(path: Path) -> None:
    """Names what a folder holds that somebody may take for a checkpoint of ours, and what permits to read it."""
    found = megatron_step(path)
    if found is not None:
        kind = (
            "in its format torch_dist"
            if found[1] == "torch_dist"
            else "in its older format, one file for each rank"
        )
        raise UserError(
            f"{found[0]} is a checkpoint of Megatron-LM {kind}; such files hold pickle, so reading them must be permitted: add "
            f"--ckpt-format {found[1]} to pentatron train or export (they are read by a process apart that runs nothing of them)"
        )
    # Steps of ours leave that file too, beside a pointer of their own.
    if (path / TRACKER).is_file() and not (path / "latest").exists():
        raise UserError(
            f"{path / TRACKER} is of Megatron-LM, but {_newest_iteration(path)} holds no checkpoint; name the folder of one"
        )


def find_step(path: Path, check: Check | None = None) -> tuple[Found, list[str]]:
    """The step, or the newest one that is whole, and a sentence about each newer one that is not.

    Sums are not compared here, unless `check` does.
    """
    path = followed(path)
    if is_step(path):
        return read_step(path, check is not None, check or verify_files), []
    if not path.is_dir():
        raise UserError(f"the folder {path} does not exist; name a run, its checkpoints, or one step of them")
    store = CheckpointStore(steps_at(path) or path, keep=None)
    found, complaints = store.newest_valid(check is not None, set_aside=False, check=check or verify_files)
    if found is None:
        refuse_other_formats(path)
        nothing = "it is a Hugging Face folder" if (path / "config.json").exists() else "it has no step"
        reason = complaints[0] if complaints else nothing
        raise UserError(
            f"{store.folder} holds no usable checkpoint ({reason}); name a run, its checkpoints, or one step of them"
        )
    return found, complaints


# What lies in a folder of steps: every one of them with its size, its age, and what it is good for.


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


# The settings that a checkpoint was made with, and the model they describe.


# Sections whose values are computed with; those of the others are compared and shown.
_USED = ("model", "moe", "optim", "train")
_DERIVED = (
    *("ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups"),
    *("max_position_embeddings", "vocab_size", "padded_vocab_size"),
)
# No setting is a larger number; NaN is within no limits.
_LARGEST = 2**63 - 1


def saved_settings(found: Found) -> dict[str, Any]:
    """By name, whatever section they were in. A setting of the model that is not known here might make it another one."""
    config = found.manifest.config
    unknown = [
        name for section in ("model", "moe") for name in config.get(section, {}) if name not in table()
    ]
    if "model" not in config or unknown:
        raise UserError(
            f"{found.folder} describes a model this version does not know ({', '.join(unknown) or 'it has no settings'}); use the "
            f"version that saved it"
        )
    flat = {name: value for section in config.values() for name, value in section.items()}
    # What is older or younger than this version is nobody's to judge here.
    saved = {name: _typed(found, name, value) if name in table() else value for name, value in flat.items()}
    if problem := implausible(saved, {n: r.shape for n, r in found.manifest.tensors.items()}):
        raise UserError(
            f"{found.folder} cannot be the model that it describes ({problem}); name another step"
        )
    return saved


def _typed(found: Found, name: str, value: Any) -> Any:
    """A value of the kind that the setting has, however it came into the file."""
    item = table()[name]
    absent = value is None and (item.optional or item.section not in _USED)
    items = value if isinstance(value, list) else [value]
    right = absent or (isinstance(value, list) == item.is_list and all(_is_one(item, one) for one in items))
    if not right:
        raise UserError(
            f"{found.folder} has {name} {value!r:.60}, which is no value of that setting; use the version that saved it, or name "
            f"another step"
        )
    return tuple(value) if isinstance(value, list) else value


def _is_one(item: Setting, value: Any) -> bool:
    """Whether it is of the setting's type, and a number or a choice that there is."""
    kind = (int, float) if item.base_type is float else item.base_type
    if not isinstance(value, kind) or isinstance(value, bool) != (item.base_type is bool):
        return False
    if isinstance(value, int | float) and not -_LARGEST <= value <= _LARGEST:
        return False
    # A choice elsewhere may be older or younger than this version, and makes no other model.
    return not item.choices or item.section not in _USED or value in item.choices


def architecture_of(found: Found) -> tuple[TransformerConfig, MoEConfig]:
    """The model a step holds. What it does not say is older than the setting, and has its default."""
    saved = saved_settings(found)
    of_model, of_experts = (
        {field.name: saved[field.name] for field in dataclasses.fields(kind) if field.name in saved}
        for kind in (TransformerConfig, MoEConfig)
    )
    model, moe = TransformerConfig(**of_model), MoEConfig(**of_experts)
    # A run derives them before it saves anything.
    missing = [name for name in _DERIVED if getattr(model, name) is None]
    if moe.num_experts is not None and moe.moe_ffn_hidden_size is None:
        missing.append("moe_ffn_hidden_size")
    if missing:
        raise UserError(
            f"{found.folder} does not say {missing[0]}, without which its model cannot be built; name another step"
        )
    return model, moe
