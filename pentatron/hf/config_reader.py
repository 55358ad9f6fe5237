"""Parts of config.json with related keys: heads, RoPE, sliding windows, MoE layers.

Each part converts its keys to model settings and back.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pentatron.settings.layer_patterns import window_of_layer
from pentatron.settings.model import TransformerConfig, moe_layers
from pentatron.settings.settings import Settings

# The origin of settings from a config.json.
ORIGIN = "config.json"
_TYPE_NAMES = {
    int: "a whole number above 0 and below 2^63",
    float: "a number, 0 or more",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


class InvalidKey(ValueError):
    """Raised for an invalid or unsupported key in config.json, or in an object of it."""

    def __init__(self, what: str, where: str = ORIGIN) -> None:
        super().__init__(f"{where} has {what}")


class ConfigReader:
    """Reads keys of a config.json and records which were read; the others are unknown."""

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self.config, self.where = config, where
        self.read: set[str] = set()

    def get(self, key: str, kind: type, default: Any = None, absent: Any = None) -> Any:
        """Returns the value of a key, or the default if absent or null; raises InvalidKey for another type.

        `absent` is the default of a key that is absent but not null, if they differ.
        """
        self.read.add(key)
        if absent is not None and key not in self.config:
            return absent
        if (value := self.config.get(key)) is None:
            return default
        if not _has_type(value, kind):
            raise InvalidKey(f"{key} {value!r:.200}, but it must be {_TYPE_NAMES[kind]}", self.where)
        return float(value) if kind is float else value

    def one_of(self, keys: tuple[str, ...], kind: type, default: Any = None) -> Any:
        """Returns the value of a key with several names; raises InvalidKey if they differ."""
        values = {key: value for key in keys if (value := self.get(key, kind)) is not None}
        if len(set(map(str, values.values()))) > 1:
            both = ", ".join(f"{key} {value!r:.200}" for key, value in values.items())
            raise InvalidKey(f"{both}, which must be equal; remove the wrong one", self.where)
        return next(iter(values.values()), default)

    def require(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Raises InvalidKey unless the value is allowed, null or absent."""
        self.read.add(key)
        value = self.config.get(key)
        same = (value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)
        if value is not None and not any(same):
            only = f"only {', '.join(repr(one) for one in allowed)} is" if allowed else "no value of it is"
            raise InvalidKey(f"{key} {value!r:.200}, but {only} supported", self.where)

    def unread(self) -> dict[str, Any]:
        return {key: value for key, value in self.config.items() if key not in self.read}


def _has_type(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float) and 0 <= value <= sys.float_info.max
    if kind is int:
        # Larger integers overflow int64.
        return isinstance(value, int) and 0 < value < 2**63
    return isinstance(value, kind)


