"""What a checkpoint of Megatron-LM holds: every tensor of theirs with the rectangles it is stored in, whichever kind of file it is.

From that and the links follows a manifest like that of our own checkpoints, so that all that reads those reads these: loading
in any layout, exports, comparisons.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pentatron.checkpoint.format import Manifest, StoredPiece, TensorRecord, cover_problem
from pentatron.checkpoint.links import Link, NameTable, Row, Source, by_ours, links_by_table, their_shapes
from pentatron.checkpoint.load import ROUTERS, WEIGHTS
from pentatron.checkpoint.tensor_file import DTYPES
from pentatron.checkpoint.torch_file import rectangle_key
from pentatron.errors import UserError
from pentatron.models.causal_lm import logical_shapes
from pentatron.parallel.shards import Shape
from pentatron.settings.model import MoEConfig, TransformerConfig, moe_layers

# The names of our tensors in Megatron-LM's checkpoints: tables of links for both directions.
#
# Queries, keys and values by group, gate before up, and all experts in one tensor are as we have them. Names
# differ, and there may be an axis of layers in front; some files have gate and up apart, or each expert.


# The tensors that are padded to more rows than there are words.
VOCABULARY = ("embedding.word.weight", "head.weight")
_UNKNOWN = "Megatron-LM has no tensor like {ours}, so this model cannot be exchanged with it; leave out --ckpt-format"
_EXPERTS = "mlp.experts.experts."
# Layers with experts look for their norm under the second name, others under the first.
_NORM, _NORM_OF_EXPERTS = "mlp.linear_fc1.layer_norm_{kind}", "pre_mlp_layernorm.{kind}"


def _outside(ours: str, theirs: str) -> Row:
    return Row(ours, ((Source(f"{{base}}{theirs}"),),))


def _rows(stacked: Sequence[bool]) -> Iterator[Row]:
    """The table, with the two ways to store layers in this order: all in one tensor, or each by itself."""

    def row(ours: str, *theirs: str, halves: bool = False, experts: bool = False) -> Row:
        forms = (form for name in theirs for form in _forms(name, stacked, halves, experts))
        return Row(f"layers.{{layer}}.{ours}", tuple(forms))

    yield _outside("embedding.word.weight", "embedding.word_embeddings.weight")
    yield _outside("embedding.position.weight", "embedding.position_embeddings.weight")
    yield _outside("final_norm.{kind}", "decoder.final_layernorm.{kind}")
    yield _outside("head.weight", "output_layer.weight")
    yield row("input_norm.{kind}", "self_attention.linear_qkv.layer_norm_{kind}", "input_layernorm.{kind}")
    yield row("attention.linear_qkv.{kind}", "self_attention.linear_qkv.{kind}")
    yield row("attention.q_norm.{kind}", "self_attention.q_layernorm.{kind}")
    yield row("attention.k_norm.{kind}", "self_attention.k_layernorm.{kind}")
    yield row("attention.linear_proj.{kind}", "self_attention.linear_proj.{kind}")
    yield row("mlp_norm.{kind}", _NORM, _NORM_OF_EXPERTS)
    yield row("mlp.linear_fc1.{kind}", "mlp.linear_fc1.{kind}", halves=True)
    yield row("mlp.linear_fc2.{kind}", "mlp.linear_fc2.{kind}")
    yield row("mlp.router.weight", "mlp.router.weight")
    yield row("mlp.router.bias", "mlp.router.expert_bias")
    yield row("mlp.experts.linear_fc1.weight", f"{_EXPERTS}linear_fc1.weight", halves=True, experts=True)
    yield row("mlp.experts.linear_fc2.weight", f"{_EXPERTS}linear_fc2.weight", experts=True)
    yield row("mlp.shared.mlp.linear_fc1.{kind}", "mlp.shared_experts.linear_fc1.{kind}", halves=True)
    yield row("mlp.shared.mlp.linear_fc2.{kind}", "mlp.shared_experts.linear_fc2.{kind}")
    yield row("mlp.shared.gate.weight", "mlp.shared_experts.gate_weight")


def _forms(theirs: str, stacked: Sequence[bool], halves: bool, experts: bool) -> Iterator[tuple[Source, ...]]:
    """A tensor in a layer: whole, with gate and up apart (`_w`, `_v`), and the same for each expert."""
    for in_one in stacked:
        name = f"{{base}}decoder.layers.{theirs}" if in_one else f"{{base}}decoder.layers.{{layer}}.{theirs}"
        each = name.replace(_EXPERTS, f"{_EXPERTS}{{expert}}.")
        for whole in (name, each) if experts else (name,):
            yield (Source(whole, stacked=in_one),)
            if halves:
                gate = Source(f"{whole}_w", "first half", stacked=in_one)
                yield gate, Source(f"{whole}_v", "second half", stacked=in_one)


# By whether all layers lie in one tensor in what is written; both are read.
TABLES = {stacked: NameTable(tuple(_rows((stacked, not stacked))), _UNKNOWN) for stacked in (True, False)}


def second_name(theirs: str) -> str:
    """The other name of a norm before an MLP, under which a file may have the same values once more."""
    first, second = (name.removesuffix("{kind}") for name in (_NORM, _NORM_OF_EXPERTS))
    return theirs.replace(first, second)


def tensors_of(model: TransformerConfig, moe: MoEConfig) -> dict[str, Shape]:
    """Every tensor of a model of ours, and the bias of each router that has one, which is no parameter."""
    shapes = dict(logical_shapes(model, moe))
    if moe.moe_router_enable_expert_bias and moe.num_experts:
        for name in [name for name in shapes if name.endswith(".mlp.router.weight")]:
            shapes[name.removesuffix("weight") + "bias"] = (moe.num_experts,)
    return shapes


def is_stacked(model: TransformerConfig, moe: MoEConfig) -> bool:
    """Whether Megatron-LM writes all layers in one tensor: it does where they are alike, and no pattern was given."""
    return not moe.num_experts or all(moe_layers(moe.moe_layer_freq, model.num_layers))


def written_links(model: TransformerConfig, moe: MoEConfig) -> dict[str, list[Link]]:
    """For each tensor of ours a link to each name that it is written under."""
    stacked, shapes = is_stacked(model, moe), tensors_of(model, moe)
    links = links_by_table(TABLES[stacked], model, shapes)
    with_experts = {
        name.removesuffix("mlp.router.weight") for name in shapes if name.endswith(".mlp.router.weight")
    }
    # A row names one tensor of theirs; the second holds the same values.
    again = [
        replace(link, theirs=second_name(link.theirs))
        for link in links
        if link.ours.partition("mlp_norm.")[0] in with_experts
    ]
    return by_ours([*links, *again])


def read_links(
    model: TransformerConfig, moe: MoEConfig, names: Collection[str], prefix: str = ""
) -> dict[str, list[Link]]:
    """For each tensor of ours the links to what a file has of it; `prefix` comes before each of its names."""
    return by_ours(links_by_table(TABLES[True], model, tensors_of(model, moe), names, prefix))


def written_shapes(links: Mapping[str, Sequence[Link]], layers: int, vocabulary: int) -> dict[str, Shape]:
    """The size of every tensor that is written: with all layers, and the padding of the vocabulary."""
    found = [link for of_tensor in links.values() for link in of_tensor]
    shapes = their_shapes(found)
    for link in found:
        _, *rest = shapes[link.theirs]
        if link.stacked:
            shapes[link.theirs] = (layers, *rest)
        elif link.ours in VOCABULARY:
            shapes[link.theirs] = (vocabulary, *rest)
    return shapes


# What their layers keep besides tensors: nothing, unless matrices are in fp8, but a loader asks for it. With the number of
# axes in front of it: the layers, and the experts.
EXTRA_STATE = "_extra_state"
EXTRA_IN_LAYERS = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "self_attention.core_attention",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "input_layernorm",
    "pre_mlp_layernorm",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
)
EXTRA_OF_EXPERTS = (f"{_EXPERTS}linear_fc1", f"{_EXPERTS}linear_fc2")
EXTRA_OUTSIDE = ("decoder.final_layernorm",)


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
