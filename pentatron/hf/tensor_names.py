"""Tensor names in Hugging Face files, as a table for each family, and loading of their weights."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from pentatron.checkpoint import links
from pentatron.checkpoint.links import Link, NameTable, Source, TableRow
from pentatron.checkpoint.tensor_file import WEIGHT_DTYPES, TensorSpec, blocks, represents_exactly
from pentatron.errors import UserError
from pentatron.hf.folder import HuggingFaceFolder
from pentatron.hf.model_config import model_type_of
from pentatron.models.causal_lm import logical_shapes
from pentatron.parallel.sharding import Fragment
from pentatron.settings.model import MoEConfig, TransformerConfig

_FIRST_PROBLEMS = 5
_UNKNOWN = "this family of models has no tensor like {ours}; choose another family"


@dataclass(frozen=True)
class FamilyNames:
    """The tensor names of a family.

    `base` is the prefix that files of the base model omit. A file may contain a tied `embedding` again, as
    the output layer. `ignored` are patterns of buffers that the model computes.
    """

    table: NameTable
    base: str
    embedding: str
    ignored: tuple[str, ...]


def _row(ours: str, *sources: Source) -> TableRow:
    return TableRow(ours, (sources,))


def _same(ours: str, theirs: str, transposed: bool = False) -> TableRow:
    return _row(ours, Source(theirs, transposed=transposed))


_MLP = "{base}layers.{layer}.mlp"
_EMBEDDING, _HEAD = "{base}embed_tokens.weight", "lm_head.weight"

_LLAMA = (
    _same("embedding.word.weight", _EMBEDDING),
    _same("layers.{layer}.input_norm.{kind}", "{base}layers.{layer}.input_layernorm.{kind}"),
    _row(
        "layers.{layer}.attention.linear_qkv.{kind}",
        Source("{base}layers.{layer}.self_attn.q_proj.{kind}", "queries"),
        Source("{base}layers.{layer}.self_attn.k_proj.{kind}", "keys"),
        Source("{base}layers.{layer}.self_attn.v_proj.{kind}", "values"),
    ),
    _same("layers.{layer}.attention.q_norm.{kind}", "{base}layers.{layer}.self_attn.q_norm.{kind}"),
    _same("layers.{layer}.attention.k_norm.{kind}", "{base}layers.{layer}.self_attn.k_norm.{kind}"),
    _same("layers.{layer}.attention.linear_proj.{kind}", "{base}layers.{layer}.self_attn.o_proj.{kind}"),
    _same("layers.{layer}.mlp_norm.{kind}", "{base}layers.{layer}.post_attention_layernorm.{kind}"),
    _same("final_norm.{kind}", "{base}norm.{kind}"),
    _same("head.weight", _HEAD),
)


def _gated(ours: str, theirs: str) -> tuple[TableRow, ...]:
    """Returns the rows of an MLP whose gate and up projections are one matrix here."""
    return (
        _row(
            f"{ours}.linear_fc1.{{kind}}",
            Source(f"{theirs}.gate_proj.{{kind}}", "first half"),
            Source(f"{theirs}.up_proj.{{kind}}", "second half"),
        ),
        _same(f"{ours}.linear_fc2.{{kind}}", f"{theirs}.down_proj.{{kind}}"),
    )


def _experts(block: str, gate: str, up: str, down: str) -> tuple[TableRow, ...]:
    """Returns the rows of experts, one by one as in files, or stacked as in transformers 5's modules."""
    ours, each, stacked = "layers.{layer}.mlp", f"{block}.experts.{{expert}}", f"{_MLP}.experts"
    halves = Source(f"{each}.{gate}.weight", "first half"), Source(f"{each}.{up}.weight", "second half")
    routers = (Source(f"{block}.gate.weight"),), (Source(f"{_MLP}.gate.weight"),)
    downs = (Source(f"{each}.{down}.weight"),), (Source(f"{stacked}.down_proj"),)
    return (
        TableRow(f"{ours}.router.weight", routers),
        TableRow(f"{ours}.experts.linear_fc1.weight", (halves, (Source(f"{stacked}.gate_up_proj"),))),
        TableRow(f"{ours}.experts.linear_fc2.weight", downs),
    )


_ROTARY = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"(model\.)?rotary_emb\.inv_freq")


def _llama(*mlp: TableRow) -> FamilyNames:
    return FamilyNames(NameTable((*_LLAMA, *mlp), _UNKNOWN), "model.", _EMBEDDING, _ROTARY)


_DENSE = _llama(*_gated("layers.{layer}.mlp", _MLP))

_QWEN_EXPERTS = (
    *_gated("layers.{layer}.mlp", _MLP),
    *_experts(_MLP, "gate_proj", "up_proj", "down_proj"),
    *_gated("layers.{layer}.mlp.shared.mlp", f"{_MLP}.shared_expert"),
    _same("layers.{layer}.mlp.shared.gate.weight", f"{_MLP}.shared_expert_gate.weight"),
)

