"""Takes the architecture from a checkpoint or model, and checks that given settings agree with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pentatron.settings.layer_patterns import window_of_layer
from pentatron.settings.model import moe_layers
from pentatron.settings.resolve import derived_settings
from pentatron.settings.run_config import all_settings
from pentatron.settings.settings import Draft, ProcessFacts, Settings, is_unset

# Prefix of the origin of settings taken from a checkpoint.
LOADED_PREFIX = "loaded from "
# Settings of the architecture that weights do not depend on, so each run may choose them.
NOT_IN_WEIGHTS = frozenset(name for name, item in all_settings().items() if not item.in_weights)
# Settings that are redundant with others.
_REDUNDANT = frozenset({"group_query_attention", "rotary_seq_len_interpolation_factor"})
# Settings that are derived from others if not given.
_DERIVED = frozenset(
    "ffn_hidden_size num_attention_heads kv_channels num_query_groups max_position_embeddings vocab_size "
    "moe_ffn_hidden_size".split()
)
# Always shown in the notice, even with their default values.
_SHAPE = frozenset({"num_layers", "hidden_size"})
_POSITIONS = "max_position_embeddings"
# Pairs of settings that have an effect only together.
_WINDOWS = ("window_size", "window_attn_skip_freq")
_MSCALES = ("yarn_mscale", "yarn_mscale_all_dim")
# Names a function to call, so it is never taken from a file. The user must give it.
_CODE = "spec"


@dataclass(frozen=True)
class Architecture:
    """The architecture of a checkpoint. `names`: the settings it fixes; the others have their defaults."""

    settings: Settings
    names: tuple[str, ...]

    def over(self, now: Settings) -> Settings:
        """Returns a copy of other settings with this architecture."""
        return now.changed(**{name: getattr(self.settings, name) for name in self.names})


def architecture(saved: Mapping[str, Any]) -> Architecture:
    """Returns the saved architecture. Settings that are newer than the checkpoint have their defaults."""
    names = [n for n, item in all_settings().items() if item.section in ("model", "moe") and item.in_weights]
    if _CODE not in saved:
        # Weights of standard layers may be loaded into custom ones.
        names.remove(_CODE)
    values = {name: saved[name] for name in names if name in saved}
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Architecture(Settings.defaults(**values), tuple(names))


def architecture_differences(loaded: Architecture, now: Settings) -> list[str]:
    """Returns the names of the settings in which the two models differ."""
    return [name for name in loaded.names if _differ(name, loaded, now)]


def _differ(name: str, architecture: Architecture, now: Settings) -> bool:
    """Whether a setting makes a different model. A difference without effect on the model does not count."""
    loaded = architecture.settings
    before, after = getattr(loaded, name), getattr(now, name)
    if before == after or name in _REDUNDANT or (before is None and name in _DERIVED):
        return False
    if name == _POSITIONS and loaded.position_embedding_type != "learned_absolute":
        # Only learned positions are weights: other models can be trained on longer sequences.
        return False
    if name == "moe_layer_freq" and _layers(loaded) == _layers(loaded.changed(moe_layer_freq=after)):
        return False
    if name == "ffn_hidden_size" and loaded.num_experts and all(_layers(loaded)):
        # Every layer has experts, whose width is another setting.
        return False
    if name in _WINDOWS:
        # Compared whatever the sequence length is: the model may be trained on longer sequences later.
        return _windows(loaded) != _windows(loaded.changed(**{n: getattr(now, n) for n in _WINDOWS}))
    # `merged` has the values before. A need of the setting is unmet, as that of the rotary base with learned
    # positions, for both values of a pair, or for one of another setting.
    merged = architecture.over(now)
    changes = {n: getattr(now, n) for n in (_MSCALES if name in _MSCALES else (name,))}
    is_idle = [bool(all_settings()[name].unmet_need(s)) for s in (merged, merged.changed(**changes))]
    return not (all(is_idle) if name in _MSCALES else any(is_idle))


def _layers(s: Settings) -> tuple[bool, ...]:
    try:
        return moe_layers(s.moe_layer_freq, s.num_layers)
    except ValueError:
        return (False,)


def _windows(s: Settings) -> tuple[int | None, ...]:
    """Returns the window of every layer, or () for an invalid pattern, which a rule reports."""
    pattern = (s.window_size, s.window_attn_skip_freq, s.num_layers)
    try:
        return tuple(window_of_layer(*pattern, number) for number in range(1, s.num_layers + 1))
    except ValueError:
        return ()


def adopt_architecture(
    draft: Draft, facts: ProcessFacts, saved: Mapping[str, Any], origin: str, fix: str
) -> None:
    """Takes settings that are not given from the saved architecture, and reports contradicting ones.

    `origin` names the checkpoint, and `fix` is the advice at the end of the errors.
    """
    loaded = architecture(saved)
    before = derived_settings(draft, facts)
    _check_tokenizer(draft, loaded, origin)
    open_names = [name for name in loaded.names if name != _CODE and not _is_chosen(draft, name)]
    length, positions = draft.seq_length, loaded.settings.max_position_embeddings
    if not is_unset(positions) and length > positions and not _is_chosen(draft, _POSITIONS):
        if loaded.settings.position_embedding_type == "learned_absolute":
            longer = f"--seq-length {length} is longer than the {positions} learned positions of {origin}"
            draft.wrong["seq_length"] = f"{longer}; give a shorter one, {fix}"
        else:
            open_names.remove(_POSITIONS)
            longer = f"sequences of {length} tokens are longer than the {positions} positions of {origin}"
            draft.notices.append(longer)
    different = architecture_differences(loaded, before)
    if positions not in (None, before.max_position_embeddings):
        different.append(_POSITIONS)
    if adopted := [name for name in open_names if name in different]:
        for name in open_names:
            draft.assign(f"{LOADED_PREFIX}{origin}", **{name: getattr(loaded.settings, name)})
        shown = [_written(loaded.settings, n) for n in open_names if n in adopted or n in _SHAPE]
        draft.notices.append(f"architecture from {origin}: {' '.join(shown)}")
    after = derived_settings(draft, facts)
    for name in architecture_differences(loaded, after):
        value = _written(loaded.settings, name)
        if name in draft.wrong:
            # Its error is reported already, such as a tokenizer that was not found.
            continue
        if name == _CODE and not _is_chosen(draft, name):
            error = f"was trained with {value}; give that flag again, because code is never loaded from files"
        else:
            source = "the command line" if draft.by_flag(name) else draft.source(name)
            from_user = draft.by_flag(name) or source.startswith(("file", "preset"))
            what = f"{source} gives" if from_user else "this command resolves to"
            error = f"holds a model with {value}, but {what} {_written(after, name)}; leave that out, {fix}"
        draft.wrong[name] = f"{origin} {error}"


def _is_chosen(draft: Draft, name: str) -> bool:
    """Whether the user chose a value, directly or by naming a preset. A default preset is not a choice."""
    return draft.given(name) or (draft.given("preset") and draft.source(name).startswith("preset "))


def _check_tokenizer(draft: Draft, loaded: Architecture, origin: str) -> None:
    """Records an error if the tokenizer has more ids than the embedding has rows. Fewer are allowed."""
    ids, rows, source = draft.vocab_size, loaded.settings.vocab_size, draft.source("vocab_size")
    if source.startswith("derived: tokenizer ") and rows is not None and ids > rows:
        counts = f"{source.removeprefix('derived: ')} has {ids} ids, but the model of {origin} has {rows}"
        draft.wrong["tokenizer_model"] = f"{counts}; use the tokenizer of its training"


def _written(s: Settings, name: str) -> str:
    item, value = all_settings()[name], getattr(s, name)
    return f"no {item.flag}" if value in (None, ()) else item.written(value)
