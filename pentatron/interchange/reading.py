"""Megatron-LM's older checkpoints: one file of torch.save for each tensor, pipeline and expert rank, put together here.

    iter_0000500/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt

Weights are taken, of any such layout. What the optimizer has is in the order of parameters of one rank of one layout, and left.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentatron.checkpoint.find import megatron_step
from pentatron.checkpoint.store import Found
from pentatron.checkpoint.torch_file import STORAGES, plain_place
from pentatron.checkpoint.untrusted import implausible
from pentatron.errors import UserError
from pentatron.interchange.arguments import our_settings, run_state_of
from pentatron.interchange.index import Contents, Piece, Stored, manifest_of
from pentatron.interchange.torch_dist import is_torch_dist, open_torch_dist, read_apart
from pentatron.parallel.shards import Shape
from pentatron.settings.run import RunConfig
from pentatron.settings.settings import Settings

FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12]\.\w+?)|(linear_fc[12]\.(?:weight|bias))(\d+))"
)
# Which axis the tensor ranks share; what is not named is the same on all of them.
_CUT = {
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "linear_qkv.weight": 0,
    "linear_qkv.bias": 0,
    "linear_proj.weight": 1,
    "linear_fc1.weight": 0,
    "linear_fc1.bias": 0,
    "linear_fc2.weight": 1,
}


@dataclass(frozen=True)
class _Rank:
    """One file: whose it is, and what is in it."""

    tensor: int
    pipeline: int
    expert: int
    file: str
    content: Mapping[str, Any]

    @property
    def chunks(self) -> list[Mapping[str, Any]]:
        """The stages of a rank: one, or several where stages are virtual."""
        if "model" in self.content:
            return [self.content["model"]]
        numbers = sorted(int(n[len("model") :]) for n in self.content if re.fullmatch(r"model\d+", n))
        return [self.content[f"model{number}"] for number in numbers]


def open_legacy(folder: Path) -> Contents:
    """What the files of all ranks hold together; each is read apart, and no tensor yet."""
    ranks = list(_ranks(folder))
    first = ranks[0].content
    arguments = first.get("args") or {}
    gated = bool(arguments.get("swiglu"))
    pieces: dict[str, list[tuple[Piece, str]]] = {}
    layers = _first_layers(ranks)
    tensors, experts = (1 + max(getattr(r, axis) for r in ranks) for axis in ("tensor", "expert"))
    for rank in ranks:
        for number, chunk in enumerate(rank.chunks):
            start = layers[number, rank.pipeline]
            for name, piece, dtype in _of_chunk(rank, chunk, start, tensors, experts, gated):
                pieces.setdefault(name, []).append((piece, dtype))
    stored = {name: _stored(folder, name, found) for name, found in pieces.items()}
    iteration = first.get("iteration")
    remarks: tuple[str, ...] = ()
    if "optimizer" in first or any(folder.glob("mp_rank_*/distrib_optim.pt")):
        remarks = (
            f"{folder} has its optimizer's state in the order of the layout that saved it, so weights alone are taken",
        )
    return Contents(
        folder, int(iteration) if isinstance(iteration, int) else 0, stored, arguments, first, remarks
    )


def _ranks(folder: Path) -> Iterator[_Rank]:
    found = sorted(path for path in folder.glob("mp_rank_*") if (path / FILE).is_file())
    if not found:
        raise UserError(f"{folder} has no mp_rank_*/{FILE}; name a checkpoint that is complete")
    for path in found:
        match = _FOLDER.fullmatch(path.name)
        if match is None:
            raise UserError(f"{path} is not named like a rank of Megatron-LM (mp_rank_TT_PPP_EEE)")
        content = read_apart(path / FILE)
        if not isinstance(content, Mapping):
            raise UserError(f"{path / FILE} is no checkpoint of Megatron-LM")
        arguments = content.get("args") or {}
        second, third = (int(part) if part else 0 for part in match.groups()[1:])
        stages = arguments.get("pipeline_model_parallel_size") or 1
        # With one number after that of the tensor rank, it is of a stage if there are stages.
        pipeline, expert = (second, third) if match[3] or stages > 1 else (0, second)
        yield _Rank(int(match[1]), pipeline, expert, f"{path.name}/{FILE}", content)


def _first_layers(ranks: list[_Rank]) -> dict[tuple[int, int], int]:
    """The number of the first layer of every stage: virtual ones go round all ranks, then round again."""
    counts: dict[tuple[int, int], int] = {}
    for rank in ranks:
        for number, chunk in enumerate(rank.chunks):
            own = {int(match[1]) for name in chunk if (match := _LAYER.fullmatch(name))}
            counts[number, rank.pipeline] = len(own)
    first, before = {}, 0
    for key in sorted(counts):
        first[key] = before
        before += counts[key]
    return first


def _of_chunk(
    rank: _Rank, chunk: Mapping[str, Any], first_layer: int, tensors: int, experts: int, gated: bool
) -> Iterator[tuple[str, Piece, str]]:
    """Every tensor of a stage of a rank that is not another rank's copy: its name in the whole model, and where it lies in it."""
    local = [match for name in chunk if (match := _expert_of(name))]
    own = 1 + max((int(match) for match in local), default=-1)
    for name, value in chunk.items():
        if not isinstance(value, Mapping) or "~tensor" not in value:
            continue
        number = _expert_of(name)
        if number is None and rank.expert:
            continue
        axis = next((axis for end, axis in _CUT.items() if _bare(name).endswith(end)), None)
        if axis is None and rank.tensor:
            continue
        called = _whole_name(name, first_layer, rank.expert * own)
        shape = tuple(value["shape"])
        place, dtype = _place(rank.file, name, value)
        halves = gated and _bare(name).endswith(("linear_fc1.weight", "linear_fc1.bias"))
        for piece in _pieces(rank, place, shape, axis, tensors, halves):
            yield called, piece, dtype


