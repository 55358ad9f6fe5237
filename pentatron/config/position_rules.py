"""Rules about what a token sees: rotary positions, how they are stretched for long sequences, and windows."""

from pentatron.config.layout_rules import Rule
from pentatron.config.settings import Settings, unset
from pentatron.config.windows import windowed_layers

_SCALING = "--rope-scaling-type"


def _scaling(s: Settings) -> str | None:
    """The kind of scaling that acts; without rope there is none, and a notice says so."""
    kind: str | None = s.rope_scaling_type if s.position_embedding_type == "rope" else None
    return kind


def _rotary(s: Settings) -> str | None:
    if s.position_embedding_type != "rope" or int(s.kv_channels * s.rotary_percent) % 2 == 0:
        return None
    return (
        f"the rotated part of a head, {s.kv_channels} × {s.rotary_percent} (--rotary-percent) = "
        f"{int(s.kv_channels * s.rotary_percent)}, must be even; change --kv-channels or --num-attention-heads"
    )


def _factor(s: Settings) -> str | None:
    kind = _scaling(s)
    if kind is None or not unset(s.rope_scaling_factor):
        return None
    return f"{_SCALING} {kind} needs to know how far to stretch; give --rope-scaling-factor"


def _first_length(s: Settings) -> str | None:
    if _scaling(s) != "yarn" or not unset(s.rope_scaling_original_max_position_embeddings):
        return None
    return (
        f"{_SCALING} yarn needs the length the model was first trained on; "
        f"give --rope-scaling-original-max-position-embeddings, for example 32768 for Qwen2.5"
    )


def _waves(s: Settings) -> str | None:
    low, high = s.rope_scaling_low_freq_factor, s.rope_scaling_high_freq_factor
    if _scaling(s) != "llama3" or low < high:
        return None
    return (
        f"--rope-scaling-low-freq-factor {low} must be below --rope-scaling-high-freq-factor {high}: what lies between "
        f"them is stretched in part; lower the first or raise the second"
    )


def _turns(s: Settings) -> str | None:
    fast, slow = s.yarn_beta_fast, s.yarn_beta_slow
    if _scaling(s) != "yarn" or slow < fast:
        return None
    return (
        f"--yarn-beta-slow {slow} must be below --yarn-beta-fast {fast}: what lies between them is stretched in part; "
        f"lower the first or raise the second"
    )


def _base(s: Settings) -> str | None:
    if _scaling(s) != "yarn" or s.rotary_base > 1:
        return None
    return f"{_SCALING} yarn needs --rotary-base above 1, not {s.rotary_base}"


def _window(s: Settings) -> str | None:
    window = s.window_size
    if not window or (len(window) == 2 and window[1] == 0):
        return None
    return (
        f"--window-size {','.join(map(str, window))} must be LEFT,0, for example 4095,0: a token sees so many tokens "
        f"before it, and none after it"
    )


def _layers_with_windows(s: Settings) -> str | None:
    if not s.window_size:
        return None
    try:
        windowed_layers(s.window_attn_skip_freq, s.num_layers)
    except ValueError as error:
        return str(error)
    return None


def _window_dropout(s: Settings) -> str | None:
    if not s.window_size or s.attention_dropout == 0 or s.attention_backend not in ("flash", "cudnn"):
        return None
    return (
        f"--attention-backend {s.attention_backend} cannot drop attention weights within a window; use "
        f"--attention-backend auto, or --attention-dropout 0"
    )


def _repeatable_attention(s: Settings) -> str | None:
    if not s.deterministic_mode or s.attention_backend != "cudnn":
        return None
    return (
        "--deterministic-mode: gradients of cuDNN's attention are not the same in every run; use --attention-backend auto, which "
        "takes another kernel then"
    )


POSITION_RULES: tuple[Rule, ...] = (
    _rotary,
    _factor,
    _first_length,
    _waves,
    _turns,
    _base,
    _window,
    _layers_with_windows,
    _window_dropout,
    _repeatable_attention,
)
