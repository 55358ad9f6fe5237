"""Reads Megatron-LM checkpoints: the legacy format, and opening either format as one of ours.

    iter_0000500/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt

The legacy format has one file of torch.save per tensor, pipeline and expert rank. Weights are read from any
layout; the optimizer state depends on the order of parameters of one rank, and is not read.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pentatron.checkpoint.find import find_megatron_checkpoint
from pentatron.checkpoint.manifest_checks import size_problem
from pentatron.checkpoint.store import Checkpoint
from pentatron.checkpoint.tensor_file import STORAGES
from pentatron.checkpoint.torch_file import raw_data_position
from pentatron.errors import UserError
from pentatron.interchange.arguments import run_state_of, settings_from_arguments
from pentatron.interchange.index import MegatronCheckpoint, MegatronTensor, StoredRectangle, manifest_of
from pentatron.interchange.torch_dist import FORMAT, INDEX_NAME, open_torch_dist, unpickle_in_sandbox
from pentatron.parallel.sharding import Shape
from pentatron.settings.run_config import RunConfig
from pentatron.settings.settings import Settings

LEGACY_NAME = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12]\.\w+?)|(linear_fc[12]\.(?:weight|bias))(\d+))"
)
# Tensors that are sharded over tensor parallel ranks along each axis. Others are replicated.
_COLUMN_PARALLEL = [f"linear_{layer}.{kind}" for layer in ("qkv", "fc1") for kind in ("weight", "bias")]
_ROW_PARALLEL = ("linear_proj.weight", "linear_fc2.weight")
_SHARDED = (("word_embeddings.weight", "output_layer.weight", *_COLUMN_PARALLEL), _ROW_PARALLEL)


@dataclass(frozen=True)
class _Rank:
    """One file: its ranks and its content."""

    tensor: int
    pipeline: int
    expert: int
    file: str
    content: Mapping[str, Any]

    @property
    def chunks(self) -> list[Mapping[str, Any]]:
        """Model chunks of the rank: several with virtual pipeline stages."""
        if "model" in self.content:
            return [self.content["model"]]
        numbers = sorted(int(n[len("model") :]) for n in self.content if re.fullmatch(r"model\d+", n))
        return [self.content[f"model{number}"] for number in numbers]


def open_legacy(folder: Path) -> MegatronCheckpoint:
    """Reads the metadata of all ranks' files in the sandbox, and no tensors."""
    ranks = list(_ranks(folder))
    first = ranks[0].content
    arguments = first.get("args") or {}
    gated = bool(arguments.get("swiglu"))
    pieces: dict[str, list[tuple[StoredRectangle, str]]] = {}
    layers = _first_layers(ranks)
    tensor_ranks = 1 + max(rank.tensor for rank in ranks)
    for rank in ranks:
        for number, chunk in enumerate(rank.chunks):
            start = layers[number, rank.pipeline]
            for name, piece, dtype in _chunk_tensors(rank, chunk, start, tensor_ranks, gated):
                pieces.setdefault(name, []).append((piece, dtype))
    stored = {name: _stored(folder, name, parts) for name, parts in pieces.items()}
    iteration = int(first["iteration"]) if isinstance(first.get("iteration"), int) else 0
    has_optimizer = "optimizer" in first or any(folder.glob("mp_rank_*/distrib_optim.pt"))
    remark = f"{folder} has its optimizer state in the order of the layout that saved it, so only the weights are read"
    return MegatronCheckpoint(folder, iteration, stored, arguments, first, (remark,) if has_optimizer else ())


def _ranks(folder: Path) -> Iterator[_Rank]:
    """Yields the files of all ranks."""
    folders = sorted(path for path in folder.glob("mp_rank_*") if (path / LEGACY_NAME).is_file())
    if not folders:
        raise UserError(f"{folder} has no mp_rank_*/{LEGACY_NAME}; name a checkpoint that is complete")
    for path in folders:
        if (match := _FOLDER.fullmatch(path.name)) is None:
            raise UserError(f"{path} is not named like a rank of Megatron-LM (mp_rank_TT_PPP_EEE)")
        content = unpickle_in_sandbox(path / LEGACY_NAME)
        if not isinstance(content, Mapping):
            raise UserError(f"{path / LEGACY_NAME} is not a checkpoint of Megatron-LM")
        arguments = content.get("args") or {}
        second, third = (int(part) if part else 0 for part in match.groups()[1:])
        stages = arguments.get("pipeline_model_parallel_size") or 1
        # A single number after the tensor rank is the pipeline rank if there are stages, else the expert
        # rank.
        pipeline, expert = (second, third) if match[3] or stages > 1 else (0, second)
        yield _Rank(int(match[1]), pipeline, expert, f"{path.name}/{LEGACY_NAME}", content)


def _first_layers(ranks: list[_Rank]) -> dict[tuple[int, int], int]:
    """Returns the first layer of each model chunk.

    Chunks are numbered over all pipeline ranks, one round per virtual stage.
    """
    counts = {
        (number, rank.pipeline): len({match[1] for name in chunk if (match := _LAYER.fullmatch(name))})
        for rank in ranks
        for number, chunk in enumerate(rank.chunks)
    }
    return {key: sum(counts[other] for other in counts if other < key) for key in counts}


