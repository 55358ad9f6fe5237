"""`pentatron import` and `pentatron export`: Hugging Face folders to checkpoints of weights, and back."""

import json
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pentatron.checkpoint import links
from pentatron.checkpoint.find import saved_architecture
from pentatron.checkpoint.format import DamagedCheckpoint, Manifest, verify_files
from pentatron.checkpoint.links import Link
from pentatron.checkpoint.load import WEIGHTS, StepReader
from pentatron.checkpoint.store import Checkpoint, CheckpointStore
from pentatron.checkpoint.streaming import Progress, Summary, save_streamed, split_into_files
from pentatron.checkpoint.tensor_file import DTYPES, WEIGHT_DTYPES, ReadRectangle, TensorSpec, write_blocks
from pentatron.errors import UserError, explained
from pentatron.files import write_new_synced
from pentatron.hf.folder import CONFIG, INDEX, SINGLE, HuggingFaceFolder, open_folder
from pentatron.hf.model_config import config_from_settings, model_type_of, settings_from_folder
from pentatron.hf.small_files import FOLDER_NAME, copy_files, new_folder, small_files, unusable_file_warnings
from pentatron.hf.tensor_names import require_matching_tensors, tensor_links
from pentatron.models.causal_lm import logical_shapes
from pentatron.monitor.display import Display
from pentatron.settings.entry_points import EntryPoint
from pentatron.settings.resolve import gather, resolve
from pentatron.settings.run_config import RunConfig
from pentatron.settings.settings import ProcessFacts, Settings
from pentatron.text import parse_json

# Placeholders for the required settings of a run, which do not affect the weights.
_PLACEHOLDERS = {"dataset_size": 1, "train_iters": 1, "global_batch_size": 1, "micro_batch_size": 1}
_IMPORTED = EntryPoint(name="pentatron import", summary="", defaults=_PLACEHOLDERS)
Validator = Callable[[Path], None]
# Marks step 0 as imported weights, without optimizer state and sample order.
IMPORTED_RUN_STATE: Mapping[str, Any] = {"step": 0, "weights_only": True}
_METADATA = {"format": "pt"}
# transformers 5 writes the first key, earlier versions read the second.
_DTYPE_KEYS = ("dtype", "torch_dtype")


@dataclass(frozen=True)
class ImportOptions:
    """Options of an import. `tokenizer` are files to copy instead of the folder's."""

    dtype: torch.dtype | None = None
    allow_narrowing: bool = False
    tokenizer: Sequence[Path] = ()
    file_bytes: int = 4 * 10**9


def import_folder(
    source: Path, out: Path, options: ImportOptions, display: Display, validate: Validator | None = None
) -> Summary:
    """Imports a Hugging Face folder as a checkpoint. The source is checked before anything is written.

    `validate` is called with the complete folder before it is renamed to `out`, and may raise.
    """
    files = small_files(source, options.tokenizer)
    for doubt in unusable_file_warnings(files):
        display.say(f"note: {doubt}")
    with open_folder(source) as folder:
        config = config_for(settings_from_folder(folder))
        outlines, values = tensors_of(folder, config, options)
        total = sum(outline.bytes for outline in outlines.values())
        progress = Progress(display, "importing", total)
        read = progress.counting(lambda name, *at: values(name.removeprefix(WEIGHTS), *at))
        weights = {f"{WEIGHTS}{name}": outline for name, outline in outlines.items()}
        with new_folder(out, total) as new:
            store, state = CheckpointStore(new, keep=None), IMPORTED_RUN_STATE
            save_streamed(store, 0, weights, read, state, config.nested(), options.file_bytes)
            copy_files(files, new / FOLDER_NAME)
            seconds = progress.seconds
            if validate is not None:
                validate(new)
        return _summary(outlines, seconds)


def _summary(outlines: Mapping[str, TensorSpec], seconds: float) -> Summary:
    parameters = sum(math.prod(outline.shape) for outline in outlines.values())
    return Summary(parameters, len(outlines), sum(outline.bytes for outline in outlines.values()), seconds)


def tensors_of(
    folder: HuggingFaceFolder, config: RunConfig, options: ImportOptions
) -> tuple[dict[str, TensorSpec], ReadRectangle]:
    """Returns the checkpoint tensors of the model in a folder, and a function that reads them.

    Their dtype defaults to that of the source.
    """
    model_type = model_type_of(folder.config)
    linked = tensor_links(model_type, config.model, config.moe, folder.tensors)
    require_matching_tensors(linked, folder, model_type)
    shapes = logical_shapes(config.model, config.moe)
    outlines: dict[str, TensorSpec] = {}
    for ours, group in links.by_ours(linked).items():
        stored = {link.theirs: WEIGHT_DTYPES[folder.tensors[link.theirs].dtype] for link in group}
        if options.dtype is not None and not options.allow_narrowing:
            for theirs, dtype in stored.items():
                links.require_exact_dtype(theirs, dtype, options.dtype)
        outlines[ours] = TensorSpec(options.dtype or links.common_dtype(stored.values()), shapes[ours])
    return outlines, links.reads_ours(linked, folder.read, outlines)


def config_for(settings: Mapping[str, Any]) -> RunConfig:
    """Returns a configuration with this architecture and default values for everything else."""
    draft = gather([], _IMPORTED)
    draft.assign("config.json", **settings)
    draft.assign("config.json", seq_length=draft.max_position_embeddings)
    return resolve(draft, ProcessFacts(world_size=1)).config


@dataclass(frozen=True)
class ExportOptions(ImportOptions):
    """Options of an export. `tokenizer` are files to copy instead of the checkpoint's."""

    file_bytes: int = 5 * 10**9
    check: bool = True


