"""Needs of the architecture: positions, windows, biases, experts."""

from pentatron.config.needs.need import Need, Settings, unless
from pentatron.config.windows import windowed_layers

ROPE = unless(
    lambda s: s.position_embedding_type == "rope",
    lambda s: f"positions are {s.position_embedding_type}, not rope, so this changes nothing",
)


def _scaling(*kinds: str) -> Need:
    """Rotary positions with one of these kinds of scaling."""

    def check(s: Settings) -> str:
        kind = s.rope_scaling_type
        if (reason := ROPE(s)) or kind in kinds:
            return reason
        if kind is None:
            return "rotary frequencies are not stretched (--rope-scaling-type), so this changes nothing"
        return (
            f"it belongs to {' and '.join(kinds)}, not to --rope-scaling-type {kind}, so this changes nothing"
        )

    return check


ROPE_SCALING = _scaling("linear", "llama3", "yarn")
ORIGINAL_LENGTH = _scaling("llama3", "yarn")
LLAMA3_SCALING = _scaling("llama3")
YARN = _scaling("yarn")
MSCALES = (
    YARN,
    unless(lambda s: s.yarn_attention_factor is None, "--yarn-attention-factor is given and used as it is"),
    unless(
        lambda s: s.yarn_mscale and s.yarn_mscale_all_dim,
        "--yarn-mscale and --yarn-mscale-all-dim act together, both above 0",
    ),
)
WINDOW = unless(lambda s: s.window_size, "no layer has a window (--window-size), so this changes nothing")


def a_shorter_window(s: Settings) -> str:
    """A window smaller than the sequence, in at least one layer."""
    window, length = s.window_size, s.seq_length
    if not window:
        return ""
    if window[0] == -1 or window[0] >= length - 1:
        return (
            f"it covers all {length} tokens of a sequence (--seq-length), so every token sees all before it"
        )
    try:
        some = any(windowed_layers(s.window_attn_skip_freq, s.num_layers))
    except ValueError:
        # A rule reports a pattern that cannot be read.
        return ""
    return "" if some else f"--window-attn-skip-freq {s.window_attn_skip_freq} leaves no layer a window"


_BIAS_ALREADY = "every linear layer has a bias already"
QKV_BIAS_ALONE = unless(lambda s: not (s.add_qkv_bias and s.add_bias_linear), _BIAS_ALREADY)
PROJECTION_BIAS_ALONE = unless(lambda s: not (s.add_proj_bias and s.add_bias_linear), _BIAS_ALREADY)
MLP_BIAS_ALONE = unless(lambda s: not (s.add_mlp_bias and s.add_bias_linear), _BIAS_ALREADY)
PADDING_NOT_GIVEN = unless(
    lambda s: not s.given("padded_vocab_size"),
    lambda s: f"--padded-vocab-size {s.padded_vocab_size} is given and used as it is",
)

EXPERTS = unless(lambda s: s.num_experts, "there are no experts (--num-experts), so this changes nothing")
EXPERT_BIAS = (
    EXPERTS,
    unless(
        lambda s: s.moe_router_enable_expert_bias,
        "there is no bias to move (--moe-router-enable-expert-bias)",
    ),
)
SOFTMAX_SCORES = (
    EXPERTS,
    unless(
        lambda s: not s.moe_router_pre_softmax or s.moe_router_score_function == "softmax",
        "scores are sigmoid, so there is no softmax to place",
    ),
)
BALANCING_WEIGHT = (
    EXPERTS,
    unless(
        lambda s: s.moe_router_load_balancing_type == ("none",) or any(s.moe_aux_loss_coeff),
        "its weight is 0 (--moe-aux-loss-coeff), so it balances nothing",
    ),
)
BALANCING = (
    EXPERTS,
    unless(
        lambda s: s.moe_router_load_balancing_type != ("none",) or not any(s.moe_aux_loss_coeff),
        "no loss balances the experts (--moe-router-load-balancing-type none)",
    ),
)
