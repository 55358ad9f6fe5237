"""A step in other files: those that a run in another layout would have written.

Any layout loads any step as it is, so nothing needs this to go on; it makes more files of few, for many readers, or few of many.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pentatron.checkpoint.compare import Side, compare_tensor
from pentatron.checkpoint.described import saved_settings
from pentatron.checkpoint.find import read_step
from pentatron.checkpoint.load import ROUTERS, WEIGHTS, StepReader
from pentatron.checkpoint.manifest import Manifest
from pentatron.checkpoint.store import CheckpointStore, Found
from pentatron.checkpoint.streaming import Rectangle, save_rectangles
from pentatron.checkpoint.tensor_file import DTYPES, Outline
from pentatron.config.draft import Draft
from pentatron.config.entry import EntryPoint
from pentatron.config.resolve import gather, resolve
from pentatron.config.run import RunConfig, table
from pentatron.config.settings import Facts, Settings
from pentatron.errors import UserError
from pentatron.hf.new_folder import new_folder
from pentatron.hf.progress import Progress
from pentatron.hf.small_files import FOLDER_NAME, copy_files, small_files
from pentatron.monitor.display import Display
from pentatron.train.stored_as import fragments_of_rank

ENTRY = EntryPoint(
    name="pentatron checkpoint reshard",
    summary="",
    defaults={"dataset_size": 1000, "train_iters": 1, "micro_batch_size": 1},
)
# They say how many processes there are.
_COUNTS = ("world_size", "nproc_per_node")
# Of a run, these decide what its ranks hold; all else of it is kept as it was saved.
_DECIDE = ("model", "moe", "precision", "optim")
_OF_RANK = re.compile(r".*/rank-(\d+)")


@dataclass(frozen=True)
class Resharded:
    step: Path
    files: int
    tensors: int
    bytes: int
    seconds: float


def layout_for(found: Found, words: Sequence[str]) -> RunConfig:
    """The run of a step in the layout that the flags ask for; sizes that they do not name are 1."""
    draft = gather(words, ENTRY)
    foreign = [
        table()[name].flag
        for name, item in table().items()
        if draft.given(name) and item.section != "parallel" and name not in _COUNTS
    ]
    if foreign:
        raise UserError(
            f"{foreign[0]} says nothing about files; reshard takes the flags of the layout (pentatron checkpoint reshard --help)"
        )
    saved = saved_settings(found)
    made_with = Settings.defaults(**saved)
    if made_with.spec:
        # Code is not taken from files.
        raise UserError(
            f"{found.folder} has layers of its own (--spec {' '.join(made_with.spec)}), which only the run itself can cut; it is loaded as "
            f"it is, in any layout"
        )
    for name, item in table().items():
        # Padding follows from the layout; a step has none.
        if item.section in _DECIDE and name in saved and name != "padded_vocab_size":
            draft.assign(f"{found.folder}", **{name: saved[name]})
    length = made_with.seq_length if "seq_length" in saved else made_with.max_position_embeddings
    draft.assign(f"{found.folder}", seq_length=length)
    stages = max(1, draft.pipeline_model_parallel_size)
    draft.assign(f"default of {ENTRY.name}", gradient_accumulation_steps=4 * stages)
    return resolve(draft, _facts(draft)).config


def _facts(draft: Draft) -> Facts:
    """As many processes as were said, or as the sizes make."""
    world = draft.world_size or draft.nproc_per_node
    if world is None:
        world = draft.data_parallel_size or 1
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            world *= getattr(draft, name)
    return Facts(max(1, world), max(1, world))


def reshard(found: Found, out: Path, config: RunConfig, display: Display) -> Resharded:
    """Writes `out`, a folder with this one step, and compares it with the source before it gets its name."""
    manifest = found.manifest
    outlines = outlines_of(manifest)
    total = sum(outline.bytes for outline in outlines.values())
    settings = {**manifest.config, "parallel": config.nested()["parallel"]}
    progress = Progress(display, "writing", total)
    with new_folder(out, total) as made, StepReader(found.folder, manifest) as reader:
        store = CheckpointStore(made, keep=None)
        contents = _contents(found, config)
        step = save_rectangles(store, manifest, progress.counting(reader.read), contents, settings)
        copy_files(small_files(found.folder.parent / FOLDER_NAME), made / FOLDER_NAME)
        _require_equal(Side(str(found.folder), outlines, reader.read), step, display)
        files = len(list(step.glob("*.safetensors")))
        name = step.name
    return Resharded(out / name, files, len(outlines), total, progress.seconds)


def outlines_of(manifest: Manifest) -> dict[str, Outline]:
    return {name: Outline(DTYPES[record.dtype], record.shape) for name, record in manifest.tensors.items()}


def _contents(found: Found, config: RunConfig) -> Iterator[tuple[str, list[Rectangle]]]:
    """What lies in which file, rank after rank; a rank that would write nothing has none."""
    manifest = found.manifest
    kinds = sorted({name.partition("/")[0] for name in manifest.tensors})
    placed: set[str] = set()
    world = config.grid.world_size
    for rank in range(world):
        here: list[Rectangle] = []
        for fragment in fragments_of_rank(config, rank):
            start, size = tuple(fragment.start), tuple(fragment.values.shape)
            for name in _cut_alike(fragment.tensor, kinds, manifest):
                if manifest.tensors[name].shape != tuple(fragment.shape):
                    raise UserError(
                        f"{found.folder} holds {name} as {list(manifest.tensors[name].shape)}, and its settings say "
                        f"{list(fragment.shape)}; is it a model of a program of your own? Such a step is loaded as it is, in any layout"
                    )
                here.append((name, start, size))
                placed.add(name)
        here += [
            (name, (0,) * len(record.shape), record.shape)
            for name, record in manifest.tensors.items()
            if _writer(name, world) == rank
        ]
        if here:
            yield f"rank-{rank:05d}.safetensors", here
    lost = [n for n in manifest.tensors if n not in placed and _writer(n, world) is None]
    if lost:
        raise UserError(
            f"{found.folder} holds {lost[0]}, which the model of its settings does not have; is it a model of a program of your own? "
            f"Such a step is loaded as it is, in any layout"
        )


def _cut_alike(tensor: str, kinds: Sequence[str], manifest: Manifest) -> list[str]:
    """The tensors of a step that are cut as this one: with a weight, what the optimizer remembers of it."""
    if tensor.startswith(ROUTERS):
        return [tensor] if tensor in manifest.tensors else []
    if not tensor.startswith(WEIGHTS):
        return []
    names = (f"{kind}/{tensor.removeprefix(WEIGHTS)}" for kind in kinds)
    return [name for name in names if name in manifest.tensors]


def _writer(name: str, world: int) -> int | None:
    """The rank that would write what is not cut, such as the state of its random generator; None: the layout decides."""
    match = _OF_RANK.fullmatch(name)
    if match is None:
        return None
    return int(match[1]) if int(match[1]) < world else 0


def _require_equal(source: Side, step: Path, display: Display) -> None:
    made = read_step(step, verify=False)
    total = sum(outline.bytes for outline in source.outlines.values())
    progress = Progress(display, "comparing", 2 * total)
    with StepReader(made.folder, made.manifest) as reader:
        other = Side(str(step), outlines_of(made.manifest), reader.read)
        for name in source.outlines:
            found = compare_tensor(name, source, other, progress.add)
            if not found.is_equal:
                raise UserError(
                    f"what was written is not what {source.name} holds ({found.sentence()}); check the disk and try again"
                )
