"""Rotary position embedding (RoPE), and scaling of its frequencies for longer sequences.

Each pair of channels rotates by its frequency per token. Scaling keeps high frequencies, which distinguish
close tokens, and lowers low frequencies by the factor of the length, so that no angle exceeds those seen in
training. Frequencies are computed in fp32 on the CPU: every device gets the same values, equal to those of
`transformers`.
"""

import math

import torch
from torch import Tensor, nn

from pentatron.settings.model import TransformerConfig

_CPU = torch.device("cpu")


def rope_frequencies(channels: int, base: float) -> Tensor:
    """Unscaled inverse frequency of each pair of channels."""
    return 1.0 / _wave_lengths(channels, base)


def _wave_lengths(channels: int, base: float) -> Tensor:
    """Wavelength of each pair in units of 2π tokens."""
    first = torch.arange(0, channels, 2, dtype=torch.float32, device=_CPU)
    return torch.pow(base, first / channels)


def _llama3(inverse: Tensor, config: TransformerConfig) -> Tensor:
    """Keeps wavelengths that fit `high` times into the original length, scales those that fit `low` times or
    less.
    """
    factor, original_length = config.rope_scaling_factor, config.rope_scaling_original_max_position_embeddings
    low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
    lengths = 2 * math.pi / inverse
    kept = (original_length / lengths - low) / (high - low)
    between = (1 - kept) * inverse / factor + kept * inverse
    slow = torch.where(lengths > original_length / low, inverse / factor, between)
    return torch.where(lengths < original_length / high, inverse, slow)


def _yarn(inverse: Tensor, config: TransformerConfig) -> Tensor:
    """Keeps the frequencies up to the pair that rotates `yarn_beta_fast` times within the original length,
    scales those from the pair on that rotates `yarn_beta_slow` times, and interpolates between.
    """
    pairs, base = inverse.numel(), config.rotary_base

    def pair(turns: float) -> float:
        waves = config.rope_scaling_original_max_position_embeddings / (turns * 2 * math.pi)
        return 2 * pairs * math.log(waves) / (2 * math.log(base))

    low, high = pair(config.yarn_beta_fast), pair(config.yarn_beta_slow)
    if config.yarn_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    # Avoids a division by zero.
    width = high - low if high != low else 0.001
    index = torch.arange(pairs, dtype=torch.float32, device=_CPU)
    kept = 1 - ((index - low) / width).clamp(0, 1)
    stretched = 1.0 / (config.rope_scaling_factor * _wave_lengths(2 * pairs, base))
    return stretched * (1 - kept) + inverse * kept


def yarn_attention_factor(config: TransformerConfig) -> float:
    """Factor of queries and keys that compensates for attention being spread over more tokens."""
    if config.yarn_attention_factor is not None:
        return config.yarn_attention_factor
    growth = 0.1 * math.log(config.rope_scaling_factor)
    if config.yarn_mscale and config.yarn_mscale_all_dim:
        return (config.yarn_mscale * growth + 1.0) / (config.yarn_mscale_all_dim * growth + 1.0)
    return growth + 1.0


class RotaryEmbedding(nn.Module):
    """Computes the cosines and sines of positions and rotates queries and keys with them."""

    inverse_frequencies: Tensor

    def __init__(self, inverse: Tensor, interleaved: bool, attention_factor: float = 1.0) -> None:
        super().__init__()
        self.rotated = 2 * inverse.numel()
        self.interleaved = interleaved
        self.attention_factor = attention_factor
        on_device = inverse.to(torch.get_default_device())
        self.register_buffer("inverse_frequencies", on_device, persistent=False)

    def forward(self, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of shape [B, 1, S, rotated/2], in fp32."""
        angles = positions_BS[..., None].float() * self.inverse_frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        if self.attention_factor == 1:
            return cos, sin
        return cos * self.attention_factor, sin * self.attention_factor

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates heads. The dimensions before the last may have any order if the angles broadcast."""
        # Most models rotate whole heads: without the slice, its copy in backward is saved.
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
    """Returns the rotary embedding of a model; None if its positions are not rotary."""
    if config.position_embedding_type != "rope":
        return None
    inverse = rope_frequencies(int(config.kv_channels * config.rotary_percent), config.rotary_base)
    factor = 1.0
    match config.rope_scaling_type:
        case "linear":
            inverse = inverse / config.rope_scaling_factor
        case "llama3":
            inverse = _llama3(inverse, config)
        case "yarn":
            inverse, factor = _yarn(inverse, config), yarn_attention_factor(config)
    return RotaryEmbedding(inverse, config.rotary_interleaved, factor)
