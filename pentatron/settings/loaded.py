"""The architecture belongs to what is loaded: what was not said comes from there, what was said must agree with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pentatron.settings.declaration import first_unmet
from pentatron.settings.layers import window_of
from pentatron.settings.model import moe_layers
from pentatron.settings.resolve import foreseen
from pentatron.settings.run import table
from pentatron.settings.settings import Draft, Facts, Settings

# Begins the origin of every setting that was taken from what is loaded.
LOADED = "loaded from "
# They are among the settings of the architecture but leave no trace in weights: a run chooses them anew.
NOT_IN_WEIGHTS = frozenset(name for name, item in table().items() if not item.in_weights)
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


@dataclass(frozen=True)
class Architecture:
    """The architecture of what is loaded. `names`: the settings that it fixes; all others have their defaults."""

    settings: Settings
    names: tuple[str, ...]

    def over(self, now: Settings) -> Settings:
        """Other settings with this architecture."""
        return now.changed(**{name: getattr(self.settings, name) for name in self.names})


def architecture(found: Mapping[str, Any]) -> Architecture:
    """Every setting of the architecture: as found, or its default where what was saved is older than the setting."""
    names = [name for name, item in table().items() if item.section in ("model", "moe") and item.in_weights]
    if _CODE not in found:
        # Without layers of its own a model says nothing about them; weights may be tried in others.
        names.remove(_CODE)
    values = {name: found[name] for name in names if name in found}
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Architecture(Settings.defaults(**plain), tuple(names))


def differences(loaded: Architecture, now: Settings) -> list[str]:
    """The names of the settings by which the two are different models."""
    return [name for name in loaded.names if _differ(name, loaded, now)]


def _differ(name: str, architecture: Architecture, now: Settings) -> bool:
    loaded = architecture.settings
    before, after = getattr(loaded, name), getattr(now, name)
    if before == after or name in _SAID_TWICE or (before is None and name in _FOLLOW):
        return False
    if name == _POSITIONS and loaded.position_embedding_type != "learned_absolute":
        # Positions that are not learned leave no trace: such a model may go on with longer sequences.
        return False
    if name == "moe_layer_freq" and _layers(loaded) == _layers(loaded.changed(moe_layer_freq=after)):
        return False
    if name == "ffn_hidden_size" and loaded.num_experts and all(_layers(loaded)):
        # Every layer has experts, which have a width of their own.
        return False
    if name in _WINDOWS:
        # Whether they act at this sequence length does not matter: the model may go on with longer sequences.
        windows = {n: getattr(now, n) for n in _WINDOWS}
        return _windows(loaded) != _windows(loaded.changed(**windows))
    merged = architecture.over(now)
    if name in _MSCALES:
        mscales = {n: getattr(now, n) for n in _MSCALES}
        return not (_is_idle(name, merged) and _is_idle(name, merged.changed(**mscales)))
    return not any(_is_idle(name, merged.changed(**{name: value})) for value in (before, after))


def _layers(s: Settings) -> tuple[bool, ...]:
    try:
        return moe_layers(s.moe_layer_freq, s.num_layers)
    except ValueError:
        return (False,)


def _windows(s: Settings) -> tuple[int | None, ...]:
    """The window of every layer. A pattern that cannot be read equals no other; a rule reports it."""
    try:
        return tuple(
            window_of(s.window_size, s.window_attn_skip_freq, s.num_layers, number)
            for number in range(1, s.num_layers + 1)
        )
    except ValueError:
        return ()


def _is_idle(name: str, s: Settings) -> bool:
    """Whether the setting has no effect, as rotary frequencies have none where positions are learned."""
    return bool(first_unmet(table()[name].needs, s))


def adopt(draft: Draft, facts: Facts, found: Mapping[str, Any], origin: str, way_out: str) -> None:
    """Gives the draft the architecture of what is loaded; what contradicts it is wrong, with both values and `way_out`."""
    loaded = architecture(found)
    before = foreseen(draft, facts)
    _too_many_ids(draft, loaded, origin)
    open_names = [name for name in loaded.names if name != _CODE and not _is_said(draft, name)]
    if _longer_than_made_for(draft, loaded):
        open_names.remove(_POSITIONS)
        draft.notices.append(
            f"sequences of {draft.seq_length} tokens are longer than the {loaded.settings.max_position_embeddings} positions {origin} was made "
            f"for"
        )
    if _longer_than_learned(draft, loaded):
        draft.wrong["seq_length"] = (
            f"--seq-length {draft.seq_length} is longer than the {loaded.settings.max_position_embeddings} positions that {origin} has learned; give a "
            f"shorter one, {way_out}"
        )
    different = differences(loaded, before)
    if loaded.settings.max_position_embeddings not in (None, before.max_position_embeddings):
        different.append(_POSITIONS)
    if learned := [name for name in open_names if name in different]:
        for name in open_names:
            draft.assign(f"{LOADED}{origin}", **{name: getattr(loaded.settings, name)})
        shown = [name for name in open_names if name in learned or name in _SHAPE]
        draft.notices.append(
            f"architecture from {origin}: {' '.join(_written(loaded.settings, n) for n in shown)}"
        )
    after = foreseen(draft, facts)
    for name in differences(loaded, after):
        if name in draft.wrong:
            # Such as a vocabulary whose tokenizer was not found: that is the problem to tell of.
            continue
        if name == _CODE and not _is_said(draft, name):
            draft.wrong[name] = (
                f"{origin} was made with {_written(loaded.settings, name)}; give that again, as code is not taken from files"
            )
            continue
        draft.wrong[name] = (
            f"{origin} holds a model with {_written(loaded.settings, name)}, but {_who(draft, name)} {_written(after, name)}; "
            f"leave that out, {way_out}"
        )


def _is_said(draft: Draft, name: str) -> bool:
    """A preset that was named is said too; one that is merely underneath is not."""
    return draft.given(name) or (draft.given("preset") and draft.source(name).startswith("preset "))


def _longer_than_made_for(draft: Draft, loaded: Architecture) -> bool:
    """Whether sequences are longer than those of the loaded model, which positions that are not learned allow."""
    most = loaded.settings.max_position_embeddings
    free = loaded.settings.position_embedding_type != "learned_absolute" and not _is_said(draft, _POSITIONS)
    return free and most is not None and draft.seq_length > most


def _longer_than_learned(draft: Draft, loaded: Architecture) -> bool:
    """Learned positions are weights: no setting makes more of them."""
    most = loaded.settings.max_position_embeddings
    learned = loaded.settings.position_embedding_type == "learned_absolute" and not _is_said(
        draft, _POSITIONS
    )
    return learned and most is not None and draft.seq_length > most


def _too_many_ids(draft: Draft, loaded: Architecture, origin: str) -> None:
    """A tokenizer may have fewer ids than the embedding has rows, but not more."""
    ids, rows = draft.vocab_size, loaded.settings.vocab_size
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


def _written(s: Settings, name: str) -> str:
    item, value = table()[name], getattr(s, name)
    return f"no {item.flag}" if value in (None, ()) else item.written(value)
