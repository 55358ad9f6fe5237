"""Why a setting of the model may have nothing to act on."""

from collections.abc import Callable
from functools import partial

from pentatron.config.draft import Draft, Facts
from pentatron.config.windows import windowed_layers

_SCALING = "--rope-scaling-type"


def _no_rope(draft: Draft, facts: Facts) -> str:
    kind = draft["position_embedding_type"]
    return f"positions are {kind}, not rope, so this changes nothing" if kind != "rope" else ""


def _without(draft: Draft, facts: Facts, *kinds: str) -> str:
    """Why a setting of these kinds of scaling is idle."""
    kind = draft["rope_scaling_type"]
    if _no_rope(draft, facts) or kind in kinds:
        return _no_rope(draft, facts)
    if kind is None:
        return f"rotary frequencies are not stretched ({_SCALING}), so this changes nothing"
    return f"it belongs to {' and '.join(kinds)}, not to {_SCALING} {kind}, so this changes nothing"


def _not_scaled(draft: Draft, facts: Facts) -> str:
    return _without(draft, facts, "linear", "llama3", "yarn")


def _no_first_length(draft: Draft, facts: Facts) -> str:
    return _without(draft, facts, "llama3", "yarn")


def _not_llama3(draft: Draft, facts: Facts) -> str:
    return _without(draft, facts, "llama3")


def _not_yarn(draft: Draft, facts: Facts) -> str:
    return _without(draft, facts, "yarn")


def _no_mscale(draft: Draft, facts: Facts) -> str:
    """The two act together, and only where nothing else gives the factor."""
    if idle := _not_yarn(draft, facts):
        return idle
    if draft["yarn_attention_factor"] is not None:
        return "--yarn-attention-factor is given and used as it is"
    both = draft["yarn_mscale"] and draft["yarn_mscale_all_dim"]
    return "" if both else "--yarn-mscale and --yarn-mscale-all-dim act together, both above 0"


def _no_window(draft: Draft, facts: Facts) -> str:
    return (
        "no layer has a window (--window-size), so this changes nothing" if not draft["window_size"] else ""
    )


def _sees_everything(draft: Draft, facts: Facts) -> str:
    window, length = draft["window_size"], draft["seq_length"]
    if not window or draft.wrong.keys() & {"window_size", "seq_length"}:
        return ""
    if window[0] == -1 or window[0] >= length - 1:
        return (
            f"it covers all {length} tokens of a sequence (--seq-length), so every token sees all before it"
        )
    try:
        some = any(windowed_layers(draft["window_attn_skip_freq"], draft["num_layers"]))
    except ValueError:
        return ""
    return (
        "" if some else f"--window-attn-skip-freq {draft['window_attn_skip_freq']} leaves no layer a window"
    )


def _bias_anyway(name: str, draft: Draft, facts: Facts) -> str:
    twice = draft[name] and draft["add_bias_linear"]
    return "every linear layer has a bias already" if twice else ""


IDLE_OF_THE_MODEL: dict[str, Callable[[Draft, Facts], str]] = {
    **dict.fromkeys(
        "rotary_base rotary_percent rotary_interleaved rope_scaling_type "
        "rotary_seq_len_interpolation_factor".split(),
        _no_rope,
    ),
    "rope_scaling_factor": _not_scaled,
    "rope_scaling_original_max_position_embeddings": _no_first_length,
    **dict.fromkeys(("rope_scaling_low_freq_factor", "rope_scaling_high_freq_factor"), _not_llama3),
    **dict.fromkeys("yarn_beta_fast yarn_beta_slow yarn_attention_factor yarn_truncate".split(), _not_yarn),
    **dict.fromkeys(("yarn_mscale", "yarn_mscale_all_dim"), _no_mscale),
    "window_size": _sees_everything,
    "window_attn_skip_freq": _no_window,
    **{name: partial(_bias_anyway, name) for name in ("add_qkv_bias", "add_proj_bias", "add_mlp_bias")},
}
