"""`pentatron import`: a Hugging Face folder becomes a checkpoint of ours that holds weights alone."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pentatron.checkpoint.convert import common_dtype, reads_ours, require_room
from pentatron.checkpoint.links import Link, by_ours
from pentatron.checkpoint.load import WEIGHTS
from pentatron.checkpoint.store import CheckpointStore
from pentatron.checkpoint.streaming import save_streamed
from pentatron.checkpoint.tensor_file import WEIGHT_DTYPES, Outline, Read
from pentatron.config.entry import EntryPoint
from pentatron.config.resolve import gather, resolve
from pentatron.config.run import RunConfig
from pentatron.config.settings import Facts
from pentatron.hf.architecture import model_type_of, settings_in
from pentatron.hf.folder import HuggingFaceFolder, open_folder
from pentatron.hf.name_tables import links_of
from pentatron.hf.new_folder import new_folder
from pentatron.hf.progress import Progress, Summary
from pentatron.hf.small_files import FOLDER_NAME, copy_files, doubts_of, small_files
from pentatron.hf.weights import check_covered
from pentatron.models.shapes import logical_shapes
from pentatron.monitor.display import Display
from pentatron.parallel.pieces import Shape

# The settings of a run are of no concern to weights; these stand for what a run would have to say.
_IMPORTED = EntryPoint(
    name="pentatron import",
    summary="",
    defaults={"dataset_size": 1, "train_iters": 1, "global_batch_size": 1, "micro_batch_size": 1},
)
# So that nobody takes step 0 for a run that has only begun: there is no optimizer, no order of samples.
RUN_STATE: Mapping[str, Any] = {"step": 0, "weights_only": True}


@dataclass(frozen=True)
class ImportOptions:
    """`tokenizer`: files to carry along instead of those of the folder; `file_bytes`: the size of the files written."""

    dtype: torch.dtype | None = None
    allow_narrowing: bool = False
    tokenizer: Sequence[Path] = ()
    file_bytes: int = 4 * 10**9


def import_folder(
    source: Path,
    out: Path,
    options: ImportOptions,
    display: Display,
    judge: Callable[[Path], None] | None = None,
) -> Summary:
    """Writes `out`; what is wrong with the source is found before anything is written.

    `judge` sees the finished folder before it gets its name, and may raise.
    """
    files = small_files(source, options.tokenizer)
    for doubt in doubts_of(files):
        display.say(f"note: {doubt}")
    with open_folder(source) as folder:
        config = config_for(settings_in(folder))
        outlines, values = tensors_of(folder, config, options)
        total = sum(outline.bytes for outline in outlines.values())
        progress = Progress(display, "importing", total)
        read = progress.counting(values)
        with new_folder(out, total) as made:
            save_streamed(
                CheckpointStore(made, keep=None),
                step=0,
                outlines={f"{WEIGHTS}{name}": outline for name, outline in outlines.items()},
                read=lambda name, start, size: read(name.removeprefix(WEIGHTS), start, size),
                run_state=RUN_STATE,
                config=config.nested(),
                file_bytes=options.file_bytes,
            )
            copy_files(files, made / FOLDER_NAME)
            seconds = progress.seconds
            if judge is not None:
                judge(made)
        parameters = sum(math.prod(outline.shape) for outline in outlines.values())
        return Summary(parameters, len(outlines), total, seconds)


def tensors_of(
    folder: HuggingFaceFolder, config: RunConfig, options: ImportOptions
) -> tuple[dict[str, Outline], Read]:
    """Our tensors of the model in a folder, and how they are read out of it; that all are there is checked here."""
    model_type = model_type_of(folder.config)
    links = links_of(model_type, config.model, config.moe, folder.tensors)
    check_covered(links, folder, model_type)
    outlines = _outlines(folder, links, logical_shapes(config.model, config.moe), options)
    return outlines, reads_ours(links, folder.read, outlines)


def config_for(settings: Mapping[str, Any]) -> RunConfig:
    """A whole configuration with this architecture; everything else as if nobody had said anything."""
    draft = gather([], _IMPORTED)
    draft.assign("config.json", **settings)
    draft.assign("config.json", seq_length=draft.max_position_embeddings)
    return resolve(draft, Facts(world_size=1)).config


def _outlines(
    folder: HuggingFaceFolder,
    links: Sequence[Link],
    shapes: Mapping[str, Shape],
    options: ImportOptions,
) -> dict[str, Outline]:
    """What our tensors will be: of the type of the source, unless another was asked for."""
    found: dict[str, Outline] = {}
    for ours, group in by_ours(links).items():
        stored = {link.theirs: WEIGHT_DTYPES[folder.tensors[link.theirs].dtype] for link in group}
        if options.dtype is not None and not options.allow_narrowing:
            for theirs, dtype in stored.items():
                require_room(theirs, dtype, options.dtype)
        found[ours] = Outline(options.dtype or common_dtype(stored.values()), shapes[ours])
    return found
