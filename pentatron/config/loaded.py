"""The architecture belongs to what is loaded: what was not said comes from there, what was said must agree with it."""

from collections.abc import Mapping
from typing import Any

from pentatron.config.draft import Draft, Facts
from pentatron.config.flags import Assigned
from pentatron.config.moe_layers import moe_layers
from pentatron.config.notices import IDLE
from pentatron.config.resolve import foreseen
from pentatron.config.run import table
from pentatron.config.windows import window_of

# Begins the origin of every setting that was taken from what is loaded.
LOADED = "loaded from "
# They are among the settings of the architecture but leave no trace in weights: a run chooses them anew.
FREE = frozenset(
    {
        "seq_length",
        "padded_vocab_size",
        "make_vocab_size_divisible_by",
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
        "moe_router_dtype",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_z_loss_coeff",
        "moe_router_bias_update_rate",
        "moe_token_dispatcher_type",
        "moe_grouped_gemm",
        "moe_use_legacy_grouped_gemm",
        "moe_expert_capacity_factor",
        "moe_token_drop_policy",
        "moe_per_layer_logging",
    }
)
# Other words for what further settings say.
_SAID_TWICE = frozenset({"group_query_attention", "rotary_seq_len_interpolation_factor"})
# Where they are left open they follow from others.
_FOLLOW = frozenset(
    {
        "ffn_hidden_size",
        "num_attention_heads",
        "kv_channels",
        "num_query_groups",
        "max_position_embeddings",
        "vocab_size",
        "moe_ffn_hidden_size",
    }
)
# Told also where they happen to be the defaults: a reader looks for them first.
_SHAPE = frozenset({"num_layers", "hidden_size"})
_POSITIONS = "max_position_embeddings"
# Each of these says something only with the other.
_WINDOWS = ("window_size", "window_attn_skip_freq")
_MSCALES = ("yarn_mscale", "yarn_mscale_all_dim")
# Names a function to be run, so it is never taken from a file: only the user can give it.
_CODE = "spec"