def export_step(
    found: Checkpoint, out: Path, options: ExportOptions, display: Display, validate: Validator | None = None
) -> Summary:
    """Exports a step as a Hugging Face folder.

    `validate` is called with the complete folder before it is renamed to `out`, and may raise."""
    model, moe = saved_architecture(found)
    model_files = found.folder.parent / FOLDER_NAME
    config = config_from_settings(model, moe, _original_config(model_files))
    linked = tensor_links(config["model_type"], model, moe)
    _require_weights(found, logical_shapes(model, moe))
    outlines = _exported(found.manifest, linked, options)
    bytes_of: Counter[torch.dtype] = Counter()
    for outline in outlines.values():
        bytes_of[outline.dtype] += outline.bytes
    # config.json names a single dtype: that of most bytes.
    main_dtype = bytes_of.most_common(1)[0][0]
    config |= dict.fromkeys(_DTYPE_KEYS, str(main_dtype).removeprefix("torch."))
    total = sum(outline.bytes for outline in outlines.values())
    progress = Progress(display, "exporting", total)
    with new_folder(out, total) as new:
        with StepReader(found.folder, found.manifest) as step, _verifying_checksums(found, options.check):
            read = links.reads_theirs(linked, lambda name, *at: step.read(f"{WEIGHTS}{name}", *at), outlines)
            _write_shards(new, outlines, progress.counting(read), options.file_bytes)
        write_new_synced(new / CONFIG, _json(config))
        copy_files((path for path in small_files(model_files, options.tokenizer) if path.name != CONFIG), new)
        seconds = progress.seconds
        if validate is not None:
            validate(new)
    return _summary(outlines, seconds)


def trained_dtype(manifest: Manifest) -> torch.dtype | None:
    """Returns the half-precision dtype that the run computed in, or None."""
    saved = Settings.defaults(**manifest.config.get("precision", {}))
    return torch.bfloat16 if saved.bf16 else torch.float16 if saved.fp16 else None


def stored_dtypes(manifest: Manifest) -> set[torch.dtype]:
    """Returns the dtypes of the weights in a step."""
    return {DTYPES[record.dtype] for name, record in manifest.tensors.items() if name.startswith(WEIGHTS)}


def _original_config(folder: Path) -> dict[str, Any] | None:
    """Returns the config.json of the model from which the run started."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    with explained(ValueError, f"{path} is not JSON", "remove it, or put the right one there"):
        config = parse_json(path.read_text(encoding="utf-8"))
    return config if isinstance(config, dict) else None


def _require_weights(found: Checkpoint, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises UserError unless the step contains exactly the weights of the model that it describes."""
    tensors = found.manifest.tensors.items()
    stored = {name.removeprefix(WEIGHTS): kept.shape for name, kept in tensors if name.startswith(WEIGHTS)}
    problems = [f"{name} is missing" for name in shapes if name not in stored]
    problems += [f"{name} has no place in the model" for name in stored if name not in shapes]
    differing = [name for name in shapes if name in stored and stored[name] != tuple(shapes[name])]
    problems += [f"{name} is {list(stored[name])}, not {list(shapes[name])}" for name in differing]
    if problems:
        raise UserError(
            f"the weights in {found.folder} are not those of the model it describes ({len(problems)} of them): {problems[0]}"
        )


def _exported(manifest: Manifest, linked: Sequence[Link], options: ExportOptions) -> dict[str, TensorSpec]:
    """Returns dtype and shape of the exported tensors.

    The fp32 master weights of a mixed-precision run are exported in the dtype it computed in.
    """
    trained = trained_dtype(manifest)
    wanted = options.dtype or trained
    stored: dict[str, set[torch.dtype]] = defaultdict(set)
    for link in linked:
        stored[link.theirs].add(DTYPES[manifest.tensors[f"{WEIGHTS}{link.ours}"].dtype])
    if wanted is not None and wanted != trained and not options.allow_narrowing:
        for theirs, dtypes in stored.items():
            for dtype in dtypes:
                links.require_exact_dtype(theirs, dtype, wanted)
    chosen = {theirs: wanted or links.common_dtype(dtypes) for theirs, dtypes in stored.items()}
    return {theirs: TensorSpec(chosen[theirs], shape) for theirs, shape in links.their_shapes(linked).items()}


class DamagedStep(UserError):
    """Raised if the files of a step do not match its manifest."""


@contextmanager
def _verifying_checksums(found: Checkpoint, enabled: bool) -> Iterator[None]:
    """Verifies the checksums of a step in a thread; raises at the end of the block if one is wrong."""
    damage: list[Exception] = []

    def verify() -> None:
        try:
            verify_files(found.folder, found.manifest)
        except (DamagedCheckpoint, OSError) as error:
            damage.append(error)

    if not enabled:
        yield
        return
    # A daemon thread does not delay the exit of a process that is stopped.
    thread = threading.Thread(target=verify, daemon=True)
    thread.start()
    yield
    thread.join()
    if damage:
        kind = DamagedStep if isinstance(damage[0], DamagedCheckpoint) else UserError
        raise kind(f"{damage[0]}; name another step, or --no-check to export it all the same") from damage[0]


def _write_shards(folder: Path, outlines: Mapping[str, TensorSpec], read: ReadRectangle, limit: int) -> None:
    """Writes one safetensors file, or several with an index, with the names that transformers uses."""
    groups = list(split_into_files(outlines, limit))
    files: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_blocks(folder / name, group, read, _METADATA, hashed=False)
        files |= dict.fromkeys(group, name)
    if len(groups) > 1:
        total = _summary(outlines, 0.0)
        metadata = {"total_parameters": total.parameters, "total_size": total.bytes}
        write_new_synced(folder / INDEX, _json({"metadata": metadata, "weight_map": files}))


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
