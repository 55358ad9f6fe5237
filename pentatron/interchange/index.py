"""Contents of a Megatron-LM checkpoint, in either of its formats, as a manifest of our own format.

The tables of names and the links give the position of our tensors in its files. The manifest makes loading in
any layout, export and comparison work as for our own checkpoints.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pentatron.checkpoint.format import Manifest, StoredPiece, TensorRecord, cover_problem
from pentatron.checkpoint.links import Link, NameTable, Source, TableRow, by_ours, their_shapes
from pentatron.checkpoint.load import ROUTERS, WEIGHTS
from pentatron.checkpoint.tensor_file import DTYPES
from pentatron.checkpoint.torch_file import rectangle_key
from pentatron.errors import UserError
from pentatron.models.causal_lm import logical_shapes
from pentatron.parallel.sharding import Shape
from pentatron.settings.model import MoEConfig, TransformerConfig, moe_layers

# --- tables of tensor names ---
#
# Megatron-LM groups queries, keys and values, puts gate before up, and stacks experts as we do. Names differ,
# and a layer axis may come first. Some files store gate and up separately, or each expert.


# Tensors whose rows are padded beyond the vocabulary.
VOCABULARY = ("embedding.word.weight", "head.weight")
_UNKNOWN = "Megatron-LM has no tensor like {ours}, so this model cannot be exchanged with it; leave out --ckpt-format"
_EXPERTS = "mlp.experts.experts."
# Name of the norm before an MLP in dense layers, and in MoE layers.
_NORM, _NORM_OF_EXPERTS = "mlp.linear_fc1.layer_norm_{kind}", "pre_mlp_layernorm.{kind}"


# Tensors outside the layers, and theirs.
_OUTSIDE_LAYERS = {
    "embedding.word.weight": "embedding.word_embeddings.weight",
    "embedding.position.weight": "embedding.position_embeddings.weight",
    "final_norm.{kind}": "decoder.final_layernorm.{kind}",
    "head.weight": "output_layer.weight",
}


def _rows(stacked: Sequence[bool]) -> Iterator[TableRow]:
    """Rows of the table.

    `stacked`: the layer formats in order of precedence: all in one tensor, or one per layer.
    """

    def row(ours: str, *theirs: str, halves: bool = False, experts: bool = False) -> TableRow:
        forms = (form for name in theirs for form in _forms(name, stacked, halves, experts))
        return TableRow(f"layers.{{layer}}.{ours}", tuple(forms))

    for ours, theirs in _OUTSIDE_LAYERS.items():
        yield TableRow(ours, ((Source(f"{{base}}{theirs}"),),))
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
    """Yields the forms of a tensor in a layer.

    Whole, or gate and up separate (`_w`, `_v`); both also for each expert.
    """
    for is_stacked in stacked:
        name = f"{{base}}decoder.layers.{'' if is_stacked else '{layer}.'}{theirs}"
        per_expert = name.replace(_EXPERTS, f"{_EXPERTS}{{expert}}.")
        for tensor in (name, per_expert) if experts else (name,):
            yield (Source(tensor, stacked=is_stacked),)
            if halves:
                gate = Source(f"{tensor}_w", "first half", stacked=is_stacked)
                yield gate, Source(f"{tensor}_v", "second half", stacked=is_stacked)


# By whether all layers are written in one tensor. Both formats are read.
TABLES = {stacked: NameTable(tuple(_rows((stacked, not stacked))), _UNKNOWN) for stacked in (True, False)}


def moe_norm_name(theirs: str) -> str:
    """Name of the same norm in a MoE layer, under which a file may store it again."""
    first, second = (name.removesuffix("{kind}") for name in (_NORM, _NORM_OF_EXPERTS))
    return theirs.replace(first, second)


def tensors_of(model: TransformerConfig, moe: MoEConfig) -> dict[str, Shape]:
    """Returns the shapes of a model's tensors.

    Includes the expert biases of routers, which are not parameters.
    """
    shapes = dict(logical_shapes(model, moe))
    if moe.moe_router_enable_expert_bias and moe.num_experts:
        for name in [name for name in shapes if name.endswith(".mlp.router.weight")]:
            shapes[name.removesuffix("weight") + "bias"] = (moe.num_experts,)
    return shapes


def is_stacked(model: TransformerConfig, moe: MoEConfig) -> bool:
    """Whether Megatron-LM writes all layers in one tensor: if all are alike."""
    return not moe.num_experts or all(moe_layers(moe.moe_layer_freq, model.num_layers))


def written_links(model: TransformerConfig, moe: MoEConfig) -> dict[str, list[Link]]:
    """Returns the links of each of our tensors to all names it is written under."""
    stacked, shapes = is_stacked(model, moe), tensors_of(model, moe)
    links = TABLES[stacked].links(model, shapes)
    # A row has one name. The norm of a MoE layer is written under both.
    second_links = [
        replace(link, theirs=moe_norm_name(link.theirs))
        for link in links
        if f"{link.ours.partition('mlp_norm.')[0]}mlp.router.weight" in shapes
    ]
    return by_ours([*links, *second_links])


def read_links(
    model: TransformerConfig, moe: MoEConfig, names: Collection[str], prefix: str = ""
) -> dict[str, list[Link]]:
    """Returns the links of each of our tensors to those in a file, whose names start with `prefix`."""
    return by_ours(TABLES[True].links(model, tensors_of(model, moe), names, prefix))


def written_shapes(links: Mapping[str, Sequence[Link]], layers: int, vocabulary: int) -> dict[str, Shape]:
    """Returns the shapes of all written tensors: with all layers, and with padding of the vocabulary."""
    all_links = [link for of_tensor in links.values() for link in of_tensor]
    shapes = their_shapes(all_links)
    for link in all_links:
        _, *rest = shapes[link.theirs]
        if link.stacked:
            shapes[link.theirs] = (layers, *rest)
        elif link.ours in VOCABULARY:
            shapes[link.theirs] = (vocabulary, *rest)
    return shapes


# Extra states of Transformer Engine modules. Empty without fp8, but Megatron-LM's loader requires them.
EXTRA_STATE = "_extra_state"
EXTRA_IN_LAYERS = (
    "self_attention.linear_qkv self_attention.linear_proj self_attention.core_attention self_attention.q_layernorm "
    "self_attention.k_layernorm input_layernorm pre_mlp_layernorm mlp.linear_fc1 mlp.linear_fc2 "
    "mlp.shared_experts.linear_fc1 mlp.shared_experts.linear_fc2"
).split()
EXTRA_OF_EXPERTS = (f"{_EXPERTS}linear_fc1", f"{_EXPERTS}linear_fc2")
EXTRA_OUTSIDE = ("decoder.final_layernorm",)


# Prefixes of optimizer state and of master weights, before the tensor's name.
STATE_PREFIX = "optimizer.state."
MASTER_PREFIX = f"{STATE_PREFIX}fp32_param."
# Optimizer states of Adam and of SGD with momentum, which both formats name alike.
OPTIMIZER_STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")
# Prefixes that programs based on Megatron-LM put before every name.
_PREFIXES = ("", "model.", "module.", "model.module.")
_ANCHOR = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class StoredRectangle:
    """A stored rectangle of a tensor of theirs.

    `place`: position in the file for `torch_file`. `within`: start of the rectangle in the tensor stored
    there.
    """

    start: Shape
    size: Shape
    file: str
    place: str
    within: Shape | None = None


@dataclass(frozen=True)
class MegatronTensor:
    """A tensor of theirs."""

    dtype: str
    shape: Shape
    pieces: tuple[StoredRectangle, ...]


@dataclass(frozen=True)
class MegatronCheckpoint:
    """Contents of a Megatron-LM checkpoint. `remarks` are messages for the user."""

    folder: Path
    iteration: int
    tensors: Mapping[str, MegatronTensor]
    arguments: Mapping[str, Any]
    common: Mapping[str, Any]
    remarks: tuple[str, ...] = ()


def find_name_prefix(names: Collection[str], folder: Path) -> str:
    """Returns the prefix of all model tensors."""
    for prefix in _PREFIXES:
        if f"{prefix}{_ANCHOR}" in names:
            return prefix
    raise UserError(
        f"{folder} contains no language model of Megatron-LM: there is no {_ANCHOR} among its {len(names)} tensors"
    )


def without_unreadable_optimizer(contents: MegatronCheckpoint, others: list[str]) -> MegatronCheckpoint:
    """Removes optimizer state whose sharding only the saving layout can read, and adds a message."""
    prefix = find_name_prefix(contents.tensors, contents.folder)
    anchor = f"{prefix}{_ANCHOR}"
    # State that is readable in any layout has the shapes of the weights.
    states = [contents.tensors.get(f"{STATE_PREFIX}{state}.{anchor}") for state in OPTIMIZER_STATES]
    readable = any(s is not None and s.shape == contents.tensors[anchor].shape for s in states)
    has_state = any(name.startswith(("optimizer.", "chained_")) for name in (*contents.tensors, *others))
    if readable or not has_state:
        return contents
    tensors = {name: stored for name, stored in contents.tensors.items() if not name.startswith("optimizer.")}
    remark = (
        f"{contents.folder} has its optimizer state in the order of the layout that saved it, so only the weights are read (Megatron-LM "
        f"writes it for any layout with --dist-ckpt-optim-fully-reshardable)"
    )
    return replace(contents, tensors=tensors, remarks=(remark,))


def manifest_of(
    contents: MegatronCheckpoint,
    model: TransformerConfig,
    moe: MoEConfig,
    run_state: Mapping[str, Any],
    config: Mapping[str, Any],
) -> Manifest:
    """Returns the manifest of the checkpoint in our format.

    It lists the tensors of this model and the position of their elements.
    """
    stored = contents.tensors
    prefix = find_name_prefix(stored, contents.folder)
    links = read_links(model, moe, stored, prefix)
    # Expert biases of routers are updated from token counts, and stored separately from weights.
    biases = {ours: of_tensor for ours, of_tensor in links.items() if ours.endswith(".mlp.router.bias")}
    parameters = {ours: of_tensor for ours, of_tensor in links.items() if ours not in biases}

    def has_all(name_prefix: str) -> bool:
        return all(f"{name_prefix}{link.theirs}" in stored for group in parameters.values() for link in group)

    groups = [(ROUTERS, biases, ""), (WEIGHTS, parameters, MASTER_PREFIX if has_all(MASTER_PREFIX) else "")]
    states = {state: f"{STATE_PREFIX}{state}." for state in OPTIMIZER_STATES}
    groups += [(f"{state}/", parameters, theirs) for state, theirs in states.items() if has_all(theirs)]
    tensors = {
        f"{kind}{ours}": _record(contents, ours, of_tensor, name_prefix)
        for kind, members, name_prefix in groups
        for ours, of_tensor in members.items()
    }
    _refuse_left_over(contents, prefix, links)
    return Manifest(contents.iteration, {}, dict(sorted(tensors.items())), dict(run_state), dict(config))


def _record(contents: MegatronCheckpoint, ours: str, links: Iterable[Link], name_prefix: str) -> TensorRecord:
    """Returns the record of one of our tensors."""
    pieces: list[StoredPiece] = []
    dtypes: set[str] = set()
    shape: Shape = ()
    for link in links:
        name = f"{name_prefix}{link.theirs}"
        if (stored := contents.tensors.get(name)) is None:
            raise UserError(
                f"{contents.folder} lacks {name}, so it is not the model that its arguments describe; name another checkpoint"
            )
        expected = tuple(i + n for i, n in zip(link.start, link.their_size))
        # The vocabulary may be padded. The link of one layer requires as many stacked layers as its own
        # index.
        may_be_longer = link.ours in VOCABULARY or link.stacked
        is_longer = stored.shape[1:] == expected[1:] and stored.shape[0] >= expected[0]
        if stored.shape != expected and not (may_be_longer and is_longer):
            raise UserError(
                f"{contents.folder} contains {name} as {list(stored.shape)}, but the model its arguments describe has {list(expected)}"
            )
        dtypes.add(stored.dtype)
        pieces += _pieces(link, stored)
        end = tuple(i + n for i, n in zip(link.at, link.size))
        shape = tuple(map(max, shape, end)) if shape else end
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        raise UserError(f"{contents.folder} has {ours} as {'/'.join(sorted(dtypes))}, which cannot be read")
    if (problem := cover_problem(shape, ((piece.start, piece.shape) for piece in pieces))) is not None:
        raise UserError(f"{contents.folder} lacks a part of {name_prefix}{ours}: {problem}")
    return TensorRecord(dtypes.pop(), shape, tuple(sorted(pieces, key=lambda piece: piece.start)))


def _pieces(link: Link, stored: MegatronTensor) -> Iterator[StoredPiece]:
    """Yields the pieces of our tensor along a link."""
    for piece in stored.pieces:
        if (common := link.shared_with_theirs(piece.start, piece.size)) is None:
            continue
        start, size = common
        at, shape = link.our_rectangle(start, size)
        origin = piece.within or (0,) * len(piece.start)
        inside = tuple(i - j + k for i, j, k in zip(start, piece.start, origin))
        yield StoredPiece(piece.file, rectangle_key(piece.place, inside, size, shape), at, shape)


def _refuse_left_over(contents: MegatronCheckpoint, prefix: str, links: Mapping[str, list[Link]]) -> None:
    """Raises UserError for weights that no tensor of ours reads, as they would be lost silently."""
    used = {link.theirs for of_tensor in links.values() for link in of_tensor}
    used |= {moe_norm_name(name) for name in used}
    if "head.weight" not in links:
        # Tied embeddings: the file may store the shared weight again.
        used.add(f"{prefix}output_layer.weight")
    others = ("optimizer.", "rng", "rerun")
    weights = [n for n in contents.tensors if n.startswith(prefix) and not n.startswith(others)]
    if unused := [name for name in weights if name not in used]:
        raise UserError(
            f"{contents.folder} contains {len(unused)} tensors that the model its arguments describe does not have, the first being {unused[0]}"
        )