class KeyGroup(Protocol):
    """Converts some keys of a config.json; `keys` are all that it reads, even if it fails."""

    keys: ClassVar[tuple[str, ...]]

    def read(self, config: ConfigReader, settings: Settings) -> None: ...

    def write(self, settings: Settings) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Heads:
    """Heads, query groups and head dimension, with defaults; `head_dim` None is hidden / heads."""

    keys: ClassVar[tuple[str, ...]] = ("num_attention_heads", "num_key_value_heads", "head_dim")

    heads: int
    groups: int | None
    head_dim: int | None = None

    def read(self, config: ConfigReader, settings: Settings) -> None:
        heads = config.get("num_attention_heads", int, self.heads)
        groups = config.get("num_key_value_heads", int, heads, absent=self.groups)
        if heads % groups:
            raise InvalidKey(
                f"num_attention_heads {heads}, which is not a multiple of its num_key_value_heads {groups}"
            )
        settings.assign(ORIGIN, num_attention_heads=heads, num_query_groups=groups)
        head_dim = config.get("head_dim", int, settings.hidden_size // heads, absent=self.head_dim)
        settings.assign(ORIGIN, group_query_attention=True, kv_channels=head_dim)

    def write(self, settings: Settings) -> dict[str, Any]:
        heads, groups = settings.num_attention_heads, settings.num_query_groups
        return {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": settings.kv_channels}


@dataclass(frozen=True)
class Gpt2Widths:
    """GPT-2's derived widths, and its two dropout keys, which are one setting here."""

    keys: ClassVar[tuple[str, ...]] = ("n_inner", "resid_pdrop", "embd_pdrop")

    def read(self, config: ConfigReader, settings: Settings) -> None:
        heads, hidden = settings.num_attention_heads, settings.hidden_size
        inner, dropout = config.get("n_inner", int, 4 * hidden), config.get("resid_pdrop", float, 0.1)
        settings.assign(ORIGIN, ffn_hidden_size=inner, kv_channels=hidden // heads, hidden_dropout=dropout)
        embedding = config.get("embd_pdrop", float, 0.1)
        if hidden % heads:
            raise InvalidKey(f"n_embd {hidden}, which is not a multiple of its n_head {heads}")
        if embedding != settings.hidden_dropout:
            raise InvalidKey(
                f"embd_pdrop {embedding} and resid_pdrop {settings.hidden_dropout}, but here they are one "
                f"setting (hidden_dropout); make them equal"
            )

    def write(self, settings: Settings) -> dict[str, Any]:
        inner, dropout = settings.ffn_hidden_size, settings.hidden_dropout
        other_inner = None if inner == 4 * settings.hidden_size else inner
        return {"n_inner": other_inner, "resid_pdrop": dropout, "embd_pdrop": dropout}


# The setting and type of every key of RoPE scaling.
SCALING_KEYS: dict[str, tuple[str, type]] = {
    "factor": ("rope_scaling_factor", float),
    "low_freq_factor": ("rope_scaling_low_freq_factor", float),
    "high_freq_factor": ("rope_scaling_high_freq_factor", float),
    "original_max_position_embeddings": ("rope_scaling_original_max_position_embeddings", int),
    "beta_fast": ("yarn_beta_fast", float),
    "beta_slow": ("yarn_beta_slow", float),
    "attention_factor": ("yarn_attention_factor", float),
    "mscale": ("yarn_mscale", float),
    "mscale_all_dim": ("yarn_mscale_all_dim", float),
    "truncate": ("yarn_truncate", bool),
}
_REQUIRED_SCALING_KEYS = ("factor", "low_freq_factor", "high_freq_factor")
# The keys of each RoPE scaling type.
SCALINGS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": (*_REQUIRED_SCALING_KEYS, "original_max_position_embeddings"),
    "yarn": tuple(key for key in SCALING_KEYS if key not in ("low_freq_factor", "high_freq_factor")),
}


def scaling_settings(kind: str | None) -> frozenset[str]:
    """Returns the settings used by a RoPE scaling type."""
    return frozenset(SCALING_KEYS[key][0] for key in SCALINGS[kind]) if kind else frozenset()


@dataclass(frozen=True)
class Rotary:
    """RoPE: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of transformers 4."""

    keys: ClassVar[tuple[str, ...]] = ("rope_theta", "rope_scaling", "rope_parameters")

    theta: float = 10000.0

    def read(self, config: ConfigReader, settings: Settings) -> None:
        older, newer = config.get("rope_scaling", dict), config.get("rope_parameters", dict)
        key = "rope_scaling" if older else "rope_parameters"
        rope = ConfigReader(older or newer or {}, f"{key} in config.json")
        within, beside = rope.get("rope_theta", float), config.get("rope_theta", float)
        if within is not None and beside is not None and within != beside:
            raise InvalidKey(f"rope_theta {beside!r} and {within!r} in {key}; make them equal")
        base = next(theta for theta in (within, beside, self.theta) if theta is not None)
        if base == 0:
            raise InvalidKey("rope_theta 0, but it must be more than 0")
        settings.assign(ORIGIN, rotary_base=base)
        if older and newer:
            self._require_equal(older, newer, base)
        rope.require("partial_rotary_factor", (1.0,))
        kind = rope.one_of(("rope_type", "type"), str, "default")
        if kind != "default":
            if kind not in SCALINGS:
                raise InvalidKey(
                    f"rope_type {kind!r}, but only default, {', '.join(SCALINGS)} are supported", rope.where
                )
            settings.assign(ORIGIN, rope_scaling_type=kind)
            for theirs in SCALINGS[kind]:
                ours, of_kind = SCALING_KEYS[theirs]
                if (scale := rope.get(theirs, of_kind)) is not None:
                    settings.assign(ORIGIN, **{ours: scale})
                elif theirs in _REQUIRED_SCALING_KEYS:
                    raise InvalidKey(f"rope_type {kind!r} without {theirs}; write it there", rope.where)
                elif theirs == "original_max_position_embeddings":
                    settings.assign(ORIGIN, **{ours: settings.max_position_embeddings})
        elif rope.get("factor", float, 1.0) != 1.0:
            raise InvalidKey("a factor but no rope_type; write which type of scaling it is", rope.where)
        for name, value in rope.unread().items():
            raise InvalidKey(f"{name} {value!r}, which is not known for rope_type {kind!r}", rope.where)

    def _require_equal(self, older: Mapping[str, Any], newer: Mapping[str, Any], base: float) -> None:
        """Raises InvalidKey if `rope_parameters` differs from `rope_scaling`, which has precedence."""
        kind = older.get("rope_type", older.get("type"))
        known = {**older, "rope_type": kind, "type": kind, "rope_theta": base}
        for name, value in newer.items():
            if value != known.get(name):
                raise InvalidKey(
                    f"{name} {known.get(name)!r} in rope_scaling and {value!r} in rope_parameters; make them equal"
                )

    def write(self, settings: Settings) -> dict[str, Any]:
        base, kind = settings.rotary_base, settings.rope_scaling_type
        rope = {"rope_theta": base, "rope_type": kind or "default"}
        if kind is None:
            return {"rope_parameters": rope, "rope_theta": base}
        values = {theirs: getattr(settings, SCALING_KEYS[theirs][0]) for theirs in SCALINGS[kind]}
        rope |= {theirs: value for theirs, value in values.items() if value is not None}
        return {"rope_parameters": rope, "rope_theta": base, "rope_scaling": rope}


def layer_list(layers: Iterable[int | bool]) -> str:
    """Formats a pattern of layers as in `--moe-layer-freq` and `--window-attn-skip-freq`."""
    return str(list(map(int, layers))).replace(" ", "")


@dataclass(frozen=True)
class LayersWithExperts:
    """The layers with experts in Qwen's format: every n-th layer except for listed ones."""

    keys: ClassVar[tuple[str, ...]] = ("decoder_sparse_step", "mlp_only_layers")

    def read(self, config: ConfigReader, settings: Settings) -> None:
        step, dense = config.get("decoder_sparse_step", int, 1), config.get("mlp_only_layers", list, [])
        layers = range(settings.num_layers)
        if any(number not in layers for number in dense):
            raise InvalidKey(f"mlp_only_layers {dense!r}, but there are {len(layers)} layers, from 0 on")
        sparse = [int((i + 1) % step == 0 and i not in dense) for i in layers]
        if not any(sparse):
            raise InvalidKey(
                f"mlp_only_layers {dense} and decoder_sparse_step {step}, so no layer has experts"
            )
        settings.assign(ORIGIN, moe_layer_freq="1" if all(sparse) else layer_list(sparse))

    def write(self, settings: Settings) -> dict[str, Any]:
        sparse = moe_layers(settings.moe_layer_freq, settings.num_layers)
        dense = [number for number, has_experts in enumerate(sparse) if not has_experts]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


# Values of `layer_types`.
_FULL, _WINDOW = "full_attention", "sliding_attention"


def set_window(settings: Settings, window: int | None, layers: Sequence[bool]) -> None:
    """Assigns sliding-window settings for a Hugging Face window size and the layers that use it.

    A window of transformers includes the token itself, `window_size` counts only the tokens before it.
    """
    size = (window - 1, 0) if window is not None and any(layers) else ()
    skipped = layer_list(layers) if size and not all(layers) else None
    settings.assign(ORIGIN, window_size=size, window_attn_skip_freq=skipped)


def window_in(model: TransformerConfig) -> tuple[int | None, tuple[bool, ...]]:
    """Returns the Hugging Face window size, which includes the token itself, and which layers use it."""
    count = model.num_layers
    settings = model.window_size, model.window_attn_skip_freq, count
    windows = [window_of_layer(*settings, layer_number=number + 1) for number in range(count)]
    size = next((window + 1 for window in windows if window is not None), None)
    return size, tuple(window is not None for window in windows)


@dataclass(frozen=True)
class WindowEverywhere:
    """A sliding window in every layer. `switched` means that it is only used with `use_sliding_window`."""

    keys: ClassVar[tuple[str, ...]] = ("sliding_window", "use_sliding_window")

    default: int | None
    switched: bool = False

    def read(self, config: ConfigReader, settings: Settings) -> None:
        if not self.switched:
            config.require("use_sliding_window", (False,))
        used = not self.switched or config.get("use_sliding_window", bool, False)
        window = config.get("sliding_window", int, absent=self.default) if used else None
        set_window(settings, window, (True,) * settings.num_layers)

    def write(self, settings: Settings) -> dict[str, Any]:
        window, _ = window_in(settings)
        switch = {"use_sliding_window": window is not None} if self.switched else {}
        return {"sliding_window": window, **switch}


@dataclass(frozen=True)
class WindowByLayer:
    """Sliding windows in the layers given by `layer_types`, or by default from layer `max_window_layers` on.

    `by_number` is False if versions of transformers differ in that default; `layer_types` is then required.
    """

    keys: ClassVar[tuple[str, ...]] = (*WindowEverywhere.keys, "max_window_layers", "layer_types")

    by_number: bool = True

    def read(self, config: ConfigReader, settings: Settings) -> None:
        used, count = config.get("use_sliding_window", bool, False), settings.num_layers
        if (kinds := config.get("layer_types", list)) is not None:
            if unknown := [kind for kind in kinds if kind not in (_FULL, _WINDOW)]:
                raise InvalidKey(f"{unknown[0]!r} in layer_types; only {_FULL} and {_WINDOW} are supported")
            if len(kinds) != count:
                raise InvalidKey(f"{len(kinds)} layer_types for {count} layers (num_hidden_layers)")
            if _WINDOW in kinds and not used:
                raise InvalidKey(f"{_WINDOW} in layer_types, but use_sliding_window False; make them agree")
        elif used and not self.by_number:
            raise InvalidKey("use_sliding_window True without layer_types; write which layers have windows")
        elif used:
            # `get` refuses 0, which is valid here: all layers have windows.
            zero = config.config.get("max_window_layers") == 0
            first = 0 if zero else config.get("max_window_layers", int, 28)
            kinds = [_WINDOW if number >= first else _FULL for number in range(count)]
        window = config.get("sliding_window", int, absent=4096) if used else None
        set_window(settings, window, [kind == _WINDOW for kind in kinds or [_FULL] * count])

    def write(self, settings: Settings) -> dict[str, Any]:
        window, layers = window_in(settings)
        kinds = [_WINDOW if has_window else _FULL for has_window in layers]
        return {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": kinds}