def _expert_of(name: str) -> str | None:
    found = _EXPERT.search(name)
    return None if found is None else found[1] or found[4]


def _bare(name: str) -> str:
    """Without the number that a grouped matmul puts at the end."""
    return re.sub(r"(linear_fc[12]\.(?:weight|bias))\d+$", r"\1", name)


def _whole_name(name: str, first_layer: int, first_expert: int) -> str:
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    rest = match[2]
    found = _EXPERT.fullmatch(rest)
    if found is not None:
        number, part = (found[1], found[2]) if found[1] else (found[4], found[3])
        rest = f"mlp.experts.experts.{first_expert + int(number)}.{part}"
    return f"decoder.layers.{first_layer + int(match[1])}.{rest}"


def _place(file: str, name: str, value: Mapping[str, Any]) -> tuple[tuple[str, str], str]:
    """In which file, and where; only what lies there in one run of numbers."""
    kind, shape, strides = (
        STORAGES.get(f"{value['~tensor']}Storage"),
        tuple(value["shape"]),
        tuple(value["strides"]),
    )
    if kind is None or not _is_one_run(shape, strides):
        raise UserError(
            f"{file}: {name} is stored as {value['~tensor']} with strides {list(strides)}, which is not read here"
        )
    dtype, width = str(kind).removeprefix("torch."), kind.itemsize
    offset = value["offset"] * width
    if offset + math.prod(shape) * width > value["bytes"]:
        raise UserError(f"{file}: {name} reaches beyond its own memory, so the file is damaged")
    return (file, plain_place(value["first"] + offset, dtype, shape)), dtype


def _is_one_run(shape: Shape, strides: Shape) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _pieces(
    rank: _Rank, place: tuple[str, str], shape: Shape, axis: int | None, tensors: int, halves: bool
) -> Iterator[Piece]:
    file, where = place
    origin = (0,) * len(shape)
    if axis is None:
        yield Piece(origin, shape, file, where)
        return
    along = shape[axis] // 2 if halves else shape[axis]
    for half in range(2 if halves else 1):
        start = half * along * tensors + rank.tensor * along
        size = tuple(along if i == axis else n for i, n in enumerate(shape))
        at, inside = (tuple(v if i == axis else 0 for i in range(len(shape))) for v in (start, half * along))
        yield Piece(at, size, file, where, inside)


def _stored(folder: Path, name: str, found: list[tuple[Piece, str]]) -> Stored:
    dtypes = {dtype for _, dtype in found}
    if len(dtypes) > 1:
        raise UserError(
            f"{folder} holds {name} as {' and '.join(sorted(dtypes))}, so its ranks do not belong together"
        )
    ends = [tuple(i + n for i, n in zip(piece.start, piece.size)) for piece, _ in found]
    return Stored(
        dtypes.pop(), tuple(map(max, *ends)) if len(ends) > 1 else ends[0], tuple(p for p, _ in found)
    )


# A checkpoint of Megatron-LM, opened as if it were one of ours.


def read_megatron(path: Path) -> tuple[Found, list[str]]:
    """The newest checkpoint that the path means, and sentences about what is not taken from it."""
    found = megatron_step(path)
    if found is None:
        raise UserError(f"{path} holds no checkpoint of Megatron-LM")
    folder, kind = found
    if kind == "torch_dist" and not is_torch_dist(folder):
        raise UserError(
            f"{folder} is not complete: there is no .metadata or no metadata.json; name another checkpoint"
        )
    try:
        contents = open_torch_dist(folder) if kind == "torch_dist" else open_legacy(folder)
        opened = as_found(contents)
    except UserError:
        raise
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        OverflowError,
        RuntimeError,
    ) as error:
        # Whoever wrote the files may have written anything into them.
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UserError(
            f"{folder} makes no sense as a checkpoint of Megatron-LM ({reason}); name another one"
        ) from error
    remarks = [
        f"{folder} is a checkpoint of Megatron-LM: what is pickled in it was read by a process apart, and nothing of it ran",
        *contents.remarks,
    ]
    return opened, remarks


def as_found(contents: Contents) -> Found:
    settings = our_settings(contents.arguments, str(contents.folder))
    _require_plausible(contents, settings)
    config = RunConfig.of(Settings.defaults(**settings))
    state = run_state_of(contents.common, contents.arguments, contents.iteration)
    return Found(contents.folder, manifest_of(contents, config.model, config.moe, state, config.nested()))


def _require_plausible(contents: Contents, settings: Mapping[str, Any]) -> None:
    """Names and sizes of a model are listed before a tensor of it is looked for: there must not be more than its tensors have."""
    shapes = {name: stored.shape for name, stored in contents.tensors.items()}
    if problem := implausible(settings, shapes, stacked=True):
        raise UserError(
            f"{contents.folder} cannot be the model that it describes ({problem}); name another checkpoint"
        )
