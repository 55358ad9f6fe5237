"""A step in other files: those that a run in another layout would have written.

Any layout loads any step as it is, so nothing needs this to go on; it makes more files of few, for many readers, or few of many.
"""

import dataclasses
import itertools
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pentatron.checkpoint.compare import Side, compare_tensor
from pentatron.checkpoint.find import read_step, saved_settings
from pentatron.checkpoint.format import Manifest
from pentatron.checkpoint.load import ROUTERS, WEIGHTS, StepReader
from pentatron.checkpoint.store import CheckpointStore, Found
from pentatron.checkpoint.streaming import Progress, Rectangle, save_rectangles
from pentatron.checkpoint.tensor_file import DTYPES, Outline
from pentatron.errors import UserError
from pentatron.hf.small_files import FOLDER_NAME, copy_files, new_folder, small_files
from pentatron.layout.ranks import Axis, Grid
from pentatron.models.causal_lm import CausalLM, build_stages
from pentatron.models.router_load import RouterLoads
from pentatron.monitor.display import Display
from pentatron.nn.options import axes_of
from pentatron.optim.build import has_copies
from pentatron.optim.optimizer import plans_of
from pentatron.parallel.collectives import Group
from pentatron.parallel.shards import Fragment, fragments_in, held_parameters
from pentatron.parallel.world import World
from pentatron.settings.entry import EntryPoint
from pentatron.settings.resolve import gather, resolve
from pentatron.settings.run import RunConfig, table
from pentatron.settings.settings import Draft, Facts, Settings

# What each rank of a layout would write into a checkpoint, found by one process without any of the values.
#
# The stages are those of training, made on a device that keeps shapes alone; what a rank owns of them follows
# from the same plans of buckets and the same cuts into shards.


_SHAPES_ALONE = torch.device("meta")


def fragments_of_rank(config: RunConfig, rank: int) -> Iterator[Fragment]:
    """What this rank would save of weights and routers; the values have a shape and nothing else.

    What an optimizer remembers of a weight is cut like it.
    """
    world = _world(config.grid, rank)
    parts = {number: config.stages[number] for number in config.placement.stages_of(world.at.pipeline)}
    axes = axes_of(world, config.parallel)
    stages = build_stages(config.model, config.moe, parts, axes, None, _SHAPES_ALONE)
    if config.parallel.zero_stage == 3 and has_copies(stages, world):
        owned = _shards(stages, world)
    else:
        owned = _shares(stages, world, config)
    for fragment in owned:
        yield dataclasses.replace(fragment, tensor=f"{WEIGHTS}{fragment.tensor}")
    yield from RouterLoads(config, world, stages).fragments(owned_only=True)


def _world(grid: Grid, rank: int) -> World:
    """A rank that knows its place in every group, and cannot talk to anybody."""
    groups: dict[Axis, Group] = {}
    for axis in typing.get_args(Axis):
        members = next(group for group in grid.groups(axis) if rank in group)
        if len(members) > 1:
            groups[axis] = Group(members.index(rank), len(members))
    everyone = Group(rank, grid.world_size)
    return World(grid, grid.coordinates(rank), everyone, 0, _SHAPES_ALONE, groups)


def _shares(stages: Mapping[int, CausalLM], world: World, config: RunConfig) -> Iterator[Fragment]:
    """Whatever is divided between the ranks with copies of a bucket, each of them saves its share."""
    plans = plans_of(stages, world, config.parallel.ddp_bucket_size)
    for plan in itertools.chain.from_iterable(plans.values()):
        share = plan.own_share()
        values = torch.empty(len(share), device=_SHAPES_ALONE)
        for piece, fragment in plan.pieces(share, values, share.first):
            if world.is_first_of(piece.replicated_over):
                yield fragment


def _shards(stages: Mapping[int, CausalLM], world: World) -> Iterator[Fragment]:
    # Torch's sharding brings its compiler along, which other layouts need not wait for.
    from pentatron.parallel.zero3 import SHARED_OVER, share_of

    for held in itertools.chain.from_iterable(held_parameters(stage) for stage in stages.values()):
        shared, instances = SHARED_OVER[held.declared.copies]
        group = world.group(shared)
        start, size = share_of(tuple(held.parameter.shape), group.rank, group.size)
        for piece, fragment in fragments_in(held, torch.empty(size, device=_SHAPES_ALONE), start):
            if world.is_first_of({instances, *piece.replicated_over}):
                yield fragment


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
