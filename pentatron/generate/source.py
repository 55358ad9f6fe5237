"""Finds and opens models to load: a run, its checkpoints, one step, or a Hugging Face folder."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from pentatron.checkpoint.find import (
    default_checkpoint_folder,
    find_megatron_checkpoint,
    find_steps_folder,
    is_step,
    read_step,
    refuse_other_formats,
    saved_architecture,
    saved_settings,
)
from pentatron.checkpoint.format import verify_files
from pentatron.checkpoint.load import WEIGHTS, load_fragments
from pentatron.checkpoint.store import Checkpoint, CheckpointStore
from pentatron.checkpoint.tensor_file import DTYPES
from pentatron.checkpoint.verify import Check
from pentatron.data.open_data import configured_tokenizer
from pentatron.data.tokenizer import FileTokenizer, Tokenizer
from pentatron.errors import UserError
from pentatron.hf.folder import CONFIG, open_folder
from pentatron.hf.hub import is_hub_id, resolve_folder
from pentatron.hf.model_config import settings_from_folder
from pentatron.hf.small_files import FOLDER_NAME
from pentatron.hf.tensor_names import load_weights
from pentatron.interchange.reading import read_megatron
from pentatron.models.causal_lm import CausalLM
from pentatron.models.router_load import loads_of, router_fragments
from pentatron.parallel.serialization import sendable
from pentatron.parallel.sharding import ShardedParameter, fragments_of, sharded_parameters
from pentatron.settings.model import MoEConfig, TransformerConfig
from pentatron.settings.settings import Settings
from pentatron.settings.training import DataConfig
from pentatron.text import parse_json


@sendable
@dataclass(frozen=True)
class ModelLocation:
    """A folder with checkpoint steps, one of them possibly named, or a Hugging Face or Megatron-LM model."""

    folder: Path
    is_huggingface: bool
    step: Path | None = None
    # The folder of a step of Megatron-LM.
    megatron: Path | None = None

    @property
    def is_foreign(self) -> bool:
        return self.is_huggingface or self.megatron is not None

    @property
    def small_files(self) -> Path:
        """Folder of the Hugging Face configuration and tokenizer files, if there are any."""
        return self.folder if self.is_huggingface else self.folder / FOLDER_NAME

    def architecture(self, is_own: bool = False) -> Mapping[str, Any]:
        """Returns the settings of the model by name.

        `is_own`: the steps belong to the run itself, which may start from scratch.
        """
        if self.is_huggingface:
            with open_folder(self.folder) as folder:
                return settings_from_folder(folder)
        step, _ = self.newest_step(verify=False, set_aside=False, is_own=is_own)
        assert step is not None, "a source has steps"
        return saved_settings(step)

    def newest_step(
        self, verify: bool, set_aside: bool, check: Check = verify_files, is_own: bool = False
    ) -> tuple[Checkpoint | None, list[str]]:
        """Returns the newest valid step, or the named one, and a sentence about each invalid step.

        `check` compares checksums. None is returned only if there never was a step.
        """
        if self.megatron is not None:
            return read_megatron(self.megatron)
        if self.step is not None:
            return read_step(self.step, verify, check), []
        store = CheckpointStore(self.folder, keep=None)
        step, complaints = store.newest_valid(verify, set_aside, check)
        if step is None and (complaints or store.damaged()):
            reason = complaints[0] if complaints else f"{store.damaged()[0]} and others were set aside"
            # A run may start over without its own damaged steps, but not without the model that it must load.
            may_start_over, other = set_aside or is_own, "name another folder, or one step of a run"
            instead = "start over with --fresh" if may_start_over else other
            raise UserError(
                f"no checkpoint in {self.folder} is usable ({reason}); restore an intact step, or {instead}"
            )
        return step, complaints


def find_source(path: Path, megatron: bool = False) -> ModelLocation | None:
    """Returns the source in a folder: a step, a folder of steps, a run, or a Hugging Face model; None if
    there is none.

    `megatron`: also accepts checkpoints of Megatron-LM.
    """
    if is_step(path):
        return ModelLocation(path.resolve().parent, is_huggingface=False, step=path)
    if (steps := find_steps_folder(path)) is not None:
        return ModelLocation(steps, is_huggingface=False)
    if (path / CONFIG).is_file():
        return ModelLocation(path, is_huggingface=True)
    step = find_megatron_checkpoint(path) if megatron else None
    return None if step is None else ModelLocation(path, is_huggingface=False, megatron=step[0])


def named_source(name: str, megatron: bool = False) -> ModelLocation:
    """Returns the source that `--load` names; raises if there is none."""
    if (source := find_source(Path(name), megatron)) is not None:
        return source
    problem = "does not exist"
    if Path(name).exists():
        refuse_other_formats(Path(name))
        problem = "holds no checkpoint and no Hugging Face model"
    raise UserError(f"--load {name} {problem}; check the path, or leave it out to start from scratch")


T = TypeVar("T", TransformerConfig, MoEConfig, DataConfig)
_FOLDER_SETTINGS = (("checkpoint", "save"), ("run", "run_dir"))


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded in any layout. `fill` loads the weights of stages.

    `follows_file`: prompts begin with the tokens that the tokenizer's file adds (such as `<s>`), as in the
    Hugging Face model.
    """

    folder: Path
    model: TransformerConfig
    moe: MoEConfig
    fill: Callable[[Iterable[CausalLM], torch.dtype, torch.device], None]
    tokenizer: Callable[[], Tokenizer | None]
    stop: frozenset[int]
    follows_file: bool


