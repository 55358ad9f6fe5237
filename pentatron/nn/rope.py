"""Rotary position embedding."""

import torch
from torch import Tensor, nn

from pentatron.config.model import TransformerConfig
from pentatron.nn.rope_scaling import Frequencies, plain, scaled


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
