"""What the tensors of our models are called in Hugging Face files. Tables, for both directions; `links.py` reads them.

A row is a tensor of ours and the tensors of theirs that make it up. `{layer}` and `{expert}` are numbers, `{kind}` is
`weight` or `bias`, and `{base}` the prefix that files of the bare model leave out. A part says which rows of ours a tensor
of theirs is.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """A tensor of theirs. `transposed`: its matrices are [inputs, outputs]; a bias is the same either way."""

    name: str
    part: str = "all"
    transposed: bool = False


@dataclass(frozen=True)
class Row:
    """A tensor of ours, and what it is made of: the first form is written, each is read."""

    ours: str
    forms: tuple[tuple[Source, ...], ...]


@dataclass(frozen=True)
class NameTable:
    """`rows` name every tensor once; `ignored` are patterns of keys that hold what a model computes for itself."""

    base: str
    rows: tuple[Row, ...]
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

_DENSE = NameTable("model.", (*_LLAMA, *_gated("layers.{layer}.mlp", _MLP)), _EMBEDDING, _HEAD, _ROTARY)

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

_GPT2 = NameTable(
    "transformer.",
    (
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
    ),
    "{base}wte.weight",
    _HEAD,
    (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
)

NAME_TABLES: dict[str, NameTable] = {
    "gpt2": _GPT2,
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _DENSE),
    "mixtral": NameTable("model.", (*_LLAMA, *_MIXTRAL_EXPERTS), _EMBEDDING, _HEAD, _ROTARY),
    **dict.fromkeys(
        ("qwen2_moe", "qwen3_moe"),
        NameTable("model.", (*_LLAMA, *_QWEN_EXPERTS), _EMBEDDING, _HEAD, _ROTARY),
    ),
}
