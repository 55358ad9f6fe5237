"""The names of our tensors in Hugging Face files: a table for each family, for both directions."""

from collections.abc import Collection
from dataclasses import dataclass

from pentatron.checkpoint.links import Link, NameTable, Row, Source, links_by_table
from pentatron.config.model import MoEConfig, TransformerConfig
from pentatron.models.shapes import logical_shapes

_UNKNOWN = "this family of models has no tensor like {ours}; choose another family"


@dataclass(frozen=True)
class FamilyNames:
    """A table, and what else a file of the family may contain.

    `base`: the prefix that files of the bare model leave out. `tied_copy`: the name of the output layer, under which a tied model
    may have the `embedding` once more. `ignored`: patterns of buffers that a model computes for itself.
    """

    table: NameTable
    base: str
    embedding: str
    tied_copy: str
    ignored: tuple[str, ...]


def _row(ours: str, *sources: Source) -> Row:
    return Row(ours, (sources,))


def _same(ours: str, theirs: str, transposed: bool = False) -> Row:
    return _row(ours, Source(theirs, transposed=transposed))


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


def _gated(ours: str, theirs: str) -> tuple[Row, ...]:
    """An MLP whose gate and up projection are one matrix here."""
    return (
        _row(
            f"{ours}.linear_fc1.{{kind}}",
            Source(f"{theirs}.gate_proj.{{kind}}", "first half"),
            Source(f"{theirs}.up_proj.{{kind}}", "second half"),
        ),
        _same(f"{ours}.linear_fc2.{{kind}}", f"{theirs}.down_proj.{{kind}}"),
    )


def _experts(router: str, each: tuple[str, str, str]) -> tuple[Row, ...]:
    """Experts one by one, as files hold them, or all in one tensor, as transformers 5 has them in memory."""
    gate, up, down = each
    experts = "{base}layers.{layer}.mlp.experts"
    return (
        Row(
            "layers.{layer}.mlp.router.weight",
            ((Source(router),), (Source("{base}layers.{layer}.mlp.gate.weight"),)),
        ),
        Row(
            "layers.{layer}.mlp.experts.linear_fc1.weight",
            (
                (Source(gate, "first half"), Source(up, "second half")),
                (Source(f"{experts}.gate_up_proj"),),
            ),
        ),
        Row(
            "layers.{layer}.mlp.experts.linear_fc2.weight",
            ((Source(down),), (Source(f"{experts}.down_proj"),)),
        ),
    )


_ROTARY = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"(model\.)?rotary_emb\.inv_freq")
_MLP = "{base}layers.{layer}.mlp"
_MIXTRAL = "{base}layers.{layer}.block_sparse_moe"


def _llama(*mlp: Row) -> FamilyNames:
    return FamilyNames(NameTable((*_LLAMA, *mlp), _UNKNOWN), "model.", _EMBEDDING, _HEAD, _ROTARY)


_DENSE = _llama(*_gated("layers.{layer}.mlp", _MLP))

_MIXTRAL_EXPERTS = _experts(
    f"{_MIXTRAL}.gate.weight",
    (
        f"{_MIXTRAL}.experts.{{expert}}.w1.weight",
        f"{_MIXTRAL}.experts.{{expert}}.w3.weight",
        f"{_MIXTRAL}.experts.{{expert}}.w2.weight",
    ),
)

_QWEN_EXPERTS = (
    *_gated("layers.{layer}.mlp", _MLP),
    *_experts(
        f"{_MLP}.gate.weight",
        (
            f"{_MLP}.experts.{{expert}}.gate_proj.weight",
            f"{_MLP}.experts.{{expert}}.up_proj.weight",
            f"{_MLP}.experts.{{expert}}.down_proj.weight",
        ),
    ),
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
_GPT2 = FamilyNames(
    NameTable(_GPT2_ROWS, _UNKNOWN),
    "transformer.",
    "{base}wte.weight",
    _HEAD,
    (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
)

NAME_TABLES: dict[str, FamilyNames] = {
    "gpt2": _GPT2,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _DENSE),
    "mixtral": _llama(*_MIXTRAL_EXPERTS),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _llama(*_QWEN_EXPERTS)),
}


def links_of(
    model_type: str, model: TransformerConfig, moe: MoEConfig, names: Collection[str] | None = None
) -> list[Link]:
    """The links of all tensors of a model, in its own order.

    `names` are the keys of a file, which may have one of several forms; without them it is the form to be written.
    """
    known = NAME_TABLES[model_type]
    bare = names is not None and not any(name.startswith(known.base) for name in names)
    shapes = logical_shapes(model, moe)
    return links_by_table(known.table, model, shapes, names, "" if bare else known.base)