def find_weights(name: str, verify: bool) -> tuple[Path, list[str]]:
    """Returns the step or Hugging Face folder of `name`, and a sentence about each newer damaged step."""
    path = resolve_folder(name) if is_hub_id(name) else Path(name)
    if (source := find_source(path)) is not None:
        if source.is_huggingface:
            return path, []
        step, complaints = source.newest_step(verify, set_aside=False)
        assert step is not None, "a source has steps"
        return step.folder, complaints
    if not path.is_dir():
        what = f"{path} is a file" if path.is_file() else f"the folder {path} does not exist"
        raise UserError(f"{what}; name a run, its checkpoints or a Hugging Face folder")
    refuse_other_formats(path)
    raise UserError(
        f"{path} holds no checkpoint and no Hugging Face model; train first, or name the folder given to --save"
    )


def open_source(folder: Path, trusted: tuple[str, ...] = ()) -> ModelSource:
    """Opens the result of `find_weights`. `trusted` is the `--spec` whose code may run."""
    source = _open_step(folder, trusted) if is_step(folder) else _open_hugging_face(folder)
    if trusted and not source.model.spec:
        raise UserError(f"{folder} uses no custom layer spec; leave --spec {' '.join(trusted)} out")
    return source


def _open_hugging_face(folder: Path) -> ModelSource:
    with open_folder(folder) as opened:
        settings = settings_from_folder(opened)
    model, moe = _section(TransformerConfig, settings), _section(MoEConfig, settings)
    model = replace(model, padded_vocab_size=model.vocab_size)

    def fill(stages: Iterable[CausalLM], dtype: torch.dtype, device: torch.device) -> None:
        wanted = []
        for stage in stages:
            for held in sharded_parameters(stage):
                held.parameter.data = torch.zeros(held.parameter.shape, dtype=dtype, device=device)
                wanted += [f for _, f in fragments_of(held, held.parameter.data.view(-1))]
            stage.to(device)
        with open_folder(folder) as opened:
            load_weights(opened, model, moe, wanted, allow_narrowing=True)

    def tokenizer() -> Tokenizer | None:
        return FileTokenizer(folder) if (folder / "tokenizer.json").exists() else None

    return ModelSource(folder, model, moe, fill, tokenizer, _stop_tokens(folder), follows_file=True)


def _section(kind: type[T], settings: Mapping[str, Any]) -> T:
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in settings.items() if name in names})