_GPT2_ROWS = (
    _same("embedding.word.weight", "{base}wte.weight"),
    _same("embedding.position.weight", "{base}wpe.weight"),
    _same("layers.{layer}.input_norm.{kind}", "{base}h.{layer}.ln_1.{kind}"),
    _row(
        "layers.{layer}.attention.linear_qkv.{kind}",
        Source("{base}h.{layer}.attn.c_attn.{kind}", "queries, keys, values", transposed=True),
    ),
    _same("layers.{layer}.attention.linear_proj.{kind}", "{base}h.{layer}.attn.c_proj.{kind}", True),
    _same("layers.{layer}.mlp_norm.{kind}", "{base}h.{layer}.ln_2.{kind}"),
    _same("layers.{layer}.mlp.linear_fc1.{kind}", "{base}h.{layer}.mlp.c_fc.{kind}", True),
    _same("layers.{layer}.mlp.linear_fc2.{kind}", "{base}h.{layer}.mlp.c_proj.{kind}", True),
    _same("final_norm.{kind}", "{base}ln_f.{kind}"),
    _same("head.weight", _HEAD),
)
_MASKS = (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",)
_GPT2 = FamilyNames(NameTable(_GPT2_ROWS, _UNKNOWN), "transformer.", "{base}wte.weight", _MASKS)

NAME_TABLES: dict[str, FamilyNames] = {
    "gpt2": _GPT2,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _DENSE),
    "mixtral": _llama(*_experts("{base}layers.{layer}.block_sparse_moe", "w1", "w3", "w2")),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _llama(*_QWEN_EXPERTS)),
}


def tensor_links(
    model_type: str, model: TransformerConfig, moe: MoEConfig, names: Collection[str] | None = None
) -> list[Link]:
    """Returns the links of all tensors of a model, in the order of the model.

    `names` are the keys of a file, which select one of several formats; None selects the format to write.
    """
    known = NAME_TABLES[model_type]
    bare = names is not None and not any(name.startswith(known.base) for name in names)
    return known.table.links(model, logical_shapes(model, moe), names, "" if bare else known.base)


def load_weights(
    folder: HuggingFaceFolder,
    model: TransformerConfig,
    moe: MoEConfig,
    targets: Iterable[Fragment],
    allow_narrowing: bool = False,
) -> None:
    """Copies the weights of a folder into the target fragments, reading only the parts that they need.

    A dtype that cannot represent the stored values raises UserError unless `allow_narrowing`. The whole
    folder is checked first, so that no target is modified if it does not fit.
    """
    model_type = model_type_of(folder.config)
    linked = tensor_links(model_type, model, moe, folder.tensors)
    require_matching_tensors(linked, folder, model_type)
    stored = {
        ours: {link.theirs: WEIGHT_DTYPES[folder.tensors[link.theirs].dtype] for link in group}
        for ours, group in links.by_ours(linked).items()
    }
    targets = list(targets)
    for target in targets:
        if target.tensor not in stored:
            raise UserError(
                f"this model has {target.tensor}, which no {model_type} model has, so {folder.path} cannot fill it; use the family's "
                f"own layers, or start from other weights"
            )
        for theirs, dtype in stored[target.tensor].items():
            if not allow_narrowing and not represents_exactly(target.values.dtype, dtype):
                names = [str(kind).removeprefix("torch.") for kind in (dtype, target.values.dtype)]
                raise UserError(
                    f"{folder.path} holds {theirs} as {names[0]}, and {names[1]} cannot hold all of its values; to have them rounded, "
                    f"import the folder first (pentatron import {folder.path} OUT --dtype fp32 --allow-narrowing) and load OUT"
                )
    # Read in a dtype that holds all stored values; the copy to the target rounds them.
    outlines = {ours: TensorSpec(links.common_dtype(dtypes.values()), ()) for ours, dtypes in stored.items()}
    read = links.reads_ours(linked, folder.read, outlines)
    with torch.no_grad():
        for target in targets:
            links.fill(target, read)


def require_matching_tensors(linked: Collection[Link], folder: HuggingFaceFolder, model_type: str) -> None:
    """Raises UserError unless the folder has exactly the expected tensors."""
    family, shapes = NAME_TABLES[model_type], links.their_shapes(linked)
    problems = []
    for name, shape in shapes.items():
        if (stored := folder.tensors.get(name)) is None:
            hint = " (set tie_word_embeddings to true if it is the embedding)"
            problems.append(f"{name} is missing{hint if name == _HEAD else ''}")
        elif stored.shape != shape:
            problems.append(f"{name} is {list(stored.shape)}, not {list(shape)}")
        elif stored.dtype not in WEIGHT_DTYPES:
            problems.append(f"{name} is of type {stored.dtype}, not one of {', '.join(WEIGHT_DTYPES)}")
    for name in folder.tensors:
        if name in shapes or any(re.fullmatch(pattern, name) for pattern in family.ignored):
            continue
        if name == _HEAD:
            problems += _tied_copy_problem(folder, family)
        else:
            problems.append(f"{name} has no place in this model")
    if problems:
        more = len(problems) - _FIRST_PROBLEMS
        listed = "; ".join(problems[:_FIRST_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
        count = "" if len(problems) == 1 else f" ({len(problems)} problems)"
        raise UserError(f"the weights in {folder.path} do not fit its config.json{count}: {listed}")


def _tied_copy_problem(folder: HuggingFaceFolder, family: FamilyNames) -> list[str]:
    """Returns a problem if a stored output layer of a tied model differs from the embedding."""
    names = {family.embedding.format(base=base) for base in (family.base, "")}
    embedding = next((name for name in names if name in folder.tensors), None)
    if embedding is None:
        return []
    head, other = folder.tensors[_HEAD], folder.tensors[embedding]
    alike = head.shape == other.shape and head.dtype == other.dtype and head.dtype in WEIGHT_DTYPES
    if alike and all(
        torch.equal(folder.read(_HEAD, *block), folder.read(embedding, *block))
        for block in blocks(head.shape, WEIGHT_DTYPES[head.dtype].itemsize)
    ):
        return []
    return [
        f"{_HEAD} differs from {embedding}, but config.json says tie_word_embeddings, so one of them is wrong (set "
        f"tie_word_embeddings to false if the model has both)"
    ]
