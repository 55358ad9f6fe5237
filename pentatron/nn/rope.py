"""Rotary position embedding."""

import torch
from torch import Tensor, nn


class RotaryEmbedding(nn.Module):
    """Turns positions into the cosines and sines that rotate queries and keys."""

    inverse_frequencies: Tensor

    def __init__(self, head_width: int, base: float, percent: float, interleaved: bool) -> None:
        super().__init__()
        self.rotated = int(head_width * percent)
        self.interleaved = interleaved
        exponents = torch.arange(0, self.rotated, 2, dtype=torch.float64) / self.rotated
        self.register_buffer("inverse_frequencies", (base**-exponents).float(), persistent=False)

    def forward(self, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of shape [B, 1, S, rotated/2], in fp32."""
        angles = positions_BS[..., None].float() * self.inverse_frequencies
        return angles.cos()[:, None], angles.sin()[:, None]

    def rotate(self, x_BNSH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, rest = x_BNSH[..., : self.rotated].float(), x_BNSH[..., self.rotated :]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        out = out.to(x_BNSH.dtype)
        return torch.cat((out, rest), dim=-1) if rest.shape[-1] else out
