"""What a checkpoint of Megatron-LM holds: every tensor of theirs with the rectangles it is stored in, whichever kind of file it is.

From that and the links follows a manifest like that of our own checkpoints, so that all that reads those reads these: loading
in any layout, exports, comparisons.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pentatron.checkpoint.cover import cover_problem
from pentatron.checkpoint.links import Link
from pentatron.checkpoint.load import ROUTERS, WEIGHTS
from pentatron.checkpoint.manifest import Manifest, StoredPiece, TensorRecord
from pentatron.checkpoint.tensor_file import DTYPES
from pentatron.checkpoint.torch_file import rectangle_key
from pentatron.config.model import MoEConfig, TransformerConfig
from pentatron.errors import UserError
from pentatron.interchange.names import VOCABULARY, read_links, second_name
from pentatron.parallel.pieces import Shape

# What an optimizer keeps of a tensor comes under these, before the tensor's own name.
STATE = "optimizer.state."
MASTER = f"{STATE}fp32_param."
# By the names that both give to what is kept: of Adam, and of gradient descent with momentum.
KEPT = ("exp_avg", "exp_avg_sq", "momentum_buffer")
# Programs around Megatron-LM put these before every name.
_PREFIXES = ("", "model.", "module.", "model.module.")
_ANCHOR = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Piece:
    """A rectangle of a tensor of theirs: in which file, and how `torch_file` finds what it is in; there it begins at `within`."""

    start: Shape
    size: Shape
    file: str
    place: str
    within: Shape | None = None


@dataclass(frozen=True)
class Stored:
    dtype: str
    shape: Shape
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Contents:
    """All that is known of one checkpoint of theirs; `remarks` are for the user."""

    folder: Path
    iteration: int
    tensors: Mapping[str, Stored]
    arguments: Mapping[str, Any]
    common: Mapping[str, Any]
    remarks: tuple[str, ...] = field(default=())


def prefix_of(names: Collection[str], folder: Path) -> str:
    for prefix in _PREFIXES:
        if f"{prefix}{_ANCHOR}" in names:
            return prefix
    raise UserError(
        f"{folder} holds no language model of Megatron-LM: there is no {_ANCHOR} among its {len(names)} tensors"
    )


def manifest_of(
    contents: Contents,
    model: TransformerConfig,
    moe: MoEConfig,
    run_state: Mapping[str, Any],
    config: Mapping[str, Any],
) -> Manifest:
    """The checkpoint as one of ours: the tensors of this model, and where the elements of each lie."""
    stored = contents.tensors
    prefix = prefix_of(stored, contents.folder)
    links = read_links(model, moe, stored, prefix)
    masters = all(f"{MASTER}{link.theirs}" in stored for link in _of_parameters(links))
    tensors: dict[str, TensorRecord] = {}
    for ours, of_tensor in links.items():
        kind = ROUTERS if _is_of_router(ours) else WEIGHTS
        before = MASTER if masters and kind == WEIGHTS else ""
        tensors[f"{kind}{ours}"] = _record(contents, ours, of_tensor, before)
    for kept in KEPT:
        if all(f"{STATE}{kept}.{link.theirs}" in stored for link in _of_parameters(links)):
            for ours, of_tensor in links.items():
                if not _is_of_router(ours):
                    tensors[f"{kept}/{ours}"] = _record(contents, ours, of_tensor, f"{STATE}{kept}.")
    _refuse_left_over(contents, prefix, links)
    return Manifest(contents.iteration, {}, dict(sorted(tensors.items())), dict(run_state), dict(config))


def _of_parameters(links: Mapping[str, list[Link]]) -> Iterator[Link]:
    for ours, of_tensor in links.items():
        if not _is_of_router(ours):
            yield from of_tensor


def _is_of_router(ours: str) -> bool:
    """The bias of a router is moved by counts, not by gradients, and kept apart from weights."""
    return ours.endswith(".mlp.router.bias")


def _record(contents: Contents, ours: str, links: Iterable[Link], before: str) -> TensorRecord:
    pieces: list[StoredPiece] = []
    dtypes: set[str] = set()
    shape: Shape = ()
    for link in links:
        name = f"{before}{link.theirs}"
        found = contents.tensors.get(name)
        if found is None:
            raise UserError(
                f"{contents.folder} lacks {name}, so it is not the model that its arguments describe; name another checkpoint"
            )
        _check_shape(contents.folder, name, found, link)
        dtypes.add(found.dtype)
        pieces += _pieces(link, found)
        end = tuple(i + n for i, n in zip(link.at, link.size))
        shape = tuple(map(max, shape, end)) if shape else end
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        raise UserError(
            f"{contents.folder} holds {ours} as {' and '.join(sorted(dtypes))}, which cannot be read here"
        )
    problem = cover_problem(shape, ((piece.start, piece.shape) for piece in pieces))
    if problem is not None:
        raise UserError(f"{contents.folder} does not hold all of {before}{ours}: {problem}")
    return TensorRecord(dtypes.pop(), shape, tuple(sorted(pieces, key=lambda piece: piece.start)))


def _check_shape(folder: Path, name: str, found: Stored, link: Link) -> None:
    """A vocabulary may be padded; everything else must be as large as the model says."""
    wanted = tuple(i + n for i, n in zip(link.start, link.their_size))
    padded = link.ours in VOCABULARY and found.shape[1:] == wanted[1:] and found.shape[0] >= wanted[0]
    layers = link.stacked and found.shape[1:] == wanted[1:] and found.shape[0] >= wanted[0]
    if not (found.shape == wanted or padded or layers):
        raise UserError(
            f"{folder} holds {name} as {list(found.shape)}, where the model its arguments describe has {list(wanted)}"
        )


def _pieces(link: Link, found: Stored) -> Iterator[StoredPiece]:
    for piece in found.pieces:
        common = link.shared_with_theirs(piece.start, piece.size)
        if common is None:
            continue
        start, size = common
        at, seen = link.our_rectangle(start, size)
        first = piece.within or (0,) * len(piece.start)
        inside = tuple(i - j + k for i, j, k in zip(start, piece.start, first))
        yield StoredPiece(piece.file, rectangle_key(piece.place, inside, size, seen), at, seen)


def _refuse_left_over(contents: Contents, prefix: str, links: Mapping[str, list[Link]]) -> None:
    """Weights that no tensor of ours takes would be lost in silence."""
    known = {link.theirs for of_tensor in links.values() for link in of_tensor}
    known |= {second_name(name) for name in known}
    left = [
        name
        for name in contents.tensors
        if name.startswith(prefix)
        and not name.startswith(("optimizer.", "rng", "rerun"))
        and name not in known
    ]
    tied = f"{prefix}output_layer.weight"
    left = [name for name in left if name != tied or "head.weight" in links]
    if left:
        raise UserError(
            f"{contents.folder} holds {len(left)} tensors that the model its arguments describe does not have, the first being {left[0]}"
        )
