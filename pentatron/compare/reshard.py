"""Rewrites a checkpoint step into the files that a run in another layout would have written.

Any layout loads any step, so training does not need this. It changes the number of files, for many readers or
few. The fragments of each rank are computed by one process on the meta device, from the stages, bucket plans
and shards of training.
"""

import dataclasses
import itertools
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from pentatron.checkpoint.compare import ComparedTensors, compare_tensor
from pentatron.checkpoint.find import read_step, saved_settings
from pentatron.checkpoint.format import Manifest
from pentatron.checkpoint.load import ROUTERS, WEIGHTS, StepReader
from pentatron.checkpoint.store import Checkpoint, CheckpointStore
from pentatron.checkpoint.streaming import Progress, Rectangle, save_rectangles
from pentatron.checkpoint.tensor_file import DTYPES, TensorSpec
from pentatron.errors import UserError
from pentatron.hf.small_files import FOLDER_NAME, copy_files, new_folder, small_files
from pentatron.layout.ranks import Axis, Grid
from pentatron.models.causal_lm import CausalLM, build_stages
from pentatron.models.router_load import RouterLoads
from pentatron.monitor.display import Display
from pentatron.nn.options import axes_of
from pentatron.optim.build import has_replicas
from pentatron.optim.optimizer import plan_stage_buckets
from pentatron.parallel.collectives import Group
from pentatron.parallel.sharding import Fragment, fragments_in, sharded_parameters
from pentatron.parallel.world import World
from pentatron.settings.entry_points import EntryPoint
from pentatron.settings.resolve import gather, resolve
from pentatron.settings.run_config import RunConfig, all_settings
from pentatron.settings.settings import ProcessFacts, Settings
from pentatron.text import decimal_size, format_count

_META = torch.device("meta")


def fragments_of_rank(config: RunConfig, rank: int) -> Iterator[Fragment]:
    """Yields the weights and router tensors that this rank would save, with values on the meta device.

    Optimizer states are sharded like their weights.
    """
    world = _world(config.grid, rank)
    parts = {number: config.stages[number] for number in config.placement.stages_of(world.at.pipeline)}
    axes = axes_of(world, config.parallel)
    stages = build_stages(config.model, config.moe, parts, axes, None, _META)
    is_zero3 = config.parallel.zero_stage == 3 and has_replicas(stages, world)
    fragments = _zero3_shards(stages, world) if is_zero3 else _bucket_shares(stages, world, config)
    for fragment in fragments:
        yield dataclasses.replace(fragment, tensor=f"{WEIGHTS}{fragment.tensor}")
    yield from RouterLoads(config, world, stages).fragments(owned_only=True)


def _world(grid: Grid, rank: int) -> World:
    """The world of a rank without process groups: it knows its place in every group but cannot send."""
    of_axis = {axis: next(g for g in grid.groups(axis) if rank in g) for axis in typing.get_args(Axis)}
    groups = {axis: Group(g.index(rank), len(g)) for axis, g in of_axis.items() if len(g) > 1}
    whole_world = Group(rank, grid.world_size)
    return World(grid, grid.coordinates(rank), whole_world, 0, _META, groups)


def _bucket_shares(stages: Mapping[int, CausalLM], world: World, config: RunConfig) -> Iterator[Fragment]:
    """Fragments of a rank's share of each bucket, which is split across the ranks with copies of it."""
    plans = plan_stage_buckets(stages, world, config.parallel.ddp_bucket_size)
    for plan in itertools.chain.from_iterable(plans.values()):
        share = plan.own_share()
        for shard, fragment in plan.fragments(share, torch.empty(len(share), device=_META), share.first):
            if world.is_first_of(shard.replicated_over):
                yield fragment


def _zero3_shards(stages: Mapping[int, CausalLM], world: World) -> Iterator[Fragment]:
    """Fragments of a rank's shards in ZeRO 3."""
    # Imported late, because FSDP imports torch's compiler, which other layouts do not need.
    from pentatron.parallel.zero3 import SHARD_AXES, shard_bounds

    for param in itertools.chain.from_iterable(sharded_parameters(stage) for stage in stages.values()):
        shared, instances = SHARD_AXES[param.declared.replica_axis]
        group = world.group(shared)
        start, size = shard_bounds(tuple(param.parameter.shape), group.rank, group.size)
        for shard, fragment in fragments_in(param, torch.empty(size, device=_META), start):
            if world.is_first_of({instances, *shard.replicated_over}):
                yield fragment


ENTRY = EntryPoint(
    name="pentatron checkpoint reshard",
    summary="",
    defaults={"dataset_size": 1000, "train_iters": 1, "micro_batch_size": 1},
)
# Flags of the number of processes.
_COUNTS = ("world_size", "nproc_per_node")
# Sections that determine what the ranks hold. All others are copied as saved.
_MODEL_SECTIONS = ("model", "moe", "precision", "optim")
_OWN_MODEL = "if a program of your own saved it, load it without resharding: any layout can"
_OF_RANK = re.compile(r".*/rank-(\d+)")


