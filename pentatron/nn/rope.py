"""Rotary position embedding."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pentatron.settings.model import TransformerConfig

# Rotary frequencies, and how they are stretched for sequences longer than a model was first trained on.
#
# A pair of channels turns by its frequency at every token. Pairs that turn often within the first length tell
# near tokens apart and are kept; slow ones would reach angles never seen, and are slowed down by the factor
# of the length. All is done in fp32 on the CPU, so that every device gets the same numbers, and the same as
# from `transformers`.


_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Frequencies:
    """Of each pair of channels, and what multiplies its cosine and sine."""

    inverse: Tensor
    attention_factor: float = 1.0


def plain(channels: int, base: float) -> Tensor:
    return 1.0 / _wave_lengths(channels, base)


def scaled(inverse: Tensor, config: TransformerConfig) -> Frequencies:
    """The frequencies stretched as the configuration says."""
    kind, factor = config.rope_scaling_type, config.rope_scaling_factor
    if kind is None:
        return Frequencies(inverse)
    if kind == "linear":
        return Frequencies(inverse / factor)
    first_length = config.rope_scaling_original_max_position_embeddings
    if kind == "llama3":
        bounds = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
        return Frequencies(_llama3(inverse, factor, first_length, *bounds))
    low, high = _yarn_range(2 * inverse.numel(), first_length, config)
    return Frequencies(_yarn(config.rotary_base, factor, inverse, low, high), yarn_attention_factor(config))


def _wave_lengths(channels: int, base: float) -> Tensor:
    """Of each pair, as multiples of 2π tokens."""
    first = torch.arange(0, channels, 2, dtype=torch.float32, device=_CPU)
    return torch.pow(base, first / channels)


def _llama3(inverse: Tensor, factor: float, first_length: int, low: float, high: float) -> Tensor:
    """Kept where at least `high` waves fit into the first length, stretched where at most `low` do."""
    lengths = 2 * math.pi / inverse
    kept = (first_length / lengths - low) / (high - low)
    between = (1 - kept) * inverse / factor + kept * inverse
    slow = torch.where(lengths > first_length / low, inverse / factor, between)
    return torch.where(lengths < first_length / high, inverse, slow)


def _yarn(base: float, factor: float, inverse: Tensor, low: float, high: float) -> Tensor:
    """Kept up to pair `low`, stretched from pair `high` on."""
    pairs = inverse.numel()
    # Where both are the same pair, the step between them is still finite.
    width = high - low if high != low else 0.001
    place = torch.arange(pairs, dtype=torch.float32, device=_CPU)
    kept = 1 - ((place - low) / width).clamp(0, 1)
    stretched = 1.0 / (factor * _wave_lengths(2 * pairs, base))
    return stretched * (1 - kept) + inverse * kept


def _yarn_range(channels: int, first_length: int, config: TransformerConfig) -> tuple[float, float]:
    """The pairs that turn `yarn_beta_fast` and `yarn_beta_slow` times within the first length."""

    def pair(turns: float) -> float:
        waves = first_length / (turns * 2 * math.pi)
        return channels * math.log(waves) / (2 * math.log(config.rotary_base))

    low, high = pair(config.yarn_beta_fast), pair(config.yarn_beta_slow)
    if config.yarn_truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, channels - 1)


def yarn_attention_factor(config: TransformerConfig) -> float:
    """Longer sequences spread attention over more tokens; larger queries and keys make up for it."""
    if config.yarn_attention_factor is not None:
        return config.yarn_attention_factor
    growth = 0.1 * math.log(config.rope_scaling_factor)
    if config.yarn_mscale and config.yarn_mscale_all_dim:
        return (config.yarn_mscale * growth + 1.0) / (config.yarn_mscale_all_dim * growth + 1.0)
    return growth + 1.0


class RotaryEmbedding(nn.Module):
    """Turns positions into the cosines and sines that rotate queries and keys."""

    inverse_frequencies: Tensor

    def __init__(self, frequencies: Frequencies, interleaved: bool) -> None:
        super().__init__()
        self.rotated = 2 * frequencies.inverse.numel()
        self.interleaved = interleaved
        self.attention_factor = frequencies.attention_factor
        inverse = frequencies.inverse.to(torch.get_default_device())
        self.register_buffer("inverse_frequencies", inverse, persistent=False)

    def forward(self, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of shape [B, 1, S, rotated/2], in fp32."""
        angles = positions_BS[..., None].float() * self.inverse_frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        if self.attention_factor == 1:
            return cos, sin
        return cos * self.attention_factor, sin * self.attention_factor

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads of any order of dimensions but the last, with angles that spread over them."""
        # Whole heads, as most models turn, are not cut: a slice of everything takes its time too, and its gradient a copy.
        whole = self.rotated == x.shape[-1]
        turned = (x if whole else x[..., : self.rotated]).float()
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        out = out.to(x.dtype)
        return out if whole else torch.cat((out, x[..., self.rotated :]), dim=-1)


def build_rope(config: TransformerConfig) -> RotaryEmbedding | None:
    """What rotates queries and keys, if the model's positions are rotary."""
    if config.position_embedding_type != "rope":
        return None
    inverse = plain(int(config.kv_channels * config.rotary_percent), config.rotary_base)
    return RotaryEmbedding(scaled(inverse, config), config.rotary_interleaved)