def architecture(found: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting of the architecture: as found, or its default where what was saved is older than the setting."""
    names = [name for name, item in table().items() if item.section in ("model", "moe") and name not in FREE]
    if _CODE not in found:
        # Who has no layers of their own says nothing about them; weights may be tried in others.
        names.remove(_CODE)
    values = {name: found.get(name, table()[name].default) for name in names}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def differences(loaded: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """The names of the settings by which the two are different models; both have every setting of an architecture."""
    return [name for name in loaded if _differ(name, loaded, values)]


def _differ(name: str, loaded: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    before, now = loaded[name], values[name]
    if before == now or name in _SAID_TWICE or (before is None and name in _FOLLOW):
        return False
    if name == _POSITIONS and loaded["position_embedding_type"] != "learned_absolute":
        # Positions that are not learned leave no trace: such a model may go on with longer sequences.
        return False
    if name == "moe_layer_freq" and _layers(loaded) == _layers({**loaded, name: now}):
        return False
    if name == "ffn_hidden_size" and loaded["num_experts"] and all(_layers(loaded)):
        # Every layer has experts, which have a width of their own.
        return False
    if name in _WINDOWS:
        # Not whether they act at this length of sequences: the model is saved with them, and may go on with longer ones.
        return _windows(loaded) != _windows({**loaded, **{n: values[n] for n in _WINDOWS}})
    if name in _MSCALES:
        either = ({**values, **loaded}, {**values, **loaded, **{n: values[n] for n in _MSCALES}})
        return not all(_is_idle(name, one) for one in either)
    both = [{**values, **loaded, name: value} for value in (before, now)]
    return not any(_is_idle(name, one) for one in both)


def _layers(values: Mapping[str, Any]) -> tuple[bool, ...]:
    try:
        return moe_layers(values["moe_layer_freq"], values["num_layers"])
    except ValueError:
        return (False,)


def _windows(values: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Of every layer; what cannot be read is like nothing else, and complained of elsewhere."""
    window, skip, count = (values[name] for name in (*_WINDOWS, "num_layers"))
    try:
        return tuple(window_of(window, skip, count, number) for number in range(1, count + 1))
    except ValueError:
        return ()


def _is_idle(name: str, values: Mapping[str, Any]) -> bool:
    """Whether the setting has nothing to act on, as rotary frequencies where positions are learned."""
    defaults = {n: Assigned(item.default, "default") for n, item in table().items()}
    draft = Draft({**defaults, **{n: Assigned(value, "") for n, value in values.items()}})
    return name in IDLE and bool(IDLE[name](draft, Facts(1)))


def adopt(draft: Draft, facts: Facts, found: Mapping[str, Any], origin: str, way_out: str) -> None:
    """Gives the draft the architecture of what is loaded; what contradicts it is wrong, with both values and `way_out`."""
    loaded = architecture(found)
    before = foreseen(draft, facts)
    _too_many_ids(draft, loaded, origin)
    open_names = [name for name in loaded if name != _CODE and not _is_said(draft, name)]
    if _longer_than_made_for(draft, loaded):
        open_names.remove(_POSITIONS)
        draft.notices.append(
            f"sequences of {draft['seq_length']} tokens are longer than the {loaded[_POSITIONS]} positions {origin} was made "
            f"for"
        )
    if _longer_than_learned(draft, loaded):
        draft.wrong["seq_length"] = (
            f"--seq-length {draft['seq_length']} is longer than the {loaded[_POSITIONS]} positions that {origin} has learned; give a "
            f"shorter one, {way_out}"
        )
    different = differences(loaded, before)
    if loaded[_POSITIONS] not in (None, before[_POSITIONS]):
        different.append(_POSITIONS)
    if learned := [name for name in open_names if name in different]:
        for name in open_names:
            draft.values[name] = Assigned(loaded[name], f"{LOADED}{origin}")
        shown = [name for name in open_names if name in learned or name in _SHAPE]
        draft.notices.append(f"architecture from {origin}: {' '.join(_written(loaded, n) for n in shown)}")
    after = foreseen(draft, facts)
    for name in differences(loaded, after):
        if name in draft.wrong:
            # Such as a vocabulary whose tokenizer was not found: that is the problem to tell of.
            continue
        if name == _CODE and not _is_said(draft, name):
            draft.wrong[name] = (
                f"{origin} was made with {_written(loaded, name)}; give that again, as code is not taken from files"
            )
            continue
        draft.wrong[name] = (
            f"{origin} holds a model with {_written(loaded, name)}, but {_who(draft, name)} {_written(after, name)}; "
            f"leave that out, {way_out}"
        )


def _is_said(draft: Draft, name: str) -> bool:
    """A preset that was named is said too; one that is merely underneath is not."""
    return draft.given(name) or (draft.given("preset") and draft.source(name).startswith("preset "))


def _longer_than_made_for(draft: Draft, loaded: Mapping[str, Any]) -> bool:
    """Whether sequences are longer than those of the loaded model, which positions that are not learned allow."""
    most = loaded[_POSITIONS]
    free = loaded["position_embedding_type"] != "learned_absolute" and not _is_said(draft, _POSITIONS)
    return free and most is not None and draft["seq_length"] > most


def _longer_than_learned(draft: Draft, loaded: Mapping[str, Any]) -> bool:
    """Learned positions are weights: no setting makes more of them."""
    most = loaded[_POSITIONS]
    learned = loaded["position_embedding_type"] == "learned_absolute" and not _is_said(draft, _POSITIONS)
    return learned and most is not None and draft["seq_length"] > most


def _too_many_ids(draft: Draft, loaded: Mapping[str, Any], origin: str) -> None:
    """A tokenizer may have fewer ids than the embedding has rows, but not more."""
    ids, rows = draft["vocab_size"], loaded["vocab_size"]
    counted = draft.source("vocab_size").startswith("derived: tokenizer ")
    if counted and rows is not None and ids > rows:
        named = draft.source("vocab_size").removeprefix("derived: ")
        draft.wrong["tokenizer_model"] = (
            f"{named} has {ids} ids, the model of {origin} {rows}; use the tokenizer it was made with"
        )


def _who(draft: Draft, name: str) -> str:
    source = draft.source(name)
    if source.startswith("flag"):
        return "the command line says"
    return f"{source} says" if source.startswith(("file", "preset")) else "here it would be"


def _written(values: Mapping[str, Any], name: str) -> str:
    item = table()[name]
    return f"no {item.flag}" if values[name] in (None, ()) else item.written(values[name])
