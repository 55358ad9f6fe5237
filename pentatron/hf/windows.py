"""Attention in windows: their ways to say in which layers, and ours.

A window of theirs counts the token itself, ours the tokens before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pentatron.config.model import TransformerConfig
from pentatron.config.settings import Settings
from pentatron.config.windows import window_of
from pentatron.hf.config_parts import ORIGIN, layer_list
from pentatron.hf.reader import ConfigReader, Problem

_FULL, _WINDOW = "full_attention", "sliding_attention"


def set_window(settings: Settings, window: int | None, layers: Sequence[bool]) -> None:
    """The settings of a model with windows of so many tokens, theirs counted, in these layers."""
    used = window is not None and any(layers)
    settings.assign(
        ORIGIN,
        window_size=(window - 1, 0) if window is not None and used else (),
        window_attn_skip_freq=layer_list(layers) if used and not all(layers) else None,
    )


def window_in(model: TransformerConfig) -> tuple[int | None, tuple[bool, ...]]:
    """How many tokens a window has, theirs counted, and in which layers it is."""
    count = model.num_layers
    words = (model.window_size, model.window_attn_skip_freq, count)
    before = [window_of(*words, layer_number=number + 1) for number in range(count)]
    sizes = [size for size in before if size is not None]
    return (sizes[0] + 1 if sizes else None), tuple(size is not None for size in before)


@dataclass(frozen=True)
class WindowEverywhere:
    """`sliding_window` tokens in every layer, or null. `switched`: it counts only with `use_sliding_window`."""

    keys: ClassVar[tuple[str, ...]] = ("sliding_window", "use_sliding_window")

    default: int | None
    switched: bool = False

    def read(self, config: ConfigReader, settings: Settings) -> None:
        window = None
        if self._on(config):
            default = self.default if "sliding_window" not in config.config else None
            window = config.get("sliding_window", int, default)
        set_window(settings, window, (True,) * settings.num_layers)

    def _on(self, config: ConfigReader) -> bool:
        if self.switched:
            return bool(config.get("use_sliding_window", bool, False))
        config.require("use_sliding_window", (False,))
        return True

    def write(self, settings: Settings) -> dict[str, Any]:
        window, _ = window_in(settings)
        return {"sliding_window": window} | (
            {"use_sliding_window": window is not None} if self.switched else {}
        )


@dataclass(frozen=True)
class WindowByLayer:
    """Windows in the layers that `layer_types` names. Without it, in those from `max_window_layers` on; where versions of
    transformers do not agree on that (`by_number` False), it must be there."""

    keys: ClassVar[tuple[str, ...]] = (
        "use_sliding_window",
        "sliding_window",
        "max_window_layers",
        "layer_types",
    )

    by_number: bool = True

    def read(self, config: ConfigReader, settings: Settings) -> None:
        used, count = config.get("use_sliding_window", bool, False), settings.num_layers
        kinds = config.get("layer_types", list)
        if kinds is not None:
            self._check(kinds, count, used)
        elif used and not self.by_number:
            raise Problem(
                "config.json has use_sliding_window True without layer_types; write which layers have windows"
            )
        elif used:
            # 0 is no mistake: all layers have windows.
            first = (
                0 if config.config.get("max_window_layers") == 0 else config.get("max_window_layers", int, 28)
            )
            kinds = [_WINDOW if number >= first else _FULL for number in range(count)]
        window = None
        if used:
            default = 4096 if "sliding_window" not in config.config else None
            window = config.get("sliding_window", int, default)
        set_window(settings, window, [kind == _WINDOW for kind in kinds or [_FULL] * count])

    def _check(self, kinds: list[Any], count: int, used: bool) -> None:
        unknown = [kind for kind in kinds if kind not in (_FULL, _WINDOW)]
        if unknown:
            raise Problem(
                f"config.json has {unknown[0]!r} in layer_types, but only {_FULL} and {_WINDOW} are supported"
            )
        if len(kinds) != count:
            raise Problem(f"config.json has {len(kinds)} layer_types for {count} layers (num_hidden_layers)")
        if _WINDOW in kinds and not used:
            raise Problem(
                f"config.json has {_WINDOW} in layer_types, but use_sliding_window False; make them agree"
            )

    def write(self, settings: Settings) -> dict[str, Any]:
        window, layers = window_in(settings)
        return {
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "layer_types": [_WINDOW if has_window else _FULL for has_window in layers],
        }