def _chunk_tensors(
    rank: _Rank, chunk: Mapping[str, Any], first_layer: int, tensor_ranks: int, gated: bool
) -> Iterator[tuple[str, StoredRectangle, str]]:
    """Yields (name in the whole model, piece, dtype) of each tensor of a chunk that is not a replica."""
    local_experts = [match for name in chunk if (match := _expert_of(name))]
    experts_per_rank = 1 + max((int(match) for match in local_experts), default=-1)
    for name, value in chunk.items():
        if not isinstance(value, Mapping) or "~tensor" not in value:
            continue
        # Without the expert number that grouped GEMM appends.
        bare_name = re.sub(r"(linear_fc[12]\.(?:weight|bias))\d+$", r"\1", name)
        axis = next((axis for axis, names in enumerate(_SHARDED) if bare_name.endswith(names)), None)
        if (rank.expert and _expert_of(name) is None) or (rank.tensor and axis is None):
            continue
        whole_name = _whole_name(name, first_layer, rank.expert * experts_per_rank)
        shape = tuple(value["shape"])
        place, dtype = _place(rank.file, name, value)
        halves = gated and bare_name.endswith(("linear_fc1.weight", "linear_fc1.bias"))
        for piece in _pieces(rank, place, shape, axis, tensor_ranks, halves):
            yield whole_name, piece, dtype


def _expert_of(name: str) -> str | None:
    """Local number of the expert in a tensor's name, or None."""
    match = _EXPERT.search(name)
    return None if match is None else match[1] or match[4]


def _whole_name(name: str, first_layer: int, first_expert: int) -> str:
    """Name of a tensor in the whole model: with global layer and expert numbers."""
    if (match := _LAYER.fullmatch(name)) is None:
        return name
    rest = match[2]
    if expert := _EXPERT.fullmatch(rest):
        number, part = (expert[1], expert[2]) if expert[1] else (expert[4], expert[3])
        rest = f"mlp.experts.experts.{first_expert + int(number)}.{part}"
    return f"decoder.layers.{first_layer + int(match[1])}.{rest}"


def _place(file: str, name: str, value: Mapping[str, Any]) -> tuple[str, str]:
    """Returns (position in the file, dtype) of a contiguous tensor."""
    kind = STORAGES.get(f"{value['~tensor']}Storage")
    shape, strides = tuple(value["shape"]), tuple(value["strides"])
    if kind is None or not torch.empty_strided(shape, strides, device="meta").is_contiguous():
        raise UserError(
            f"{file}: {name} is stored as {value['~tensor']} with strides {list(strides)}, which is not supported"
        )
    dtype, width = str(kind).removeprefix("torch."), kind.itemsize
    offset = value["offset"] * width
    if offset + math.prod(shape) * width > value["bytes"]:
        raise UserError(f"{file}: {name} reaches beyond its storage, so the file is damaged")
    return raw_data_position(value["first"] + offset, dtype, shape), dtype


def _pieces(
    rank: _Rank, place: str, shape: Shape, axis: int | None, tensor_ranks: int, halves: bool
) -> Iterator[StoredRectangle]:
    """Yields the pieces of a shard in the whole tensor. `halves`: gate and up are sharded separately."""
    origin = (0,) * len(shape)
    if axis is None:
        yield StoredRectangle(origin, shape, rank.file, place)
        return
    length = shape[axis] // 2 if halves else shape[axis]
    for half in range(2 if halves else 1):
        start = half * length * tensor_ranks + rank.tensor * length
        size = tuple(length if i == axis else n for i, n in enumerate(shape))
        at, inside = (tuple(v if i == axis else 0 for i in range(len(shape))) for v in (start, half * length))
        yield StoredRectangle(at, size, rank.file, place, inside)


def _stored(folder: Path, name: str, parts: list[tuple[StoredRectangle, str]]) -> MegatronTensor:
    """Returns a tensor assembled from the pieces of all ranks."""
    dtypes = {dtype for _, dtype in parts}
    if len(dtypes) > 1:
        raise UserError(
            f"{folder} contains {name} as {' and '.join(sorted(dtypes))}, so its ranks do not belong together"
        )
    ends = [tuple(i + n for i, n in zip(piece.start, piece.size)) for piece, _ in parts]
    return MegatronTensor(dtypes.pop(), tuple(map(max, zip(*ends))), tuple(piece for piece, _ in parts))


# --- opening either format ---


def read_megatron(path: Path) -> tuple[Checkpoint, list[str]]:
    """Opens the newest checkpoint for the path. Also returns messages about data that is not read."""
    if (step := find_megatron_checkpoint(path)) is None:
        raise UserError(f"{path} contains no checkpoint of Megatron-LM")
    folder, kind = step
    if kind == "torch_dist" and not all((folder / name).is_file() for name in (INDEX_NAME, FORMAT)):
        raise UserError(
            f"{folder} is not complete: it lacks .metadata or metadata.json; name another checkpoint"
        )
    try:
        contents = open_torch_dist(folder) if kind == "torch_dist" else open_legacy(folder)
        opened = as_checkpoint(contents)
    except UserError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError) as error:
        # Untrusted: the files may contain anything.
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(
            f"{folder} is not a valid checkpoint of Megatron-LM ({reason}); name another one"
        ) from error
    remarks = [
        f"{folder} is a checkpoint of Megatron-LM: its pickled files were read in a sandboxed process, and nothing of them ran",
        *contents.remarks,
    ]
    return opened, remarks


def as_checkpoint(contents: MegatronCheckpoint) -> Checkpoint:
    """Converts the contents to a checkpoint of ours."""
    settings = settings_from_arguments(contents.arguments, str(contents.folder))
    # Building the model allocates memory, so its size is checked against the stored tensors first.
    shapes = {name: stored.shape for name, stored in contents.tensors.items()}
    if problem := size_problem(settings, shapes, stacked=True):
        raise UserError(
            f"{contents.folder} cannot be the model that it describes ({problem}); name another checkpoint"
        )
    config = RunConfig.of(Settings.defaults(**settings))
    state = run_state_of(contents.common, contents.arguments, contents.iteration)
    manifest = manifest_of(contents, config.model, config.moe, state, config.nested())
    return Checkpoint(contents.folder, manifest)
