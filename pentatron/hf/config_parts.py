"""Parts of a config.json where several keys say one thing together: heads, rotary positions, windows, layers with experts.

Each part assigns settings of ours from its keys, and writes settings of ours as keys.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pentatron.config.moe_layers import moe_layers
from pentatron.config.settings import Settings
from pentatron.hf.reader import ConfigReader, Problem

# The origin of every setting that a config.json gives.
ORIGIN = "config.json"


class Part(Protocol):
    """`keys` are all it may read, so that a problem with one does not make the others unknown."""

    keys: ClassVar[tuple[str, ...]]

    def read(self, config: ConfigReader, settings: Settings) -> None: ...

    def write(self, settings: Settings) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Heads:
    """Heads, groups of them, and their width. `head_dim` is the width where the key is absent; None: hidden / heads."""

    keys: ClassVar[tuple[str, ...]] = ("num_attention_heads", "num_key_value_heads", "head_dim")

    heads: int
    groups: int | None
    head_dim: int | None = None

    def read(self, config: ConfigReader, settings: Settings) -> None:
        heads = config.get("num_attention_heads", int, self.heads)
        default = self.groups if "num_key_value_heads" not in config.config else None
        groups = config.get("num_key_value_heads", int, default or heads)
        if heads % groups:
            raise Problem(
                f"config.json has num_attention_heads {heads}, which is not a multiple of its num_key_value_heads {groups}"
            )
        width = self.head_dim if "head_dim" not in config.config else None
        settings.assign(
            ORIGIN,
            num_attention_heads=heads,
            num_query_groups=groups,
            group_query_attention=True,
            kv_channels=config.get("head_dim", int, width or settings.hidden_size // heads),
        )

    def write(self, settings: Settings) -> dict[str, Any]:
        return {
            "num_attention_heads": settings.num_attention_heads,
            "num_key_value_heads": settings.num_query_groups,
            "head_dim": settings.kv_channels,
        }


@dataclass(frozen=True)
class Gpt2Widths:
    """Widths that follow from others, and one dropout here for two there."""

    keys: ClassVar[tuple[str, ...]] = ("n_inner", "resid_pdrop", "embd_pdrop")

    def read(self, config: ConfigReader, settings: Settings) -> None:
        heads, hidden = settings.num_attention_heads, settings.hidden_size
        settings.assign(
            ORIGIN,
            ffn_hidden_size=config.get("n_inner", int, 4 * hidden),
            kv_channels=hidden // heads,
            hidden_dropout=config.get("resid_pdrop", float, 0.1),
        )
        embedding = config.get("embd_pdrop", float, 0.1)
        if hidden % heads:
            raise Problem(f"config.json has n_embd {hidden}, which is not a multiple of its n_head {heads}")
        if embedding != settings.hidden_dropout:
            raise Problem(
                f"config.json has embd_pdrop {embedding} and resid_pdrop {settings.hidden_dropout}, but here they are one "
                f"setting (hidden_dropout); make them equal"
            )

    def write(self, settings: Settings) -> dict[str, Any]:
        inner, dropout = settings.ffn_hidden_size, settings.hidden_dropout
        return {
            "n_inner": None if inner == 4 * settings.hidden_size else inner,
            "resid_pdrop": dropout,
            "embd_pdrop": dropout,
        }


# Theirs and ours, by kind of scaling. Those of the first tuple must be there.
SCALINGS: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, type]]]] = {
    "linear": (("factor",), {"factor": ("rope_scaling_factor", float)}),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor"),
        {
            "factor": ("rope_scaling_factor", float),
            "low_freq_factor": ("rope_scaling_low_freq_factor", float),
            "high_freq_factor": ("rope_scaling_high_freq_factor", float),
            "original_max_position_embeddings": ("rope_scaling_original_max_position_embeddings", int),
        },
    ),
    "yarn": (
        ("factor",),
        {
            "factor": ("rope_scaling_factor", float),
            "original_max_position_embeddings": ("rope_scaling_original_max_position_embeddings", int),
            "beta_fast": ("yarn_beta_fast", float),
            "beta_slow": ("yarn_beta_slow", float),
            "attention_factor": ("yarn_attention_factor", float),
            "mscale": ("yarn_mscale", float),
            "mscale_all_dim": ("yarn_mscale_all_dim", float),
            "truncate": ("yarn_truncate", bool),
        },
    ),
}


def scaling_settings(kind: str | None) -> frozenset[str]:
    """The settings that have a meaning for a kind of scaling."""
    return frozenset(ours for ours, _ in SCALINGS[kind][1].values()) if kind else frozenset()


@dataclass(frozen=True)
class Rotary:
    """`rope_parameters` of transformers 5; `rope_theta` and `rope_scaling` of transformers 4."""

    keys: ClassVar[tuple[str, ...]] = ("rope_theta", "rope_scaling", "rope_parameters")

    theta: float = 10000.0

    def read(self, config: ConfigReader, settings: Settings) -> None:
        older, newer = config.get("rope_scaling", dict), config.get("rope_parameters", dict)
        key = "rope_scaling" if older else "rope_parameters"
        rope = ConfigReader(older or newer or {}, f"{key} in config.json")
        within, beside = rope.get("rope_theta", float), config.get("rope_theta", float)
        if within is not None and beside is not None and within != beside:
            raise Problem(f"config.json has rope_theta {beside!r} and {within!r} in {key}; make them equal")
        base = next(theta for theta in (within, beside, self.theta) if theta is not None)
        if base == 0:
            raise Problem("config.json has rope_theta 0, but it must be more than 0")
        settings.assign(ORIGIN, rotary_base=base)
        if older and newer:
            self._agree(older, newer, base)
        rope.require("partial_rotary_factor", (1.0,))
        kind = rope.one_of(("rope_type", "type"), str, "default")
        if kind != "default":
            if kind not in SCALINGS:
                raise Problem(
                    f"{rope.where} has rope_type {kind!r}, but only default, {', '.join(SCALINGS)} are supported"
                )
            self._read_scaling(kind, rope, settings)
        elif rope.get("factor", float, 1.0) != 1.0:
            raise Problem(f"{rope.where} has a factor but no rope_type; write which kind of scaling it is")
        for name, value in rope.unread().items():
            raise Problem(f"{rope.where} has {name} {value!r}, which is not known for rope_type {kind!r}")

    def _agree(self, older: Mapping[str, Any], newer: Mapping[str, Any], base: float) -> None:
        """As in transformers, the older one counts alone, so the newer one must not say more."""
        kind = older.get("rope_type", older.get("type"))
        known = {**older, "rope_type": kind, "type": kind, "rope_theta": base}
        for name, value in newer.items():
            if value != known.get(name):
                raise Problem(
                    f"config.json has {name} {known.get(name)!r} in rope_scaling and {value!r} in rope_parameters; make them equal"
                )

    def _read_scaling(self, kind: str, rope: ConfigReader, settings: Settings) -> None:
        required, keys = SCALINGS[kind]
        settings.assign(ORIGIN, rope_scaling_type=kind)
        for theirs, (ours, of_kind) in keys.items():
            value = rope.get(theirs, of_kind)
            if value is not None:
                settings.assign(ORIGIN, **{ours: value})
            elif theirs in required:
                raise Problem(f"{rope.where} has rope_type {kind!r} without {theirs}; write it there")
            elif theirs == "original_max_position_embeddings":
                settings.assign(ORIGIN, **{ours: settings.max_position_embeddings})

    def write(self, settings: Settings) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_theta": settings.rotary_base}
        kind = settings.rope_scaling_type
        if kind is None:
            rope["rope_type"] = "default"
            return {"rope_parameters": rope, "rope_theta": settings.rotary_base}
        rope["rope_type"] = kind
        for theirs, (ours, _) in SCALINGS[kind][1].items():
            value = getattr(settings, ours)
            if value is not None:
                rope[theirs] = value
        return {"rope_parameters": rope, "rope_theta": settings.rotary_base, "rope_scaling": rope}


def layer_list(layers: Iterable[int | bool]) -> str:
    """As `--moe-layer-freq` and `--window-attn-skip-freq` say it."""
    return str(list(map(int, layers))).replace(" ", "")


@dataclass(frozen=True)
class LayersWithExperts:
    """Qwen's way to say it: every so many layers, but for some that are listed."""

    keys: ClassVar[tuple[str, ...]] = ("decoder_sparse_step", "mlp_only_layers")

    def read(self, config: ConfigReader, settings: Settings) -> None:
        step, dense = config.get("decoder_sparse_step", int, 1), config.get("mlp_only_layers", list, [])
        layers = range(settings.num_layers)
        if any(number not in layers for number in dense):
            raise Problem(
                f"config.json has mlp_only_layers {dense!r}, but there are {len(layers)} layers, from 0 on"
            )
        sparse = [int((i + 1) % step == 0 and i not in dense) for i in layers]
        if not any(sparse):
            raise Problem(
                f"config.json has mlp_only_layers {dense!r} and decoder_sparse_step {step}, so no layer has experts"
            )
        settings.assign(ORIGIN, moe_layer_freq="1" if all(sparse) else layer_list(sparse))

    def write(self, settings: Settings) -> dict[str, Any]:
        sparse = moe_layers(settings.moe_layer_freq, settings.num_layers)
        return {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [number for number, has_experts in enumerate(sparse) if not has_experts],
        }