def _open_step(folder: Path, trusted: tuple[str, ...]) -> ModelSource:
    step = read_step(folder, verify=False)
    manifest, config = step.manifest, step.manifest.config
    model, moe = saved_architecture(step)
    if model.spec not in ((), trusted):
        # Loading a checkpoint must not run code that the checkpoint names.
        raise UserError(
            f"{folder} uses a custom layer spec, which is code; if you trust it, add --spec {' '.join(model.spec)}"
        )
    origin = folder.parent / FOLDER_NAME

    def fill(stages: Iterable[CausalLM], dtype: torch.dtype, device: torch.device) -> None:
        for stage in stages:
            for held in sharded_parameters(stage):
                held.parameter.data = _load_parameter(step, held).to(device, dtype)
            # Imported steps have weights only; their routers start with the initial state.
            kept = (f for f in router_fragments(loads_of(stage)) if f.tensor in manifest.tensors)
            load_fragments(folder, manifest, kept)
            stage.to(device)

    tokenizer = partial(_tokenizer_of_step, folder, config)
    follows_file = (origin / "tokenizer.json").exists()
    return ModelSource(folder, model, moe, fill, tokenizer, _stop_tokens(origin), follows_file)


def _load_parameter(step: Checkpoint, held: ShardedParameter) -> Tensor:
    """Loads one parameter in its stored dtype, in which at most one is in memory at a time."""
    name, tensors = f"{WEIGHTS}{held.tensor}", step.manifest.tensors
    stored = DTYPES[tensors[name].dtype] if name in tensors else torch.float32
    # Zeros, because checkpoints do not contain padding.
    values = torch.zeros(held.parameter.shape, dtype=stored)
    wanted = [replace(f, tensor=name) for _, f in fragments_of(held, values.view(-1))]
    load_fragments(step.folder, step.manifest, wanted)
    return values


def tokenizer_path(folder: Path, config: Mapping[str, Any]) -> Path | None:
    """Returns the tokenizer file of a step; None if it is missing or no file was needed."""
    configured = Settings.of_sections(config).tokenizer_model
    paths = [*_kept_tokenizers(folder, config), *([Path(configured)] if configured else [])]
    return next(filter(Path.exists, paths), None)


def _tokenizer_of_step(folder: Path, config: Mapping[str, Any]) -> Tokenizer | None:
    kept = next(filter(Path.exists, _kept_tokenizers(folder, config)), None)
    if kept is not None:
        return FileTokenizer(kept)
    # JSON has lists where settings have tuples.
    data = {n: tuple(v) if isinstance(v, list) else v for n, v in config.get("data", {}).items()}
    return configured_tokenizer(_section(DataConfig, data), Settings.of_sections(config).vocab_size)


def _kept_tokenizers(folder: Path, config: Mapping[str, Any]) -> list[Path]:
    """Paths where a run stores a tokenizer that it imported or trained."""
    checkpoints = folder.parent
    candidates = [checkpoints / FOLDER_NAME / "tokenizer.json"]
    if checkpoints == default_checkpoint_folder(checkpoints.parent):
        candidates.append(checkpoints.parent / "data" / "tokenizer.json")
    # Checkpoints outside the run folder, if the run's settings still point here; folders may have been moved
    # or imported.
    saved_to, run = (config.get(section, {}).get(name) for section, name in _FOLDER_SETTINGS)
    if saved_to and run and Path(saved_to).resolve() == checkpoints.resolve():
        candidates.append(Path(run) / "data" / "tokenizer.json")
    return candidates


def _stop_tokens(folder: Path) -> frozenset[int]:
    """End-of-text tokens of generation_config.json or config.json."""
    for path in filter(Path.exists, (folder / "generation_config.json", folder / "config.json")):
        try:
            end = parse_json(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise UserError(f"{path} is not a JSON object ({error}); repair or remove it") from None
        tokens = end if isinstance(end, list) else [end]
        if end is not None and all(type(token) is int for token in tokens):
            return frozenset(tokens)
    return frozenset()