def layout_for(source: Checkpoint, words: Sequence[str]) -> RunConfig:
    """Returns the configuration of a step in the layout of the flags; sizes that are not given are 1."""
    draft = gather(words, ENTRY)
    for name, item in all_settings().items():
        if draft.given(name) and item.section != "parallel" and name not in _COUNTS:
            taken = "reshard takes the flags of the layout (pentatron checkpoint reshard --help)"
            raise UserError(f"{item.flag} does not change the files; {taken}")
    saved = saved_settings(source)
    settings = Settings.defaults(**saved)
    if settings.spec:
        # A checkpoint must not name code to run.
        layers = f"a custom layer spec (--spec {' '.join(settings.spec)}), which only training runs can shard"
        raise UserError(f"{source.folder} has {layers}; it can be loaded in any layout without resharding")
    for name, item in all_settings().items():
        # Padding depends on the layout and is not stored in a step.
        if item.section in _MODEL_SECTIONS and name in saved and name != "padded_vocab_size":
            draft.assign(f"{source.folder}", **{name: saved[name]})
    length = settings.seq_length if "seq_length" in saved else settings.max_position_embeddings
    draft.assign(f"{source.folder}", seq_length=length)
    steps = 4 * max(1, draft.pipeline_model_parallel_size)
    draft.assign(f"default of {ENTRY.name}", gradient_accumulation_steps=steps)
    world = draft.world_size or draft.nproc_per_node
    if world is None:
        world = draft.tensor_model_parallel_size * draft.pipeline_model_parallel_size
        world *= draft.context_parallel_size * (draft.data_parallel_size or 1)
    return resolve(draft, ProcessFacts(max(1, world), max(1, world))).config


def reshard(source: Checkpoint, out: Path, config: RunConfig, display: Display) -> tuple[Path, str]:
    """Writes the step into the new folder `out`, and compares it with the source before the final rename.

    Returns the new step, and in words how much was written.
    """
    manifest = source.manifest
    outlines = outlines_of(manifest)
    total = sum(outline.bytes for outline in outlines.values())
    settings = {**manifest.config, "parallel": config.nested()["parallel"]}
    progress = Progress(display, "writing", total)
    with new_folder(out, total) as folder, StepReader(source.folder, manifest) as reader:
        store, contents = CheckpointStore(folder, keep=None), _contents(source, config)
        step = save_rectangles(store, manifest, progress.counting(reader.read), contents, settings)
        copy_files(small_files(source.folder.parent / FOLDER_NAME), folder / FOLDER_NAME)
        _require_equal(ComparedTensors(str(source.folder), outlines, reader.read), step, display)
        files = format_count(len(list(step.glob("*.safetensors"))), "file")
    tensors, size = format_count(len(outlines), "tensor"), decimal_size(total)
    return out / step.name, f"{tensors} in {files}, {size} in {progress.seconds:.1f} s"


def outlines_of(manifest: Manifest) -> dict[str, TensorSpec]:
    return {name: TensorSpec(DTYPES[record.dtype], record.shape) for name, record in manifest.tensors.items()}


def _contents(source: Checkpoint, config: RunConfig) -> Iterator[tuple[str, list[Rectangle]]]:
    """Yields the contents of each file, rank after rank. A rank without contents has no file."""
    manifest = source.manifest
    kinds = sorted({name.partition("/")[0] for name in manifest.tensors})
    placed: set[str] = set()
    world = config.grid.world_size
    for rank in range(world):
        rectangles: list[Rectangle] = []
        for fragment in fragments_of_rank(config, rank):
            start, size = tuple(fragment.start), tuple(fragment.values.shape)
            for name in _sharded_alike(fragment.tensor, kinds, manifest):
                if manifest.tensors[name].shape != tuple(fragment.shape):
                    held = f"{name} as {list(manifest.tensors[name].shape)}"
                    said = f"its settings require {list(fragment.shape)}"
                    raise UserError(f"{source.folder} has {held}, but {said}; {_OWN_MODEL}")
                rectangles.append((name, start, size))
                placed.add(name)
        own = {name: r.shape for name, r in manifest.tensors.items() if _writer(name, world) == rank}
        rectangles += [(name, (0,) * len(shape), shape) for name, shape in own.items()]
        if rectangles:
            yield f"rank-{rank:05d}.safetensors", rectangles
    missing = [n for n in manifest.tensors if n not in placed and _writer(n, world) is None]
    if missing:
        found = f"{missing[0]}, which the model of its settings does not have"
        raise UserError(f"{source.folder} holds {found}; {_OWN_MODEL}")


def _sharded_alike(tensor: str, kinds: Sequence[str], manifest: Manifest) -> list[str]:
    """Returns the tensors of a step that are sharded like this one: a weight and its optimizer states."""
    names = [tensor] if tensor.startswith(ROUTERS) else []
    if tensor.startswith(WEIGHTS):
        names = [f"{kind}/{tensor.removeprefix(WEIGHTS)}" for kind in kinds]
    return [name for name in names if name in manifest.tensors]


def _writer(name: str, world: int) -> int | None:
    """The rank that writes an unsharded tensor, such as a random generator's state; None if it is sharded."""
    match = _OF_RANK.fullmatch(name)
    rank = None if match is None else int(match[1])
    return rank if rank is None or rank < world else 0


def _require_equal(source: ComparedTensors, step: Path, display: Display) -> None:
    """Reads the new step and raises unless every tensor equals the source."""
    written = read_step(step, verify=False)
    total = sum(outline.bytes for outline in source.outlines.values())
    progress = Progress(display, "comparing", 2 * total)
    with StepReader(written.folder, written.manifest) as reader:
        other = ComparedTensors(str(step), outlines_of(written.manifest), reader.read)
        for name in source.outlines:
            result = compare_tensor(name, source, other, progress.add)
            if not result.is_equal:
                held = f"{source.name} holds ({result.sentence()})"
                raise UserError(f"the step that was written differs: {held}; check the disk and try again")
